"""The published models as costs: their layer times, and sizes worked out from their shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import Partition

_FILE = Path(__file__).parents[1] / "tests" / "reference" / "published.json"
_TOKENS = 4 * 2048  # of one microbatch
_ACTIVATIONS = 34  # bytes of 16-bit activations per token and hidden unit that a layer keeps
_UPDATE_BYTES = 28  # of host memory traffic per parameter

SHORT = {
    "1.7B": "qwen3-1.7b",
    "8B": "llama3.1-8b",
    "20B": "gpt-oss-20b",
    "32B": "qwen3-32b",
}
_TIED = ("qwen3-1.7b",)


@dataclass(frozen=True)
class Published:
    """One model, fully trained in 16 bits: layer 0 is the embedding, the last one the head."""

    name: str
    costs: Costs
    partition: Partition
    microbatches: int  # of a step, in all rounds
    rounds: int


def published(short: str) -> Published:
    """The model that ``short`` (``8B``) means; not the one that is trained by LoRA."""
    data = json.loads(_FILE.read_text())
    name = SHORT[short]
    costs = _costs(data["models"][name], data["layer_times_ms_one_4090"][name], name in _TIED)
    rounds = data["setup"]["rounds_per_step"][name]
    return Published(
        name,
        costs,
        _partition(data["partitions_used_in_their_simulation"][name], costs.num_layers),
        data["setup"]["microbatches_per_round"][name] * rounds,
        rounds,
    )


def eight_4090s(host_bandwidth: float = 150e9) -> Machine:
    """The published machine: 24-26 GB/s one way, about half while the other way runs."""
    return Machine(
        cards=(Card(name="4090", memory_bytes=24 << 30, flops={}, bandwidth=1e12),) * 8,
        links=(Link(up=25e9, down=25e9, duplex=0.52),) * 8,
        host=Host(memory_bytes=800 * 10**9, bandwidth=host_bandwidth),
        text="8x4090",
    )


def _costs(shape: dict[str, int], times: dict[str, float], is_tied: bool) -> Costs:
    boundary = _TOKENS * shape["hidden"] * 2
    block = _trained(_block_parameters(shape))
    table = _trained(shape["vocab"] * shape["hidden"])
    layer = LayerCost(
        forward_seconds=times["forward"] / 1e3,
        backward_seconds=times["backward"] / 1e3,
        boundary_bytes=boundary,
        activation_bytes=_ACTIVATIONS * _TOKENS * shape["hidden"],
        peak_bytes=boundary,
        **block,
    )
    head: dict[str, Any] = {**table, "borrows": (0,), "update_bytes": 0} if is_tied else dict(table)
    layers = (
        LayerCost(forward_seconds=0.0, backward_seconds=0.0, **table),
        *(layer,) * shape["layers"],
        LayerCost(
            forward_seconds=times["head_forward"] / 1e3,
            backward_seconds=times["head_backward"] / 1e3,
            boundary_bytes=boundary,
            activation_bytes=_TOKENS * shape["vocab"] * 2,
            peak_bytes=_TOKENS * shape["vocab"] * 2,
            **head,
        ),
    )
    owners = range(len(layers) - 1) if is_tied else range(len(layers))
    return Costs(layers, frozenset(owners))


def _trained(parameters: int) -> dict[str, int]:
    return {
        "weight_bytes": 2 * parameters,
        "gradient_bytes": 4 * parameters,
        "download_bytes": 2 * parameters,
        "update_bytes": _UPDATE_BYTES * parameters,
        "publish_bytes": 6 * parameters,
    }


def _block_parameters(shape: dict[str, int]) -> int:
    attention = shape["heads"] + shape["kv_heads"]
    return shape["hidden"] * (
        2 * attention * shape["head_dim"] + 3 * shape["intermediate"] * shape["experts"]
    )


def _partition(given: dict[str, Any], num_layers: int) -> Partition:
    """Stages from counts of decoder layers; the embedding belongs to those at the bottom."""
    forward = _counts(given["forward"])
    backward = _counts(given["backward"])[::-1]  # bottom up
    starts = [range(a + 1, b + 1) for a, b in _cumulated(forward)]
    up = [range(a + 1, b + 1) for a, b in _cumulated(backward)]
    starts[0], up[0] = range(starts[0].stop), range(up[0].stop)
    return Partition(tuple(starts), range(num_layers - 1, num_layers), tuple(up[::-1]))


def _counts(given: list[Any] | str) -> list[int]:
    """Of ``["head", 3, 3]`` or ``"2, 2, then 2 stages of 3"``."""
    if not isinstance(given, str):
        return [count for count in given if count != "head"]
    counts: list[int] = []
    for part in given.replace("then", ",").split(","):
        words = part.split()
        if len(words) > 1:
            counts += [int(words[-1])] * int(words[0])
        elif words and words[0] != "head":
            counts.append(int(words[0]))
    return counts


def _cumulated(counts: list[int]) -> list[tuple[int, int]]:
    edges = [sum(counts[:at]) for at in range(len(counts) + 1)]
    return list(pairwise(edges))
