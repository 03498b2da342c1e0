"""Three layers of a published mixture of 235 billion parameters, with head, at 31,744 tokens.

Adapters of rank 32, one sequence to a microbatch, under 24 GB: what one device holds at most,
beside what the plan counts from the config alone. On a card the figure is the allocator's. On the
CPU it is counted: the arenas of weights and gradients, and every storage that the compute stream
makes for as long as it lives; there all sides but the number of layers and experts are a sixteenth,
so that whatever goes with tokens times width, and every weight, is a 256th.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import roundpipe
from roundpipe.engine.compute import Compute
from roundpipe.models import chunked_loss, grouped
from roundpipe.models.estimate import Job, Lora, Method, costs
from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.meter import Meter
from roundpipe.plan.machine import Card
from roundpipe.plan.schedule_memory import schedule_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.plan.costs import Costs

_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Miniature:
    """What runs. ``on_experts``: adapters on all routed experts too, not on attention alone."""

    hidden: int = 4096
    heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    inner: int = 1536
    experts: int = 128
    vocabulary: int = 151_936
    tokens: int = 31_744
    rank: int = 32
    layers: int = 3
    dtype: torch.dtype = torch.bfloat16
    limit_bytes: int = 24_000_000_000
    on_experts: bool = False
    divisor: int = 1  # of widths and tokens

    def scaled(self, divisor: int = 16, *, heads: int = 16) -> Miniature:
        """Widths and tokens by ``divisor``, all bytes by its square; fp32 takes twice of them."""
        square = divisor**2 // 2
        return replace(
            self,
            hidden=self.hidden // divisor,
            heads=heads,
            head_dim=self.heads * self.head_dim // divisor // heads,
            inner=self.inner // divisor,
            vocabulary=self.vocabulary // divisor,
            tokens=self.tokens // divisor,
            rank=max(self.rank // divisor, 1),
            dtype=torch.float32,
            limit_bytes=self.limit_bytes // square,
            divisor=divisor,
        )

    @property
    def config(self) -> Any:
        """For transformers."""
        return make_config(
            {
                "model_type": "qwen3_moe",
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "intermediate_size": self.inner,
                "moe_intermediate_size": self.inner,
                "num_experts": self.experts,
                "num_experts_per_tok": 8,
                "vocab_size": self.vocabulary,
                "num_hidden_layers": self.layers,
                "max_position_embeddings": 40_960,
                "tie_word_embeddings": False,
            }
        )

    @property
    def method(self) -> Method:
        """For the estimate."""
        stacks = _STACKS if self.on_experts else ()
        lora = Lora(r=self.rank, target_modules=_ATTENTION, target_parameters=stacks)
        return Method(name="lora", lora=lora)


@dataclass(frozen=True)
class Held:
    """Bytes of one device. ``loss`` tells that it trained."""

    first: int  # of the first step, planned when nothing was known of activations
    peak: int  # of the last one
    planned: int | None  # by its plan, from the config; None: nobody asked
    measured: int  # by its plan, from what was weighed
    limit: int
    loss: float
    plan: str

    @property
    def fits(self) -> bool:
        """Whether all steps stayed within the limit, and the last one within its plan."""
        counted = min(self.planned or self.measured, self.measured)
        return self.peak <= counted <= self.limit and self.first <= self.limit


def run(small: Miniature, device: str, *, steps: int = 3, asks_config: bool = True) -> Held:
    """Train a few steps as the planner likes within the limit, and see what the device held.

    ``asks_config``: whether to count from the config too, which takes a while if all is small.
    """
    microbatches = 2
    on = torch.device(device)
    with _pieces_of(small.divisor), _Counting(on) as counting:
        limit = small.limit_bytes
        ours = roundpipe.RoundPipe(_model(small), devices=[device], device_memory_limit=limit)
        with ours:
            optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-4)
            loss, peaks = torch.tensor(0.0), []
            for _ in range(steps):
                counting.restart()
                ids = torch.randint(0, small.vocabulary, (microbatches, small.tokens))
                loss = ours.forward_backward(
                    input_kwargs={"input_ids": ids, "labels": ids},
                    run_config=roundpipe.RoundPipeRunConfig(num_microbatch=microbatches),
                )
                ours.step(optimizer)
                ours.synchronize()
                peaks.append(counting.peak(ours))
            measured = _by_the_plan(ours, ours.planner.costs, microbatches)
            known = _costs_of(small) if asks_config else None
            planned = None if known is None else _by_the_plan(ours, known, microbatches)
            plan = str(ours.plan.partition)
    return Held(peaks[0], peaks[-1], planned, measured, limit, float(loss), plan)


def layer_by_layer(num_blocks: int) -> roundpipe.ModelExecutePlan:
    """The head fused, every block a stage; embedding below."""
    blocks = [range(layer, layer + 1) for layer in range(1, num_blocks + 1)]
    head = range(num_blocks + 1, num_blocks + 2)
    return roundpipe.ModelExecutePlan([range(1), *blocks], [head, *reversed(blocks)])


def _by_the_plan(ours: Any, known: Costs, microbatches: int) -> int:
    """What the visits that ran take by these costs."""
    made = ours.plan.computation(known, devices=1, microbatches=microbatches)
    return schedule_bytes(known, made.visits, devices=1)


def _costs_of(small: Miniature) -> Costs:
    """What the layers take by the config; times are of no card."""
    dtype, bits = ("fp32", 32) if small.dtype == torch.float32 else ("bf16", 16)
    profile = count(small.config, small.method, name="miniature", bits=bits)
    card = Card(name="any", memory_bytes=1, flops={"fp32": 1e12, "bf16": 1e12}, bandwidth=1e12)
    return costs(profile, card, Job(dtype=dtype, length=small.tokens))


def _model(small: Miniature) -> nn.Module:
    """The model with adapters, filled with a repeated random block: drawing it all takes minutes.

    The experts of a layer differ, whatever the repetition: the block's length divides none of them.
    """
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (takes seconds)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    config = small.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=small.dtype)
    rotary = type(model.model.rotary_emb)
    model = model.to_empty(device="cpu").train()
    model.model.rotary_emb = rotary(config)
    torch.manual_seed(0)
    block = torch.randn(1_000_003).to(small.dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        for piece in parameter.view(-1).split(block.numel()):
            torch.mul(block[: piece.numel()], parameter.shape[-1] ** -0.5, out=piece)
    settings = LoraConfig(
        r=small.rank,
        lora_alpha=2 * small.rank,
        target_modules=list(_ATTENTION),
        target_parameters=list(_STACKS) if small.on_experts else None,
    )
    adapted: nn.Module = get_peft_model(model, settings, autocast_adapter_dtype=False)
    return adapted


@contextlib.contextmanager
def _pieces_of(divisor: int) -> Iterator[None]:
    """Cut experts' tokens and the head's as often as at full size."""
    smaller = [
        (grouped, "PIECE_BYTES", divisor**2 // 2 or 1),
        (chunked_loss, "WHOLE_BYTES", divisor**2),
        (chunked_loss, "TRAINED_ROWS", divisor),
        (chunked_loss, "FROZEN_ROWS", divisor),
        (chunked_loss, "_TILE", divisor),
    ]
    before = [getattr(module, name) for module, name, _ in smaller]
    try:
        for module, name, by in smaller:
            setattr(module, name, getattr(module, name) // by)
        yield
    finally:
        for (module, name, _), value in zip(smaller, before, strict=True):
            setattr(module, name, value)


class _Counting:
    """What a device holds at most. On the CPU every action of the compute stream is metered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run = Compute.run
        self._meter = Meter((), torch.float32)
        self._most = 0

    def __enter__(self) -> _Counting:
        if self._device.type == "cpu":
            counting, plain = self, self._run

            def metered(compute: Compute, *given: Any) -> None:
                for arena in (compute.model.weights.buffer, compute.model.sums.buffer):
                    if arena is not None:
                        counting._meter.leave_out(arena)
                with counting._meter:
                    plain(compute, *given)
                alive = counting._meter.restart().alive
                counting._most = max(counting._most, max(alive, default=0))

            Compute.run = metered  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Compute.run = self._run  # type: ignore[method-assign]

    def restart(self) -> None:
        """Forget what was held so far."""
        self._most = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self, ours: Any) -> int:
        """Bytes at most since then."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return int(self._most + ours._pool.devices[0].peak_bytes)


def main() -> int:
    """Run the scaled ones on the CPU and print; 1 if one does not fit."""
    torch.set_num_threads(1)
    fits = []
    for on_experts in (False, True):
        held = run(Miniature(on_experts=on_experts).scaled(), "cpu")
        what = "attention and experts" if on_experts else "attention"
        of = (held.first, held.peak, held.planned or 0, held.measured, held.limit)
        said = "held {:.1f} MB at first, then {:.1f}; plan {:.1f}, as weighed {:.1f}; limit {:.1f}"
        print(f"adapters on {what}: {said.format(*(each / 1e6 for each in of))}")
        print(f"  loss {held.loss:.3f}; {held.plan}")
        fits.append(held.fits)
    return 0 if all(fits) else 1


if __name__ == "__main__":
    sys.exit(main())
