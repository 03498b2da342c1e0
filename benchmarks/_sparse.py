"""A mixture of 235 billion parameters in sparse segment files, on a machine that could not hold it.

    python benchmarks/_sparse.py [LAYERS]

Trains adapters of rank 8 for one step of 16 tokens on a CPU device, a layer a stage. The weights
are zeros that take no disk space, but they are mapped, brought up and let go of like any others.
Prints what runs and, in the end, the most memory that the process has held: two layers of 5 GB in
the device's slots, and with all 94 layers 0.4 GB of adapters, masters, moments and gradients.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from _miniature import Miniature, layer_by_layer
from peft import LoraConfig, get_peft_model
from torch import nn

import roundpipe
from roundpipe.engine.compute import Compute
from roundpipe.models.loading.skeleton import build, hang, split_names
from roundpipe.store.frozen import Base
from roundpipe.store.mapped import MappedSegment
from roundpipe.store.segment import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS, RANK = 16, 8


def mapped_model(small: Miniature, folder: Path) -> tuple[nn.Module, list[Base]]:
    """A model on sparse files, one for each layer."""
    model: Any = build(small.config, small.dtype, None)
    parameters = dict(model.named_parameters())
    bases = []
    for index, (_, names) in enumerate(split_names(model)):
        if not names:
            continue
        shapes = [(name, tuple(parameters[name].shape), parameters[name].dtype) for name in names]
        layout = Layout.of(shapes)
        path = folder / f"{index:04}.segment"
        with path.open("wb") as file:
            file.truncate(layout.num_bytes)
        segment = MappedSegment(path, layout)
        tensors: dict[str, torch.Tensor] = {
            name: nn.Parameter(segment.views[name], requires_grad=False) for name in names
        }
        hang(model, tensors)
        bases.append(Base(segment, tensors, let_go=segment.let_go))
    model.model.rotary_emb = type(model.model.rotary_emb)(small.config)
    settings = LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return get_peft_model(model.train(), settings, autocast_adapter_dtype=False), bases


def held_gigabytes(key: str = "VmHWM") -> float:
    """The most that this process has held in memory, mapped files included; VmRSS: that it does."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{key}:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) * 1024 / 1e9


@contextlib.contextmanager
def told(begin: float) -> Iterator[None]:
    """Print what computes, and what the process holds then."""
    plain = Compute.run

    def telling(compute: Compute, *given: Any) -> None:
        run, action = given
        visit = run.program.schedule.visits[action.index]
        what = f"{action.op.name.lower()} of layer {visit.layers.start}"
        holds = f"holds {held_gigabytes('VmRSS'):.2f} GB, at most {held_gigabytes():.2f} GB"
        print(f"{time.perf_counter() - begin:6.0f} s  {what}, {holds}", flush=True)
        plain(compute, *given)

    Compute.run = telling  # type: ignore[method-assign]
    try:
        yield
    finally:
        Compute.run = plain  # type: ignore[method-assign]


def main() -> None:
    """Run it and print."""
    num_layers = int(sys.argv[1]) if len(sys.argv) > 1 else 94
    torch.set_num_threads(1)
    small = Miniature(layers=num_layers)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model, bases = mapped_model(small, Path(folder))
        size = sum(base.segment.layout.num_bytes for base in bases)
        print(f"{size / 1e9:.1f} GB mapped, held {held_gigabytes():.2f} GB", flush=True)
        with roundpipe.RoundPipe(model, devices=["cpu"], bases=bases) as ours:
            said = f"wrapped in {time.perf_counter() - begin:.0f} s"
            print(f"{said}, held {held_gigabytes():.2f} GB", flush=True)
            ids = torch.arange(TOKENS).unsqueeze(0)
            begin = time.perf_counter()
            with told(begin):
                loss = ours.forward_backward(
                    input_kwargs={"input_ids": ids, "labels": ids},
                    run_config=roundpipe.RoundPipeRunConfig(
                        num_microbatch=1, execute_plan=layer_by_layer(num_layers)
                    ),
                )
                ours.step(roundpipe.optim.AdamW(ours.optim_parameters()))
                ours.synchronize()
            print(
                f"one step in {time.perf_counter() - begin:.0f} s, loss {float(loss):.3f},"
                f" held {held_gigabytes():.2f} GB",
                flush=True,
            )


if __name__ == "__main__":
    main()
