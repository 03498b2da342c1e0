"""Machines composed of words; what was not said is assumed and noted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import ConfigError
from roundpipe.plan.cards import card_named
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine


def names(machine: Machine) -> list[str]:
    return [card.name for card in machine.cards]


def test_cards_and_host_memory_make_a_machine() -> None:
    machine = parse_machine("2x3090,64GB")
    assert names(machine) == ["RTX 3090", "RTX 3090"]
    assert machine.num_devices == len(machine.links) == 2
    assert machine.host.memory_bytes == 64 * 10**9
    assert machine.cards[0] == card_named("3090").at_work()
    assert machine.text == "2x3090,64GB"


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("4090", ["RTX 4090"]),
        ("RTX 4090, 64 GB", ["RTX 4090"]),
        ("1x4090+1x3060,96GB", ["RTX 4090", "RTX 3060 12GB"]),
        ("4090+3060,96GB", ["RTX 4090", "RTX 3060 12GB"]),
        ("4090,3060,96GB", ["RTX 4090", "RTX 3060 12GB"]),
        ("2 x a100-40, 1TB", ["A100 40GB"] * 2),
        ("2×4090,64GB", ["RTX 4090"] * 2),
        ("2xcpu,24GB", ["cpu"] * 2),
        ("1x4090+1xCPU,24GB", ["RTX 4090", "cpu"]),
        ("2xa6000+4x7900xtx,512GB", ["RTX A6000"] * 2 + ["RX 7900 XTX"] * 4),
    ],
)
def test_cards_are_written_in_many_ways(text: str, cards: list[str]) -> None:
    assert names(parse_machine(text)) == cards


def test_a_link_is_as_fast_as_measured_on_its_kind() -> None:
    link = parse_machine("8x4090,512GB").links[0]
    assert 24e9 < link.up == link.down < 26e9  # PCIe 4.0 x16, one way
    assert 11e9 < link.duplex * link.up < 16e9  # while the other way runs


def test_generation_and_lanes_set_the_link() -> None:
    def up(text: str) -> float:
        return parse_machine(f"1x4090,64GB{text}").links[0].up

    assert up(",pcie3") == up("") / 2
    assert up(",x8") == up("") / 2
    assert up(",pcie3x4") == up(",pcie3,x4") == up(",gen3,x4") == up("") / 8
    assert up(",pcie5") == up("")  # the slot can more than the card
    assert parse_machine("1x4060,64GB,x16").links[0].up == up(",x8")  # the card has eight lanes
    assert parse_machine("8xH100,2TB,pcie5x16").links[0].up == 2 * up("")


def test_a_desktop_shares_its_lanes_and_a_server_does_not() -> None:
    alone = parse_machine("1x3090,64GB")
    desktop = parse_machine("2x3090,64GB")
    server = parse_machine("8x3090,64GB")
    assert desktop.links[0].up == alone.links[0].up / 2
    assert server.links[0].up == alone.links[0].up
    assert parse_machine("2x3090,64GB,x16").links[0].up == alone.links[0].up
    assert any("8 lanes each assumed" in note for note in desktop.notes)
    assert not any("lanes" in note for note in (*alone.notes, *server.notes))


def test_all_links_together_are_capped_by_the_lanes_of_the_host() -> None:
    desktop, server = parse_machine("2x3090,64GB"), parse_machine("8x3090,512GB")
    assert desktop.link_cap == sum(link.up for link in desktop.links)
    assert server.link_cap == pytest.approx(sum(link.up for link in server.links))
    many = parse_machine("16x3090,1TB,x16")
    assert many.link_cap == pytest.approx(sum(link.up for link in many.links))  # as was said
    assert parse_machine("2xcpu,24GB").link_cap is None


@pytest.mark.parametrize(
    ("text", "gigabytes_per_second"),
    [("2x3090,64GB", 60), ("1x3090,256GB", 150), ("8x3090,128GB", 150), ("8xh100,2TB", 250)],
)
def test_memory_bandwidth_follows_the_kind_of_host(text: str, gigabytes_per_second: int) -> None:
    machine = parse_machine(text)
    assert machine.host.bandwidth == gigabytes_per_second * 1e9
    assert any("memory of a" in note for note in machine.notes)


def test_memory_that_is_not_given_is_assumed_and_noted() -> None:
    machine = parse_machine("1x4090")
    assert machine.host.memory_bytes == 64 * 10**9
    [note] = [note for note in machine.notes if "not given" in note]
    assert "machine=1x4090,64GB says it" in note
    assert parse_machine("8x4090").host.memory_bytes == 512 * 10**9


def test_keys_say_the_rest() -> None:
    machine = parse_machine(
        "4x3090,disk=2TB,memory=100GB,bandwidth=80GB/s,link=20GB/s,duplex=0.9,cap=50GB/s"
    )
    assert machine.host.disk_bytes == 2 * 10**12
    assert machine.host.memory_bytes == 100 * 10**9
    assert machine.host.bandwidth == 80e9
    assert {(link.up, link.down, link.duplex) for link in machine.links} == {(20e9, 20e9, 0.9)}
    assert machine.link_cap == 50e9
    assert machine.notes == ()
    assert parse_machine("2x3090,64GB,link=20GB").link_cap is None


def test_cpu_devices_share_what_the_machine_has() -> None:
    one, two = parse_machine("1xcpu,24GB"), parse_machine("2xcpu,24GB")
    assert two.cards[0].flops["fp32"] == one.cards[0].flops["fp32"] / 2
    assert two.cards[0].bandwidth == one.cards[0].bandwidth / 2
    assert all(card.in_host for card in two.cards)
    assert sum(card.memory_bytes for card in two.cards) < two.host.memory_bytes
    assert not parse_machine("1x4090,24GB").cards[0].in_host


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "without a card", "8x4090,512GB"),
        ("64GB", "without a card", "1xcpu"),
        ("2x3909,64GB", "unknown card: 3909", "3090"),
        ("1x4090,64", "neither a card nor a size: 64", "64GB"),
        ("0x3090", "not a number of cards", "8x4090"),
        ("9999x3090", "not a number of cards", "8x4090"),
        ("60x3090+60x3090", "more cards than a machine has", "8x4090"),
        ("2x3090+,64GB", "not a number of cards", "8x4090"),
        ("2x3090,64GB,32GB", "memory is given twice", "leave one"),
        ("2x3090,pcie9", "no such generation", "pcie4"),
        ("2x3090,x5", "not a number of lanes", "x16"),
        ("2x3090,pcie4x3", "not a number of lanes", "x16"),
        ("2x3090,dsk=2TB", "unknown in a machine: dsk=2tb", "disk"),
        ("2x3090,disk=lots", "not an amount: disk=lots", "64GB"),
        ("2x3090,disk=2", "not an amount: disk=2", "a unit"),
        ("2x3090,0GB", "not an amount", "64GB"),
        ("2x3090,duplex=2", "not a share", "duplex=0.5"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_way_out(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as told:
        parse_machine(text)
    said, _, way_out = str(told.value).partition("\nhint: ")
    assert message in said
    assert hint in way_out
