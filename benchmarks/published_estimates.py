"""What a config alone tells of the published models: layer times, speeds, longest sequences.

Counts of each model meet one card (RTX 4090, fp16 added up in fp16); the only numbers that were
fitted are two in ``roundpipe.models.estimate.rates``, to the two times of a layer of Llama 3.1 8B.
Speeds come from these times by the schedule of ``published_speed.py``.

The longest sequence is the one at which single layers fit as stages, one sequence a microbatch, in
twice their weights and gradients, what they keep, their worst moment and the boundaries on their
way. Exits with 1 where 1.7B or 32B are off by more than 20 %.
``python benchmarks/published_estimates.py``.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from planner_choice import LORA_RANK, SAMPLES, published
from published_speed import GPUS, JUDGED, REPORTED, Job, tokens_per_second

from roundpipe.models.estimate import Job as Estimated
from roundpipe.models.estimate import Lora, Method, Profile, costs, profile
from roundpipe.plan.cards import card_named
from roundpipe.plan.memory import slot_bytes, stage_bytes
from roundpipe.plan.schedule import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.plan.costs import Costs

FITTED = "llama3.1-8b"
MOST_ERROR = 20.0  # %
WITHOUT_FUSED_ATTENTION = ("gpt-oss-20b",)  # transformers has no such kernel for it
THOUSAND = 1024
_LONGEST = 512  # thousand tokens: looked for up to here


def counted(name: str) -> Profile:
    """A published model as it was trained: adapters on the largest, all weights of the others."""
    is_full = published()["setup"]["method"][name] == "full"
    method = Method() if is_full else Method(name="lora", lora=Lora(r=LORA_RANK))
    return profile(name, method, fuse=name in WITHOUT_FUSED_ATTENTION)


def estimated(found: Profile, *, length: int, sequences: int = 1) -> Costs:
    """What its layers cost on the published card."""
    job = Estimated(dtype="fp16", fp16_accumulation=True, length=length, microbatch_size=sequences)
    return costs(found, card_named("4090").at_work(), job)


def layer_times(name: str, of: Costs) -> Iterator[tuple[str, float, float]]:
    """What, milliseconds by the estimate, milliseconds published."""
    times = published()["layer_times_ms_one_4090"][name]
    for prefix, layer in (("", of.layers[len(of.layers) // 2]), ("head_", of.layers[-1])):
        yield f"{prefix}forward", 1e3 * layer.forward_seconds, times[f"{prefix}forward"]
        yield f"{prefix}backward", 1e3 * layer.backward_seconds, times[f"{prefix}backward"]


def error(found: float, given: float) -> float:
    """In percent of what is given."""
    return 100 * (found / given - 1)


def speeds(name: str, of: Costs) -> Iterator[tuple[Job, float]]:
    """Each published run and its tokens per second from estimated layers."""
    for devices in GPUS:
        job = Job.of(name, devices)
        yield job, tokens_per_second(job, of)


def longest(found: Profile, limit: int, *, head: str) -> int:
    """Thousand tokens of the longest sequence in ``limit`` bytes of a device; 0: none fits.

    ``head``: ``chunks``, as it is run; ``whole``, as a causal LM of transformers runs it by itself:
    logits and their fp32 copies all at once; ``pieces``: what is left of them are logits of the
    whole sequence, once, in 16 bits.
    """
    if head != "chunks":
        found = all_at_once(found)

    def is_too_long(thousand: int) -> bool:
        of = estimated(found, length=thousand * THOUSAND)
        return max(needs(of, thousand * THOUSAND, head=head)) > limit

    return bisect_right(range(1, _LONGEST + 1), x=False, key=is_too_long)


def all_at_once(found: Profile) -> Profile:
    """The same without what changes for many tokens: no layer runs in pieces."""
    regimes = [
        replace(each, kinds=tuple(replace(kind, beyond=None) for kind in each.kinds))
        for each in found.regimes
    ]
    return replace(found, regimes=tuple(regimes))


def needs(of: Costs, length: int, *, head: str) -> Iterator[int]:
    """Bytes of a device that runs each layer as a stage of its own, decoder layers first."""
    last = of.num_layers - 1
    for layer in range(last):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            yield stage_bytes(of, range(layer, layer + 1), phase)
    top = range(last, last + 1)
    if head in ("chunks", "whole"):
        yield stage_bytes(of, top, Phase.FUSED)
    else:
        hidden = of.layers[last].boundary_bytes // (2 * length)
        logits = of.layers[last].weight_bytes // (2 * hidden) * 2 * length
        yield 2 * slot_bytes(of, top, Phase.FUSED) + logits


def times_table(names: tuple[str, ...]) -> Iterator[str]:
    yield "| model | forward ms | backward ms | head forward ms | head backward ms |"
    yield "|---|---|---|---|---|"
    for name in names:
        of = estimated(counted(name), length=2048, sequences=SAMPLES)
        cells = [
            f"{ours:.1f} ({given:.1f}, {error(ours, given):+.0f} %)"
            for _, ours, given in layer_times(name, of)
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def speeds_table(names: tuple[str, ...]) -> Iterator[str]:
    yield f"| model | {' | '.join(f'on {devices}' for devices in GPUS)} |"
    yield f"|---|{'---|' * len(GPUS)}"
    for name in names:
        of = estimated(counted(name), length=2048, sequences=SAMPLES)
        cells = [
            f"{found:,.0f} ({job.speed:,.0f}, {error(found, job.speed):+.1f} %)"
            for job, found in speeds(name, of)
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def lengths_table() -> Iterator[str]:
    """Thousand tokens that fit one sequence a microbatch, beside published ones."""
    given = published()["max_sequence_length_k_tokens_8x4090"]
    limit = card_named("4090").usable_bytes
    yield "| model | ours | published | head in pieces | whole head | another offloader |"
    yield "|---|---|---|---|---|---|"
    for at, name in enumerate(given["order"]):
        found = counted(name)
        ours, pieces, whole = (
            longest(found, limit, head=head) for head in ("chunks", "pieces", "whole")
        )
        yield (
            f"| {name} | {ours}k | {given['roundpipe'][at]}k | {pieces}k | {whole}k "
            f"| {given['mobius'][at] or '–'}k |"
        )


def missed() -> list[str]:
    """What of the models that were not fitted is off by more than it may be."""
    found = []
    for name in JUDGED:
        if name == FITTED:
            continue
        of = estimated(counted(name), length=2048, sequences=SAMPLES)
        rows = [row for row in layer_times(name, of) if not row[0].startswith("head_")]
        rows += [(f"on {job.devices}", ours, job.speed) for job, ours in speeds(name, of)]
        found += [
            f"{name} {what}: {ours:,.1f}, published {given:,.1f}"
            for what, ours, given in rows
            if abs(error(ours, given)) > MOST_ERROR
        ]
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    names = (*JUDGED, *REPORTED)
    print("Layer times of 4 sequences of 2,048 (published, error)")
    print("\n".join(times_table(names)))
    print("\nTokens per second (published, error)")
    print("\n".join(speeds_table(names)))
    print("\nLongest sequence on 24 GB")
    print("\n".join(lengths_table()))
    wrong = missed()
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
