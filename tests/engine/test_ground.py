"""What plans stand on: emulated machines, cards as they are, and what cannot be told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roundpipe.device.emulated import emulate
from roundpipe.engine import ground
from roundpipe.engine.ground import ground_of, speeds_of
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import DeviceError
from roundpipe.plan.machine import Card, Host, Link, Machine

GB = 10**9


def machine(*rates, memory=24 * GB):
    return Machine(
        cards=tuple(
            Card(name="card", memory_bytes=memory, flops={"bf16": rate}, bandwidth=1e12)
            for rate in rates
        ),
        links=tuple(Link(up=rate / 1e4, down=1e10) for rate in rates),
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )


def test_devices_of_one_kind_have_no_speeds():
    assert speeds_of(machine(1e14, 1e14)) is None
    assert speeds_of(machine(2e14, 1e14)) == (1.0, 0.5)


def test_some_devices_of_a_machine_are_a_machine_of_their_own():
    devices = emulate(machine(3e14, 2e14, 1e14), time_scale=0.0)
    pool = SimpleNamespace(is_emulated=True, devices=[devices[2], devices[1]])
    found = ground_of(pool, None)
    assert [link.up for link in found.machine.links] == [1e10, 2e10]
    assert found.speeds == (1.0, 2.0)
    assert [card.flops["bf16"] for card in found.machine.cards] == [1e14, 2e14]
    for device in devices:
        device.close()


CARDS = SimpleNamespace(is_emulated=False, computes_on_cpu=False, devices=[None, None])


def test_cards_hold_what_is_free_but_for_a_reserve(monkeypatch):
    monkeypatch.setattr(ground, "survey_devices", lambda _: machine(1e14, 1e14))
    found = ground_of(CARDS, None)
    assert 0.9 * 24 * GB < found.memory_limit < 0.95 * 24 * GB
    assert {card.memory_bytes for card in found.machine.cards} == {found.memory_limit}
    assert found.flops == 1e14
    by_hand = ground_of(CARDS, 10 * GB)
    assert by_hand.memory_limit == 10 * GB
    assert {card.memory_bytes for card in by_hand.machine.cards} == {10 * GB}


def test_what_cannot_be_told_is_left_open_with_a_warning(monkeypatch, caplog):
    def fails(_):
        raise DeviceError("no driver")

    monkeypatch.setattr(ground, "survey_devices", fails)
    found = ground_of(CARDS, 5 * GB)
    assert (found.machine, found.memory_limit, found.flops) == (None, 5 * GB, 0.0)
    assert "this machine cannot be told: no driver" in caplog.text


@pytest.mark.parametrize("count", [1, 2])
def test_devices_of_the_cpu_share_the_hosts_memory_and_are_played_without_links(count):
    with DevicePool(f"cpu*{count}") as pool:
        found = ground_of(pool, None)
    assert found.played_machine is None
    assert found.memory_limit is None
    assert 0 < found.soft_limit * count < found.machine.host.memory_bytes * 1.5
