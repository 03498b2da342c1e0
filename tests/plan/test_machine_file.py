"""Machines as plain values: what a file may override, and that it reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.plan.cards import card_named
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.machine_file import machine_mapping, machine_of
from roundpipe.plan.machine_text import parse_machine

WHOLE = {
    "name": "Prototype",
    "memory": "10 GB",
    "bandwidth": "100 GB/s",
    "tflops": {"bf16": 5},
    "link": {"up": "3 GB/s", "down": "2 GB/s"},
}


@pytest.mark.parametrize(
    "text",
    [
        "2x3090,64GB",
        "1x4090+1x3060,96GB",
        "8x4090,512GB,pcie3",
        "8xH100,2TB,pcie5x16,disk=7TB",
        "2xcpu,24GB",
        "1xt4+1xcpu,24GB",
        "2xcpu+1x7900xtx,24GB,duplex=0.7",
    ],
)
def test_a_composed_machine_reads_back_from_its_mapping(text: str) -> None:
    machine = parse_machine(text)
    mapping = json.loads(json.dumps(machine_mapping(machine)))  # plain values only
    again = machine_of(mapping)
    assert again == machine
    assert again.text == text
    assert machine_mapping(again) == mapping


rates = st.builds(lambda digits, power: float(f"{digits}e{power}"), st.integers(1, 9999),
                  st.integers(6, 10))  # fmt: skip
cards = st.builds(
    Card,
    name=st.sampled_from(["A", "B: c"]),
    memory_bytes=st.integers(10**6, 10**12),
    flops=st.dictionaries(st.sampled_from(["fp32", "bf16", "fp16_fp16"]), rates, min_size=1),
    bandwidth=rates,
    in_host=st.booleans(),
)
shares = st.integers(1, 100).map(lambda percent: percent / 100)
links = st.builds(Link, up=rates, down=rates, duplex=shares)
hosts = st.builds(
    Host,
    memory_bytes=st.integers(10**6, 10**13),
    bandwidth=rates,
    disk_bytes=st.none() | st.integers(10**6, 10**15),
    update_bandwidth=st.none() | rates,
)


@given(st.lists(st.tuples(cards, links), min_size=1, max_size=4), hosts, st.none() | rates)
def test_any_machine_reads_back(
    pairs: list[tuple[Card, Link]], host: Host, cap: float | None
) -> None:
    machine = Machine(
        cards=tuple(card for card, _ in pairs),
        links=tuple(link for _, link in pairs),
        host=host,
        link_cap=cap,
    )
    assert machine_of(json.loads(json.dumps(machine_mapping(machine)))) == machine


def test_a_text_alone_is_a_machine() -> None:
    assert machine_of({"machine": "8x4090,512GB"}) == parse_machine("8x4090,512GB")


def test_what_the_file_says_overrides_the_text() -> None:
    machine = machine_of(
        {
            "machine": "2x4090,128GB",
            "cards": {"tflops": {"bf16": 120}, "link": {"duplex": 0.9}},
            "link_cap": "30 GB/s",
            "host": {"bandwidth": "44 GB/s", "disk": "3 TB"},
        }
    )
    plain = parse_machine("2x4090,128GB")
    assert {card.flops["bf16"] for card in machine.cards} == {120e12}
    assert machine.cards[0].flops["fp32"] == plain.cards[0].flops["fp32"]
    assert machine.links[0].duplex == 0.9
    assert machine.links[0].up == plain.links[0].up
    assert machine.link_cap == 30e9
    assert (machine.host.bandwidth, machine.host.memory_bytes) == (44e9, 128 * 10**9)


def test_nothing_is_assumed_of_links_that_the_file_gives() -> None:
    link = {"up": "12 GB/s", "down": "11.5 GB/s"}
    told = [
        any("lanes" in note for note in machine_of({"machine": "2x3090,64GB", **cards}).notes)
        for cards in ({}, {"cards": {"link": {"up": "12 GB/s"}}}, {"cards": {"link": link}})
    ]
    assert told == [True, True, False]


def test_a_list_overrides_card_by_card() -> None:
    machine = machine_of(
        {"machine": "2x4090,128GB", "cards": [{"memory": "20 GB"}, {"card": "3090"}]}
    )
    assert [card.name for card in machine.cards] == ["RTX 4090", "RTX 3090"]
    assert machine.cards[0].memory_bytes == 20 * 10**9


def test_cards_may_be_listed_without_a_text() -> None:
    machine = machine_of({"cards": ["4090", {"card": "3060", "count": 2}], "host": {}})
    assert [card.name for card in machine.cards] == ["RTX 4090", "RTX 3060 12GB", "RTX 3060 12GB"]
    assert machine.cards[0] == card_named("4090").at_work()
    assert any("host memory is not given" in note for note in machine.notes)


def test_a_card_that_no_table_has_says_everything_itself() -> None:
    machine = machine_of({"cards": [WHOLE], "host": {"memory": "32 GB"}})
    [card], [link] = machine.cards, machine.links
    assert (card.name, card.memory_bytes, dict(card.flops)) == ("Prototype", 10**10, {"bf16": 5e12})
    assert (link.up, link.down) == (3e9, 2e9)


def test_what_a_card_cannot_do_is_null() -> None:
    machine = machine_of({"machine": "1x4090,64GB", "cards": {"tflops": {"fp16_fp16": None}}})
    assert "fp16_fp16" not in machine.cards[0].flops


def test_what_was_measured_beside_is_not_read() -> None:
    assert machine_of({"machine": "4090,64GB", "measured": {"x": [1]}}).num_devices == 1


def test_numbers_may_be_bytes() -> None:
    machine = machine_of({"machine": "4090", "host": {"memory": 5_000_000_000, "bandwidth": 7e9}})
    assert (machine.host.memory_bytes, machine.host.bandwidth) == (5 * 10**9, 7e9)


@pytest.mark.parametrize(
    ("mapping", "message", "hint"),
    [
        ({}, "no card", "machine: 8x4090,512GB"),
        ({"machin": "4090"}, "unknown key in a machine file: machin", "machine"),
        ({"cards": [{"crad": "4090"}]}, "unknown key in a machine file: cards[0].crad", "card"),
        (
            {"cards": [{"card": "4090"}, {"card": "4090", "link": {"upp": 1}}]},
            "unknown key in a machine file: cards[1].link.upp",
            "up",
        ),
        (
            {"machine": "4090", "cards": {"tflops": {"bf61": 1}}},
            "unknown key in a machine file: cards.tflops.bf61",
            "bf16",
        ),
        ({"machine": "4090", "host": {"ram": "4GB"}}, "host.ram", "memory"),
        ({"machine": "4090", "host": {"memory": 64}}, "host.memory: 64", "with its unit"),
        ({"machine": "4090", "host": {"memory": True}}, "host.memory: True", "with its unit"),
        ({"machine": "4090", "host": {"bandwidth": "60 XB"}}, "host.bandwidth: 60 XB", "GB/s"),
        ({"machine": "4090", "host": ["64GB"]}, "not a mapping: host", "memory, bandwidth"),
        ({"machine": "4090", "link_cap": 25}, "not a rate: link_cap: 25", "25 GB/s"),
        ({"machine": "4090", "cards": {"link": {"duplex": 1.5}}}, "cards.link.duplex", "0 and 1"),
        ({"machine": "4090", "cards": {"tflops": {"bf16": 1.5e14}}}, "TFLOP/s", "bf16: 150"),
        ({"machine": "4090", "cards": {"in_host": "yes"}}, "in_host: yes", "true"),
        ({"machine": "4090", "cards": "3090"}, "not a list of cards", "cards: ["),
        ({"machine": "4090", "cards": ["3090", "3090"]}, "2 are listed, but", "leave machine out"),
        ({"cards": [{"card": "4090", "count": 0}]}, "cards[0].count: 0", "count: 8"),
        ({"cards": []}, "no card in the machine file", "card: 4090"),
        ({"cards": [{"card": 4090, "count": 1000}]}, "not a number of cards", "count: 8"),
        ({"cards": [{"card": 4090, "count": 60}] * 2}, "more cards than a machine", "count: 8"),
        ({"cards": [{"card": "4099"}]}, "unknown card: 4099", "4090"),
        ({"cards": [{"name": "X", "memory": "1GB"}]}, "bandwidth, tflops, link", "card: RTX 4090"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_way_out(
    mapping: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as told:
        machine_of(mapping)
    said, _, way_out = str(told.value).partition("\nhint: ")
    assert message in said
    assert hint in way_out
