"""Prices: a job that fits, played on the machine as it is and as it could be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.finetune.forecast import reference as room
from roundpipe.finetune.forecast.reference import Reference
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from roundpipe.plan.machine import Card, Machine

GB = 10**9


class Model:
    """Layers of one gigabyte; ``host_bytes`` in all."""

    def __init__(self, name: str, method: str, host_bytes: int) -> None:
        self.name, self.method, self.host_bytes = name, method, host_bytes

    def costs(self, card: Card) -> Costs:
        seconds = 1e12 / card.flops["bf16"]
        layer = LayerCost(
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            weight_bytes=GB,
            gradient_bytes=GB,
            pageable_bytes=self.host_bytes // 8,
        )
        return Costs((layer,) * 8, frozenset(range(8)))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models that were loaded; the first needs 128 GB of host memory, each next a quarter."""
    monkeypatch.setattr(room, "costs", lambda profile, card, job: profile.costs(card))
    return []


def reference(machine: Machine, loaded: list[str]) -> Reference:
    def load(model: str, method: str, bits: int) -> Any:
        loaded.append(f"{model} {method} {bits}")
        return Model(model, method, 128 * GB // 4 ** (len(loaded) - 1))

    return Reference(machine, load)


def with_link(machine: Machine, factor: float) -> Machine:
    link = machine.links[0]
    links = (replace(link, up=link.up * factor, down=link.down * factor), *machine.links[1:])
    return replace(machine, links=links)


def test_the_largest_job_that_memory_holds_is_named(loaded: list[str]) -> None:
    asked = reference(parse_machine("1x4090,512GB"), loaded)
    assert asked.largest(parse_machine("1x4090,130GB")) == "meta-llama/Llama-3.1-8B, full"
    assert asked.largest(parse_machine("1x4090,64GB")) == "meta-llama/Llama-3.1-8B, lora"
    assert asked.largest(parse_machine("1x4090,1GB")) == "none of them"
    assert len(loaded) == 4  # each once


def test_nothing_is_loaded_before_a_price_is_asked(loaded: list[str]) -> None:
    machine = parse_machine("1x4090,256GB")
    speed = reference(machine, loaded)
    assert loaded == []
    assert speed(machine)
    assert loaded == ["meta-llama/Llama-3.1-8B full 16"]
    assert speed.name.startswith("meta-llama/Llama-3.1-8B, full, bf16, 16 × 2,048 tokens")


def test_the_first_job_that_fits_is_taken(loaded: list[str]) -> None:
    machine = parse_machine("1x4090,40GB")
    assert reference(machine, loaded)(machine)
    assert len(loaded) == 2


def test_a_slower_link_costs_and_a_faster_one_pays(loaded: list[str]) -> None:
    machine = parse_machine("2x4090,256GB,pcie3x4")
    speed = reference(machine, loaded)
    now, slow, fast = (speed(with_link(machine, factor)) for factor in (1, 0.25, 4))
    assert now
    assert slow
    assert fast
    assert slow < 0.9 * now
    assert fast > now
    assert len(loaded) == 1


def test_a_card_without_room_does_not_fit_and_the_same_job_does_with_it(
    loaded: list[str],
) -> None:
    there = parse_machine("1x4090,256GB")
    small = replace(there, cards=(replace(there.cards[0], memory_bytes=GB),))
    speed = reference(small, loaded)
    assert speed(small) is None
    assert speed(there)
    assert len(loaded) == 4  # none fits: the smallest is the reference


def test_a_faster_card_gets_more_of_the_work(loaded: list[str]) -> None:
    machine = parse_machine("2x4090,256GB")
    speed = reference(machine, loaded)
    twice = replace(
        machine.cards[0], flops={key: 2 * rate for key, rate in machine.cards[0].flops.items()}
    )
    alike, mixed = speed(machine), speed(replace(machine, cards=(machine.cards[0], twice)))
    assert alike
    assert mixed
    assert mixed > 1.05 * alike


def test_dtypes_are_those_that_every_card_has() -> None:
    for text, dtype in (
        ("1x4090,64GB", "bf16"),
        ("1x4090+1xt4,64GB", "fp16"),
        ("2xcpu,64GB", "fp32"),
    ):
        assert Reference(parse_machine(text))._job.dtype == dtype


@pytest.mark.accept
def test_a_well_known_model_is_priced_from_its_config() -> None:
    machine = parse_machine("1x4090,256GB")
    speed = Reference(machine)
    now, slow = speed(machine), speed(with_link(machine, 0.25))
    assert now
    assert slow
    assert slow < now
    assert "full" in speed.name
