"""The plan of a forecast: which size of microbatch, what host memory allows, what bounds it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import PlanError
from roundpipe.finetune.forecast.memory import single_layers
from roundpipe.finetune.forecast.speed import (
    _all_seconds,
    _relatives,
    arithmetic_words,
    best_speed,
    bound_seconds,
    likely_sizes,
    quick_seconds,
    setting_of,
)
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.score import Scores

if TYPE_CHECKING:
    from types import ModuleType


def test_each_device_gets_a_microbatch_where_the_batch_allows_it(small: ModuleType) -> None:
    case = small.small_case("4x3090,64GB", batch=16)
    assert all(case.microbatches(size) >= 4 for size in likely_sizes(case))
    assert likely_sizes(replace(case, batch_size=2)) == [1]


def test_the_plan_is_within_memory_and_no_quicker_than_possible(small: ModuleType) -> None:
    case = small.small_case()
    found = best_speed(case, sizes=likely_sizes(case))
    assert found.device.total <= case.device_limit
    assert case.host_total(found.host, found.device) <= case.machine.host.memory_bytes
    assert 0 < found.busy <= 1
    # Fused layers are not recomputed, so a plan may beat the full-recompute bound by 4 to 3.
    assert found.seconds >= 0.74 * bound_seconds(case, size=found.size)
    assert found.tokens_per_second == pytest.approx(8 * 1024 / found.seconds)


def test_a_plan_that_host_memory_does_not_hold_gives_way(small: ModuleType) -> None:
    case = small.small_case("4x3090,64GB", batch=32)
    free = best_speed(case, "hybrid", sizes=[1])
    needs = case.host_total(free.host, free.device)
    assert free.host.partial_sums > 0
    host = replace(case.machine.host, memory_bytes=needs - 1)
    poor = replace(case, machine=replace(case.machine, host=host))
    found = best_speed(poor, "hybrid", sizes=[1])
    assert case.host_total(found.host, found.device) < needs
    assert found.seconds >= free.seconds
    assert (
        ("hybrid", free.seconds) in found.plan.alternatives
        or (
            "replicated",
            free.seconds,
        )
        in found.plan.alternatives
        or found.plan.candidate.name(4) == free.plan.candidate.name(4)
    )


def test_where_nothing_fits_the_least_is_told(small: ModuleType) -> None:
    case = small.small_case("2x3090,1GB", batch=64)
    host = replace(case.machine.host, memory_bytes=10**6)
    poor = replace(case, machine=replace(case.machine, host=host))
    found = best_speed(poor, sizes=[1])
    plain = best_speed(small.small_case("2x3090,64GB", batch=64), "round_robin", sizes=[1])
    assert found.host.partial_sums == 0
    assert found.host.total <= plain.host.total


def test_cpu_devices_are_dealt_to_in_turn(small: ModuleType) -> None:
    case = small.small_case("2xcpu,24GB", dtype="fp32", length=128, batch=64)
    found = best_speed(case, sizes=[1])
    assert found.plan.candidate.name(2) == "round_robin"


def test_one_card_that_always_computes_is_bound_by_compute(small: ModuleType) -> None:
    found = best_speed(small.small_case("1x3090,64GB", batch=16, length=4096), sizes=[1])
    assert found.busy > 0.9
    assert found.bound == "compute (bf16, fp32 accumulate)"


def test_python_bounds_a_step_of_tiny_microbatches(small: ModuleType) -> None:
    case = small.small_case("8x4090,512GB", batch=64, length=32)
    found = best_speed(case, "round_robin", sizes=[1])
    assert found.seconds >= found.setting.python_seconds
    assert found.bound.startswith("Python")


def test_few_microbatches_leave_devices_waiting(small: ModuleType) -> None:
    case = small.small_case("8x4090,512GB", batch=2, length=4096)
    found = best_speed(case, "round_robin", sizes=[1])
    assert found.busy < 0.9
    assert found.bound.startswith("waiting between stages")


def test_no_device_holds_what_is_too_large(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB", batch=512, length=8192)
    assert quick_seconds(setting_of(case, 512)) == float("inf")
    with pytest.raises(PlanError):
        best_speed(case, sizes=[512])


@pytest.mark.parametrize(
    ("machine", "job", "words"),
    [
        ("1x4090,64GB", {"dtype": "bf16"}, "bf16, fp32 accumulate"),
        (
            "1x4090,64GB",
            {"dtype": "fp16", "fp16_accumulation": True},
            "fp16, fp16 accumulate",
        ),
        ("1xcpu,64GB", {"dtype": "fp32"}, "fp32"),
    ],
)
def test_arithmetic_in_words(small: ModuleType, machine: str, job: dict, words: str) -> None:
    assert arithmetic_words(small.small_case(machine, **job)) == words


def test_relatives_in_rounds_keep_the_replicas(small: ModuleType) -> None:
    case = small.small_case("4x3090,64GB", method="lora", batch=64)
    setting = setting_of(case, 1)
    shared = Candidate(single_layers(setting.costs)).with_replicas(2, 4, 4)
    every = list(_relatives(shared, setting, shares=True))
    assert replace(shared, rounds=4) in every
    assert replace(shared, rounds=4) not in _relatives(shared, setting, shares=False)


def test_more_microbatches_than_are_played_take_their_share_of_time(small: ModuleType) -> None:
    setting = setting_of(small.small_case("4x3090,64GB", batch=1024), 1)
    rounds = Candidate(single_layers(setting.costs), rounds=256)  # of a microbatch for each device
    played = Scores(setting).of(rounds)
    assert _all_seconds(setting, rounds) == pytest.approx(played, rel=0.03)
