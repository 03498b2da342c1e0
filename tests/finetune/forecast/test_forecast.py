"""A forecast from a wish and a machine, on a model of six layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError, PlanError
from roundpipe.finetune.forecast import forecast as module
from roundpipe.finetune.forecast import hints as forecast_hints
from roundpipe.finetune.forecast.forecast import (
    Found,
    check_host,
    forecast,
    job_of,
    limited,
    planned_machine,
)
from roundpipe.finetune.forecast.wish import Wish, read_wish
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

MACHINE = "2x3090,64GB,disk=1TB"


@pytest.fixture(autouse=True)
def _small_models(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile_of(wish: Wish, *, bits: int, method: Any = None, environment: Any = None) -> Any:
        return small.small_profile((method or wish.method).name, bits=bits)

    monkeypatch.setattr(module, "profile_of", profile_of)
    monkeypatch.setattr(forecast_hints, "profile_of", profile_of)


def wish(**keys: Any) -> Wish:
    given = {"model": "m", "method": "full", "batch_size": 8, "max_length": 1024, **keys}
    return read_wish({}, given, lambda devices: 2)


def found(machine: str = MACHINE, **keys: Any) -> Found:
    return forecast(wish(**keys), parse_machine(machine), environment={})


def test_a_job_that_fits_has_a_pace_and_no_verdict_against_it() -> None:
    made = found().forecast
    assert made.fits
    assert made.title == (
        "small · full fine-tuning · bf16 · 8 × 1,024 tokens per step on 2 × RTX 3090"
    )
    assert [need.place for need in made.needs] == ["gpu", "host", "disk"]
    assert made.pace is not None
    assert made.pace.tokens_per_second * made.pace.step_seconds == pytest.approx(8 * 1024)
    assert made.bytes["device"] == made.needs[0].needs
    assert made.bytes["pinned_host"] + made.bytes["pageable_host"] == made.needs[1].needs
    assert made.limit == made.pace.bound
    assert made.longest > 1024


def test_a_step_takes_microbatches_as_they_are_asked_for() -> None:
    pace = found(micro_batch_size=4).forecast.pace
    assert pace is not None
    assert (pace.micro_batch_size, pace.microbatches) == (4, 2)
    pace = found(num_microbatch=8).forecast.pace
    assert pace is not None
    assert (pace.micro_batch_size, pace.microbatches) == (1, 8)
    pace = found(micro_batch_size=64).forecast.pace
    assert pace is not None
    assert (pace.micro_batch_size, pace.microbatches) == (8, 1)


def test_a_host_that_is_too_small_is_named_with_a_way_out() -> None:
    made = found("2x3090,700MB").forecast
    assert not made.fits
    assert made.limit == "host memory"
    assert made.pace is not None  # as it would be with more of it
    assert "finetuning_type=lora" in [hint.text for hint in made.hints]


def test_what_text_does_not_reach_is_of_the_host_and_costs_no_state(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found().forecast.needs[1]
    text = small.small_profile("full")
    seeing = replace(text, parameters=2 * text.parameters, unread=text.parameters)
    monkeypatch.setattr(module, "profile_of", lambda *_, **__: seeing)
    after = found().forecast.needs[1]
    assert after.needs == before.needs + 2 * text.parameters
    assert "what text does not reach" in after.largest
    per_parameter = [need.largest.partition(" + ")[0] for need in (before, after)]
    assert per_parameter[0].endswith("B per parameter")
    assert per_parameter[0] == per_parameter[1]


def test_a_device_that_is_too_small_has_no_pace() -> None:
    made = found("1x3060,1TB", max_length=4_000_000).forecast
    assert (made.fits, made.pace, made.limit) == (False, None, "device memory")
    assert made.needs[0].needs > made.needs[0].has
    words = made.hints[0].text
    assert words.startswith("max_length=")
    assert found("1x3060,1TB", max_length=int(words.partition("=")[2])).forecast.fits
    assert made.notes[-1] == "max_length 4,000,000 is beyond what the model was made for: 8,192"


def test_a_disk_that_is_too_small_does_not_fit_either() -> None:
    made = found("2x3090,64GB,disk=1MB").forecast
    assert (made.fits, made.limit) == (False, "disk")
    assert found("2x3090,64GB").forecast.needs[2].fits  # nobody knows


def test_a_model_on_this_disk_is_not_downloaded(tmp_path: Path) -> None:
    fetched, local = (found(model=model).forecast.needs[2] for model in ("m", str(tmp_path)))
    assert local.needs < fetched.needs
    assert "download" in fetched.largest
    assert "download" not in local.largest


@pytest.mark.slow  # imports torch
def test_the_job_takes_its_steps_at_the_length_of_its_data(tiny_data: Path) -> None:
    made = found(dataset=str(tiny_data), epochs=5).forecast
    assert made.duration is not None
    assert made.pace is not None
    assert made.duration.steps == 10
    assert made.duration.what == "5 epochs of data.jsonl"
    # Questions of a few dozen tokens take less than sequences of 1,024.
    assert made.duration.seconds < made.duration.steps * made.pace.step_seconds
    assert "about 12 samples" in made.duration.note
    once = found(dataset=str(tiny_data), epochs=1).forecast.duration
    assert once is not None
    assert once.what == "1 epoch of data.jsonl"


def test_without_data_only_max_steps_tell_how_long_a_job_is() -> None:
    assert found().forecast.duration is None
    made = found(max_steps=100).forecast
    assert made.duration is not None
    assert made.pace is not None
    assert made.duration.seconds == pytest.approx(100 * made.pace.step_seconds)


@pytest.mark.parametrize(
    ("machine", "keys", "dtype"),
    [
        (MACHINE, {}, "bf16"),
        ("2x2080ti,64GB", {}, "fp16"),
        ("2xcpu,24GB", {}, "fp32"),
        ("1x4090+1xcpu,24GB", {}, "fp32"),
        ("1x4090,64GB", {"fp16_accumulation": True}, "fp16"),
        (MACHINE, {"dtype": "fp32"}, "fp32"),
    ],
)
def test_the_dtype_is_what_every_device_computes_in(
    machine: str, keys: dict[str, Any], dtype: str
) -> None:
    assert job_of(wish(**keys), parse_machine(machine)).dtype == dtype


def test_a_card_that_lacks_the_dtype_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not compute in bf16"):
        found("1x2080ti,64GB", dtype="bf16")


def test_limits_only_lower_what_there_is() -> None:
    machine = parse_machine(MACHINE)
    less = limited(machine, wish(device_memory_limit="1GB", host_memory_limit=0.5))
    assert [card.memory_bytes for card in less.cards] == [10**9] * 2
    assert less.host.memory_bytes == 32 * 10**9
    assert limited(machine, wish(device_memory_limit="1TB", host_memory_limit="1TB")) == machine


def test_some_of_a_machines_devices_can_be_meant() -> None:
    def count(devices: Any) -> int:
        return planned_machine("1x4090+2x3060,96GB", devices, environment={}).num_devices

    assert [count(devices) for devices in ("auto", 2, ["cuda:0", "cuda:2"], "0,1", "cuda")] == [
        3,
        2,
        2,
        2,
        3,
    ]
    for devices in (4, 0, "cuda:3", "cpu"):
        with pytest.raises(ConfigError, match="not among those of machine"):
            count(devices)


def test_a_machine_may_be_a_card_or_a_file(tmp_path: Path) -> None:
    assert planned_machine(4090, environment={}).cards[0].name == "RTX 4090"
    file = tmp_path / "lab.yaml"
    file.write_text("machine: 2x3090,64GB\nhost: {memory: 100 GB}\n")
    assert planned_machine(str(file), environment={}).host.memory_bytes == 100 * 10**9


def test_training_can_ask_whether_the_host_holds_the_run_before_it_loads_anything() -> None:
    check_host(wish(), parse_machine(MACHINE), environment={})
    with pytest.raises(PlanError, match="does not fit into host memory") as told:
        check_host(wish(), parse_machine("2x3090,700MB"), environment={})
    assert "finetuning_type=lora" in str(told.value)


def test_equal_cards_of_other_makers_count_apart() -> None:
    title = found("1x4090+1x3060,96GB").forecast.title
    assert title.endswith("on 1 × RTX 4090 + 1 × RTX 3060 12GB")


def test_what_is_said_of_a_wish_is_passed_on() -> None:
    asked = replace(wish(), notes=("a",))
    assert forecast(asked, parse_machine(MACHINE), environment={}).forecast.notes[0] == "a"


def test_a_batch_that_could_only_be_counted_for_hours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size: 1,000,000,000 .*\nhint: batch_size=16384"):
        found(batch_size=10**9)
    with pytest.raises(ConfigError, match="batch_size: 99,999"):
        module.check_host(wish(batch_size=99_999), parse_machine(MACHINE), environment={})
