"""A hint is a change that was tried: with it the job fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.finetune.forecast import hints as forecast_hints
from roundpipe.finetune.forecast.hints import fitting_hints, speed_hints
from roundpipe.finetune.forecast.speed import best_speed
from roundpipe.finetune.forecast.wish import read_wish
from roundpipe.plan.amounts import read_bytes

if TYPE_CHECKING:
    from types import ModuleType

    from roundpipe.finetune.forecast.memory import Case


@pytest.fixture(autouse=True)
def _small_models(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile_of(wish: Any, *, bits: int, method: Any = None, environment: Any = None) -> Any:
        return small.small_profile((method or wish.method).name, bits=bits)

    monkeypatch.setattr(forecast_hints, "profile_of", profile_of)


def wish(case: Case, **keys: Any) -> Any:
    given = {"model": "m", "method": case.profile.method, "batch_size": case.batch_size, **keys}
    return read_wish({}, {"max_length": case.job.length, **given}, lambda devices: 2)


def texts(hints: tuple[Any, ...]) -> list[str]:
    return [hint.text for hint in hints]


def with_host(case: Case, num_bytes: int) -> Case:
    host = replace(case.machine.host, memory_bytes=num_bytes)
    return replace(case, machine=replace(case.machine, host=host))


def test_adapters_help_a_host_that_is_too_small_and_say_how_much(small: ModuleType) -> None:
    case = small.small_case()
    poor = with_host(case, case.least_host(size=1).total // 2)
    hints = fitting_hints(wish(poor), poor, ("host memory",), {})
    assert "finetuning_type=lora" in texts(hints)
    assert all(hint.effect.endswith("B") for hint in hints)


def test_narrow_moments_help_a_little_and_are_tried_as_they_are_trained(small: ModuleType) -> None:
    case = small.small_case(dtype="bf16")
    narrow = replace(case, job=case.job.with_moments("bf16"))
    assert narrow.job.optim_dtype == "bf16"
    poor = with_host(case, narrow.least_host(size=1).total)
    hints = fitting_hints(wish(poor), poor, ("host memory",), {})
    assert texts(hints)[0] == "optim_state_dtype=bf16"
    poorer = with_host(case, narrow.least_host(size=1).total - 1)
    assert texts(fitting_hints(wish(poorer), poorer, ("host memory",), {}))[0] == (
        "optim_state_dtype=int8"
    )


def test_nothing_is_said_that_does_not_help(small: ModuleType) -> None:
    poor = with_host(small.small_case(), 10**6)
    (hint,) = texts(fitting_hints(wish(poor), poor, ("host memory",), {}))
    assert hint.endswith(" of host memory")
    has = read_bytes(hint.removesuffix(" of host memory"))
    assert with_host(poor, has).least_host(size=1).total <= has


def test_a_smaller_batch_helps_where_saved_inputs_do_not_fit(small: ModuleType) -> None:
    case = small.small_case(method="lora", batch=1024)
    least = case.least_host(size=1)
    poor = with_host(case, least.total - least.saved_inputs // 2)
    hints = fitting_hints(wish(poor), poor, ("host memory",), {})
    (batch,) = [int(text.partition("=")[2]) for text in texts(hints) if "batch_size" in text]
    fixed = replace(poor, batch_size=batch)
    assert fixed.least_host(size=1).total <= poor.machine.host.memory_bytes
    more = replace(poor, batch_size=2 * batch)
    assert more.least_host(size=1).total > poor.machine.host.memory_bytes


def test_a_shorter_length_is_the_longest_that_fits(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB", length=4_000_000)
    hints = fitting_hints(wish(case), case, ("device memory",), {})
    (length,) = [int(text.partition("=")[2]) for text in texts(hints) if "max_length" in text]
    assert case.least_device(size=1, length=length).total <= case.device_limit
    assert case.least_device(size=1, length=length + 128).total > case.device_limit


def test_a_microbatch_that_is_too_large_gives_way_first(small: ModuleType) -> None:
    case = small.small_case("1x3060,64GB", batch=256, length=4096)
    hints = fitting_hints(wish(case, micro_batch_size=256), case, ("device memory",), {})
    assert texts(hints) == [f"micro_batch_size={case.sizes()[-1]}"]


def test_a_full_disk_wants_another_or_fewer_checkpoints(small: ModuleType) -> None:
    case = small.small_case("2x3090,64GB,disk=1TB")

    def hints(room: int) -> list[str]:
        host = replace(case.machine.host, disk_bytes=room)
        full = replace(case, machine=replace(case.machine, host=host))
        return texts(fitting_hints(wish(full, save_total_limit=3), full, ("disk",), {}))

    assert hints(1000) == ["output_dir=FOLDER on a larger disk"]
    assert hints(case.disk(2)[0]) == ["save_total_limit=2"]
    assert hints(case.disk(1)[0]) == ["save_total_limit=1"]
    assert case.disk(3, only_model=True)[0] > case.disk(0)[0]
    assert hints(case.disk(0)[0]) == ["save_strategy=no"]


def test_waiting_devices_are_told_of_a_larger_batch(small: ModuleType) -> None:
    case = small.small_case("8x4090,512GB", batch=2, length=4096)
    hints = speed_hints(wish(case), best_speed(case, "round_robin", sizes=[1]))
    assert "batch_size=4" in texts(hints)
    assert all("more tokens/s" in hint.effect for hint in hints)


def test_busy_devices_are_told_nothing(small: ModuleType) -> None:
    case = small.small_case("2xcpu,24GB", dtype="fp32", length=128, batch=64)
    assert speed_hints(wish(case), best_speed(case, sizes=[1])) == ()
