"""Do the operations of a mixture's layer, and its time, grow with the number of experts?

    python benchmarks/experts.py [--json FILE]

One layer's experts, forward and backward, once with 8 and once with 128 of them: the same tokens,
each sent to 8 experts, so the same products in all. Four subjects: experts in grouped products as a
shell runs them, one after the other ("eager" in transformers); and both with adapters on their
stacks, in grouped products beside them as a shell runs them, and as peft does. Operations are what
PyTorch dispatches; time is the median of turns taken one after the other, in one thread.

Exit code 1 where operations of the first or the third grow with the number of experts, or where
their time grows more than that of the second or the fourth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from roundpipe.models.shell import TensorNames, TreeCopy, find_homes

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = (8, 128)
TOKENS, TOP_K, HIDDEN, INNER, RANK = 512, 8, 256, 64, 16
TURNS = 15


class Operations(TorchDispatchMode):
    """How many operations ran, and the bytes of the largest tensor that one made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.count += 1
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return result


class Layer(nn.Module):
    """Nothing but the experts of a Qwen3 mixture."""

    def __init__(self, number: int, implementation: str) -> None:
        super().__init__()
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=number)
        config._experts_implementation = implementation
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.05)
            parameter.requires_grad_(False)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """As the experts'."""
        result: torch.Tensor = self.experts(*given)
        return result


def with_adapters(layer: Layer) -> nn.Module:
    """Put peft's adapters on both stacks."""
    names = ["experts.gate_up_proj", "experts.down_proj"]
    settings = LoraConfig(r=RANK, target_modules=[], target_parameters=names)
    model: nn.Module = get_peft_model(layer, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def as_shell(model: nn.Module) -> nn.Module:
    """The module as a device runs it, over the same tensors."""
    names = TensorNames(model)
    tree = TreeCopy(model, names, torch.device("cpu"), homes=find_homes(model, names))
    for name, leaf in tree.parameters.items():
        leaf.data = names.tensors[name].data
    return tree.module


SUBJECTS: dict[str, Callable[[int], nn.Module]] = {
    "grouped": lambda number: as_shell(Layer(number, "grouped_mm")),
    "one by one": lambda number: Layer(number, "eager"),
    "adapters, grouped": lambda number: as_shell(with_adapters(Layer(number, "grouped_mm"))),
    "adapters, peft": lambda number: with_adapters(Layer(number, "grouped_mm")),
}


def step(module: nn.Module, number: int) -> Callable[[], None]:
    """Forward and backward of fixed tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weights, index = torch.rand(TOKENS, number, generator=generator).topk(TOP_K, dim=-1)
    weights = weights.requires_grad_()
    gradient = torch.randn(TOKENS, HIDDEN, generator=generator)
    trained = [p for p in module.parameters() if p.requires_grad]

    def run() -> None:
        torch.autograd.grad(module(hidden, index, weights), [hidden, weights, *trained], gradient)

    return run


def measure() -> dict[str, dict[str, Any]]:
    """Count and time every subject with both numbers of experts."""
    steps = {(name, n): step(make(n), n) for name, make in SUBJECTS.items() for n in NUMBERS}
    found: dict[str, dict[str, Any]] = {name: {} for name in SUBJECTS}
    for (name, number), run in steps.items():
        run()
        with Operations() as seen:
            run()
        found[name][f"operations_{number}"] = seen.count
        found[name][f"largest_bytes_{number}"] = seen.largest
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(TURNS):
        for key, run in steps.items():
            begin = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - begin)
    for (name, number), seconds in times.items():
        found[name][f"seconds_{number}"] = statistics.median(seconds)
    for each in found.values():
        few, many = (each[f"seconds_{number}"] for number in NUMBERS)
        each["growth"] = many / few
    return found


def misses(found: dict[str, dict[str, Any]]) -> list[str]:
    """What does not hold."""
    wrong = []
    for ours, theirs in (("grouped", "one by one"), ("adapters, grouped", "adapters, peft")):
        few, many = (found[ours][f"operations_{number}"] for number in NUMBERS)
        if few != many:
            wrong.append(f"{ours}: {few} operations, then {many}")
        if found[ours]["growth"] > found[theirs]["growth"]:
            wrong.append(f"{ours}: time grows more than {theirs}")
    return wrong


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft and transformers
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = measure()
    print(f"{'experts':20} {'operations':>12} {'ms':>14} {'growth':>7} {'largest MB':>13}")
    for name, each in found.items():
        operations, largest = (
            [each[f"{key}_{n}"] for n in NUMBERS] for key in ("operations", "largest_bytes")
        )
        milliseconds = [each[f"seconds_{n}"] * 1e3 for n in NUMBERS]
        print(
            f"{name:20} {operations[0]:5} {operations[1]:6}"
            f" {milliseconds[0]:6.1f} {milliseconds[1]:7.1f} {each['growth']:6.2f}x"
            f" {largest[0] / 1e6:5.1f} {largest[1] / 1e6:7.1f}"
        )
    wrong = misses(found)
    for line in wrong:
        print(f"missed: {line}")
    if given.json:
        given.json.write_text(json.dumps({"subjects": found, "misses": wrong}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
