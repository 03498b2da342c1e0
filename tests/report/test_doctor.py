"""What is said of measured machines: invented measurements, one thing wrong in each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.cards import card_named
from roundpipe.plan.machine_text import parse_machine
from roundpipe.report.doctor import Finding, Level, judge
from roundpipe.report.doctor_text import doctor_lines
from roundpipe.report.readings import (
    CopyRates,
    DeviceReadings,
    HostReadings,
    Lanes,
    NodeReadings,
    OtherProcess,
    Readings,
)

if TYPE_CHECKING:
    from roundpipe.plan.machine import Machine

USUAL = card_named("4090").at_work().flops
PINNED = CopyRates(up=25e9, down=25e9, duplex=0.95)

GOOD = DeviceReadings(
    name="cuda:0",
    card="RTX 4090",
    is_cpu=False,
    flops=dict(USUAL),
    bandwidth=900e9,
    pinned=PINNED,
    pageable=CopyRates(up=24e9, down=24e9, duplex=0.9),
    is_intact=True,
    total_bytes=24 * 10**9,
    free_bytes=23 * 10**9,
    usual_flops=USUAL,
    lanes=Lanes(used=16, of_card=16, generation=4, of_card_generation=4),
    power_limit=450,
    power_default=450,
)
HOST = HostReadings(
    threads=32, bandwidth_one_thread=12e9, bandwidth=150e9, update_seconds=0.2e-9
)  # fmt: skip


def readings(*devices: DeviceReadings, host: HostReadings = HOST, **more: Any) -> Readings:
    return Readings(devices=devices, host=host, **more)


def machine(num_cards: int = 1) -> Machine:
    return parse_machine(f"{num_cards}x4090,512GB")


def speed(of: Machine) -> float:
    """A pretended speed: the slowest link in MB/s, plus bf16 TFLOP/s of the slowest card."""
    slowest = min(min(link.up, link.down) for link in of.links)
    shared = slowest if of.link_cap is None else min(slowest, of.link_cap / of.num_devices)
    return shared / 1e6 + min(card.flops["bf16"] for card in of.cards) / 1e12


def bad(**wrong: Any) -> list[Finding]:
    """What is said beyond what is said of a good card."""
    device = replace(GOOD, **wrong)
    usual = {finding.text for finding in judge(readings(GOOD), machine(), speed)}
    found = judge(readings(device), machine(), speed)
    return [finding for finding in found if finding.text not in usual]


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert judge(readings(GOOD), machine(), speed) == []
    lines = doctor_lines(readings(GOOD), machine(), [])
    assert lines[-1] == "nothing is broken, missing or slow"
    assert "  host    optimizer compiled, 0.2 ns per parameter with 32 threads: 2 s a step" in (
        "\n".join(lines)
    )


def test_a_card_on_four_lanes_has_a_price_in_tokens() -> None:
    slow = CopyRates(up=6.2e9, down=6.1e9, duplex=0.95)
    device = replace(
        GOOD, pinned=slow, pageable=slow, lanes=replace(GOOD.lanes, used=4, of_card=16)
    )
    there = machine()
    link = replace(there.links[0], up=6e9, down=6e9)
    there = replace(there, links=(link,), link_cap=None)
    first, *_ = judge(readings(device), there, speed)
    assert first.level is Level.SLOW
    assert first.text == "cuda:0: attached with 4 of 16 lanes, 6.2 GB/s up and 6.1 GB/s down"
    assert first.price == f"{speed(there):,.0f} tokens/s now, 24,149 with 16 lanes"
    assert "slot" in first.hint
    assert not any("where PCIe" in each.text for each in judge(readings(device), there, speed))


def test_an_older_slot_is_noted() -> None:
    [finding] = bad(lanes=replace(GOOD.lanes, generation=3))
    assert finding.level is Level.NOTE
    assert finding.text == "cuda:0: PCIe 3.0 in this slot, the card could 4.0"
    assert "with PCIe 4.0" in finding.price


def test_a_link_below_its_lanes_is_slow() -> None:
    [finding] = bad(
        pinned=CopyRates(up=9e9, down=25e9, duplex=0.9),
        pageable=CopyRates(up=9e9, down=9e9, duplex=0.9),
    )
    assert finding.level is Level.SLOW
    assert "copies reach 9 GB/s where PCIe 4.0 with 16 lanes gives 25 GB/s" in finding.text


def test_lanes_that_are_not_known_are_not_judged() -> None:
    assert bad(lanes=Lanes()) == []


def test_memory_that_is_not_pinned_has_a_price() -> None:
    [finding] = bad(pageable=CopyRates(up=5e9, down=4e9, duplex=1.0))
    assert finding.level is Level.NOTE
    assert "at 5 GB/s instead of 25 GB/s" in finding.text
    assert finding.price.endswith("4,149 if nothing could be pinned")


def test_pinned_memory_slower_than_pageable_is_wrong() -> None:
    found = bad(
        pinned=CopyRates(up=20e9, down=20e9, duplex=0.9),
        pageable=CopyRates(up=40e9, down=40e9, duplex=0.9),
    )
    assert [finding.level for finding in found] == [Level.SLOW]
    assert "slower than pageable" in found[0].text


def test_both_ways_at_once_are_noted_when_they_lose_much() -> None:
    [finding] = bad(pinned=replace(PINNED, duplex=0.5))
    assert "each way keeps 50% of its rate" in finding.text
    assert finding.level is Level.NOTE


def test_a_changed_byte_is_the_worst_and_comes_first() -> None:
    noted = replace(GOOD, lanes=replace(GOOD.lanes, generation=3))
    slow = replace(GOOD, processes=(OtherProcess(pid=1, name="x", num_bytes=1),))
    broken = replace(GOOD, name="cuda:2", is_intact=False)
    found = judge(readings(noted, slow, broken), machine(3), speed)
    assert [finding.level for finding in found] == [Level.BROKEN, Level.SLOW, Level.NOTE]
    assert found[0].text.startswith("cuda:2: what is copied there comes back changed")


def test_a_foreign_process_is_named_with_what_it_holds() -> None:
    there = replace(machine(), cards=(replace(machine().cards[0], memory_bytes=8 * 10**9),))

    def fits(of: Machine) -> float | None:
        return 1000.0 if of.cards[0].memory_bytes > 20 * 10**9 else None

    device = replace(
        GOOD,
        free_bytes=8 * 10**9,
        processes=(OtherProcess(pid=4242, name="python", num_bytes=15 * 10**9),),
    )
    [finding] = judge(readings(device), there, fits)
    assert finding.text == (
        "cuda:0: another process holds memory, python (4242, 15 GB); 8 GB of 24 GB are free"
    )
    assert finding.price == "the reference model does not fit now; 1,000 tokens/s without it"
    assert "kill 4242" in finding.hint


def test_a_process_whose_memory_is_not_told_is_named_too() -> None:
    [finding] = bad(processes=(OtherProcess(pid=7, name="x", num_bytes=None),))
    assert "holds memory, x (7); " in finding.text


def test_a_low_power_limit_is_said_once_with_its_price() -> None:
    slow = {key: rate / 2 for key, rate in USUAL.items()}
    there = replace(machine(), cards=(replace(machine().cards[0], flops=slow),))
    device = replace(GOOD, flops=slow, power_limit=250.0)
    [finding] = judge(readings(device), there, lambda of: of.cards[0].flops["bf16"] / 1e12)
    assert finding.text == "cuda:0: may draw 250 of 450 W, 74.3 TFLOP/s in bf16"
    assert finding.price == "74 tokens/s now, 149 at the usual rate"
    assert finding.hint == "nvidia-smi -i 0 -pl 450"


def test_a_card_that_computes_slowly_is_named() -> None:
    [finding] = bad(flops={key: rate / 2 for key, rate in USUAL.items()})
    assert "74.3 TFLOP/s in bf16 where RTX 4090 usually reaches 149" in finding.text
    assert bad(flops={key: rate * 0.9 for key, rate in USUAL.items()}) == []


def test_it_is_the_slow_card_of_several_that_is_priced() -> None:
    slow = {key: rate / 2 for key, rate in USUAL.items()}
    there = machine(3)
    first, second, third = there.cards
    there = replace(there, cards=(first, replace(second, flops=slow), third))
    cards = (GOOD, replace(GOOD, name="cuda:1", flops=slow), replace(GOOD, name="cuda:2"))
    [finding] = [
        finding
        for finding in judge(
            readings(*cards), there, lambda of: sum(card.flops["bf16"] for card in of.cards) / 1e12
        )
        if finding.text.startswith("cuda:1:")
    ]
    assert finding.price == "372 tokens/s now, 446 at the usual rate"


def test_an_unknown_card_is_not_compared() -> None:
    assert bad(flops={"bf16": 1e12}, usual_flops={}) == []


def nodes(*ours: int) -> tuple[NodeReadings, ...]:
    return tuple(
        NodeReadings(index=index, num_bytes=2**38, is_ours=index in ours) for index in (0, 1)
    )


def test_a_card_at_another_memory_node_costs_the_difference() -> None:
    near = replace(GOOD, node=0)
    far = replace(
        GOOD, name="cuda:1", node=1, pinned=CopyRates(up=18e9, down=18e9, duplex=0.8), pageable=None
    )
    host = replace(HOST, nodes=nodes(0))
    there = replace(machine(2), link_cap=None)
    there = replace(there, links=(there.links[0], replace(there.links[1], up=18e9, down=18e9)))
    [finding] = [
        finding
        for finding in judge(readings(near, far, host=host), there, speed)
        if "memory node" in finding.text
    ]
    assert finding.text.startswith("cuda:1: near memory node 1, but this process runs on node 0")
    assert "with memory that is near" in finding.price
    assert "--cpunodebind=1 --membind=1" in finding.hint


def test_cards_that_are_alike_are_said_and_priced_together() -> None:
    four = replace(GOOD.lanes, used=4)
    cards = [
        replace(GOOD, name="cuda:0", lanes=four, pinned=CopyRates(up=6e9, down=6e9, duplex=0.9)),
        replace(GOOD, name="cuda:1"),
        replace(GOOD, name="cuda:2", lanes=four, pinned=CopyRates(up=5e9, down=6e9, duplex=0.9)),
        replace(GOOD, name="cuda:3", lanes=replace(four, used=8)),
    ]
    asked: list[Machine] = []

    def asking(of: Machine) -> float:
        asked.append(of)
        return 1.0

    found = judge(readings(*(replace(card, pageable=None) for card in cards)), machine(4), asking)
    told = [finding.text for finding in found if "lanes" in finding.text]
    assert told[0] == "cuda:0, cuda:2: attached with 4 of 16 lanes, 5 GB/s up and 6 GB/s down"
    assert told[1].startswith("cuda:3: attached with 8 of 16 lanes")
    before, after = machine(4), asked[1]
    assert [new.up / old.up for new, old in zip(after.links, before.links, strict=True)] == [
        4,
        1,
        4,
        1,
    ]
    assert after.link_cap == (before.link_cap or 0) + 6 * before.links[0].up


def test_a_process_on_all_nodes_is_near_every_card() -> None:
    host = replace(HOST, nodes=nodes(0, 1))
    assert judge(readings(replace(GOOD, node=1), host=host), machine(), speed) == []


@pytest.mark.parametrize(("together", "is_said"), [(48e9, False), (20e9, True), (None, False)])
def test_links_that_share_something_are_told(together: float | None, is_said: bool) -> None:
    there = replace(machine(2), link_cap=20e9)
    other = replace(GOOD, name="cuda:1", lanes=replace(GOOD.lanes, generation=3))  # a note
    found = judge(readings(GOOD, other, all_links=together), there, speed)
    told = [finding for finding in found if "all links at once" in finding.text]
    assert bool(told) is is_said
    if told:
        assert found[0] is told[0]  # before the notes
        assert "one by one 50 GB/s" in told[0].text
        assert "if they did not" in told[0].price


def test_a_slow_optimizer_has_a_price() -> None:
    def updates(of: Machine) -> float:
        return (of.host.update_bandwidth or of.host.bandwidth) / 1e9

    host = replace(HOST, update_seconds=2e-9)
    there = replace(machine(), host=replace(machine().host, update_bandwidth=14e9))
    [finding] = judge(readings(GOOD, host=host), there, updates)
    assert "14 GB/s of the 150 GB/s" in finding.text
    assert finding.price == "14 tokens/s now, 150 if it kept up with memory"


def test_limits_and_what_is_not_known_are_notes() -> None:
    host = replace(
        HOST, machine_bytes=512 * 10**9, usable_bytes=24 * 10**9, limited_by="a group: /jobs"
    )
    found = judge(readings(GOOD, host=host, unknown=("nvidia-smi does not answer",)), machine())
    texts = [finding.text for finding in found]
    assert "24 GB of 512 GB of host memory may be used, by a group: /jobs" in texts
    assert texts[-1] == "nvidia-smi does not answer"
    assert [finding.level for finding in found] == [Level.NOTE, Level.UNKNOWN]


CPU = replace(
    GOOD, name="cpu", card="cpu", is_cpu=True, pageable=None, lanes=Lanes(), usual_flops={}
)  # fmt: skip


def test_a_cpu_is_judged_for_its_bytes_alone() -> None:
    there = parse_machine("1xcpu,24GB")
    texts = [finding.text for finding in judge(readings(CPU), there, None)]
    assert texts[-1] == "there is no card: training runs on the CPU"
    broken = judge(readings(replace(CPU, is_intact=False)), there, None)
    assert broken[0].level is Level.BROKEN


def test_what_costs_the_reference_model_nothing_is_said_to() -> None:
    device = replace(GOOD, lanes=replace(GOOD.lanes, used=8))
    found = judge(readings(device), machine(), lambda of: 1000.0)
    assert found[0].price == "no difference to the reference model: 1,000 tokens/s"


def test_a_model_that_never_fits_is_said_to() -> None:
    device = replace(GOOD, lanes=replace(GOOD.lanes, used=8))
    found = judge(readings(device), machine(), lambda of: None)
    assert found[0].price == "the reference model does not fit either way"


# what is shown


def test_every_device_finding_and_hint_is_shown() -> None:
    device = replace(GOOD, is_intact=False, lanes=replace(GOOD.lanes, used=4))
    found = judge(readings(device, CPU, all_links=9e9), machine(2), speed)
    lines = doctor_lines(
        readings(device, CPU, all_links=9e9), machine(2), found, reference="8B, full"
    )
    text = "\n".join(lines)
    assert lines[0].startswith("2x4090,512GB · 512 GB of host memory free")
    for finding in found:
        assert f"{finding.level.value:<9} {finding.text}" in lines
        assert not finding.hint or f"hint: {finding.hint}" in text
        assert finding.price in text
    assert "COMES BACK CHANGED" in text
    assert "pageable 24 GB/s up" in text
    assert "reference model: 8B, full" in text
    assert "all links at once 9 GB/s up" in text


def test_readings_are_plain_values() -> None:
    import json

    plain = json.loads(json.dumps(readings(GOOD, unknown=("x",)).plain()))
    assert plain["devices"][0]["pinned"]["up"] == 25e9
    assert plain["unknown"] == ["x"]
