from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roundpipe.finetune.forecast.memory import few_stages, single_layers
from roundpipe.finetune.forecast.speed import setting_of
from roundpipe.models.estimate import Job, profile
from roundpipe.plan.host_bytes import host_bytes
from roundpipe.plan.machine_text import parse_machine
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.score import Scores

if TYPE_CHECKING:
    from types import ModuleType


def test_the_longest_sequence_fits_and_one_token_more_does_not(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB")
    for batch in (1, 8):
        longest = case.longest(batch=batch)
        fits, not_any_more = (
            case.least_device(size=1, length=length, batch=batch).total <= case.device_limit
            for length in (longest, longest + 1)
        )
        assert (fits, not_any_more) == (True, False)
    # One device keeps what its next stage reads, of every microbatch.
    assert case.longest(batch=8) < case.longest(batch=1) == case.longest()


def test_host_memory_can_be_what_ends_the_longest_sequence(small: ModuleType) -> None:
    roomy, poor = small.small_case("2x3090,64GB"), small.small_case("2x3090,1GB")
    longest = poor.longest()
    assert 0 < longest < roomy.longest()
    need = poor.least_host(size=1, length=longest + 1, batch=2)
    assert poor.host_total(need, poor.least_device(size=1)) > poor.machine.host.memory_bytes


def test_a_host_that_holds_no_weights_does_not_make_every_sequence_too_long(
    small: ModuleType,
) -> None:
    assert small.small_case("2x3090,300MB").longest() == small.small_case("2x3090,64GB").longest()


def test_nothing_fits_a_card_that_is_too_small(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB")
    cards = tuple(replace(card, memory_bytes=10**6) for card in case.machine.cards)
    tiny = replace(case, machine=replace(case.machine, cards=cards))
    assert tiny.longest() == 0
    assert tiny.sizes() == []


def test_sizes_are_the_powers_of_two_that_fit(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB", batch=64, length=2048)
    sizes = case.sizes()
    assert sizes == [2**n for n in range(len(sizes))]
    assert case.least_device(size=2 * sizes[-1]).total > case.device_limit or sizes[-1] == 64


def test_a_plan_is_found_wherever_the_least_fits(small: ModuleType) -> None:
    case = small.small_case(batch=4)
    least = case.least_device(size=1).total
    for limit, fits in ((least, True), (least - 1, False)):
        cards = tuple(replace(card, memory_bytes=limit) for card in case.machine.cards)
        tight = replace(case, machine=replace(case.machine, cards=cards))
        setting = setting_of(tight, 1)
        assert math.isfinite(Scores(setting).of(Candidate(single_layers(setting.costs)))) is fits
        assert (tight.sizes() == [1]) is fits


def test_fewer_backward_stages_save_fewer_inputs(small: ModuleType) -> None:
    of = small.small_case().at(size=1)
    roomy = few_stages(of, 10**12)
    assert len(roomy.backward) == 1
    assert few_stages(of, 1).backward == single_layers(of).backward


def test_cpu_devices_take_host_memory(small: ModuleType) -> None:
    case = small.small_case("2xcpu,24GB", dtype="fp32")
    device, host = case.least_device(size=1), case.least_host(size=1)
    assert case.host_total(host, device) == host.total + 2 * device.total


@pytest.mark.parametrize("machine", ["1x4090+1x3060,96GB", "1x4090+1xcpu,96GB"])
def test_unequal_devices_get_speeds(small: ModuleType, machine: str) -> None:
    speeds = small.small_case(machine, dtype="fp32").speeds(size=1)
    assert speeds is not None
    assert speeds[0] == 1.0
    assert 0 < speeds[1] < 1


def test_checkpoints_are_counted_where_they_are_kept(small: ModuleType) -> None:
    case = small.small_case()
    none, of = case.disk(None)
    assert none == of.download + of.result
    assert case.disk(2)[0] == none + 3 * of.checkpoint


def test_32b_in_full_needs_16_bytes_a_parameter_on_the_host(small: ModuleType) -> None:
    found = profile("Qwen/Qwen3-32B", "full")
    case = small.small_case()
    whole = replace(case, profile=found, machine=parse_machine("8x4090,512GB"), job=Job())
    need = whole.least_host(size=1)
    assert need.weights + need.state == pytest.approx(16 * found.parameters, rel=1e-3)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_partial_sums_are_counted_as_the_store_has_them(small: ModuleType, method: str) -> None:
    case = small.small_case(method=method)
    cut = single_layers(case.at(size=1))
    visits = (
        Candidate(cut).with_replicas(1, 2, 2).visits(case.at(size=1), devices=2, microbatches=8)
    )
    twice = replace(case, job=replace(case.job, backward_visits=2)).at(size=1)
    need = host_bytes(case.at(size=1), visits)
    reached = [layer for layer in twice.layers if layer.is_trainable]
    frozen = [layer for layer in case.at(size=1).layers if not layer.is_trainable]
    own = sum(layer.pinned_bytes for layer in (*reached, *frozen))
    own -= 2 * sum(layer.gradient_bytes for layer in reached)  # a part for each visit ...
    brought = [
        sum(twice.layers[layer].gradient_bytes for layer in visit.layers)
        for visit in visits
        if visit.has_backward
    ]
    places = sum(max(brought[place::4]) for place in range(4))  # ... but visits share places
    assert need.pinned == own + places


def test_a_device_holds_a_large_batch_in_rounds(small: ModuleType) -> None:
    case = small.small_case("1x3090,64GB", batch=8)
    large = replace(case, batch_size=1 << 14)
    few = replace(case, batch_size=4)
    assert large.least_device(size=1) == few.least_device(size=1)
