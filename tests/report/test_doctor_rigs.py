"""Whole reports on machines people have, as text: invented readings, a pretended model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.cards import card_named
from roundpipe.plan.machine_text import parse_machine
from roundpipe.report.doctor import judge
from roundpipe.report.doctor_text import doctor_lines
from roundpipe.report.readings import (
    CopyRates,
    DeviceReadings,
    DiskReadings,
    HostReadings,
    Lanes,
    NodeReadings,
    OtherProcess,
    PackageReadings,
    Readings,
    SoftwareReadings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.plan.machine import Machine

GB = 10**9


def card(name: str, place: int, *, lanes: int = 16, generation: int = 4, **more: Any) -> Any:
    """One that is as good as its sheet, attached with ``lanes``."""
    model = card_named(name)
    usual = dict(model.at_work().flops)
    rate = {4: 1.56e9, 5: 3.12e9}[generation] * lanes
    pinned = CopyRates(up=rate, down=rate, duplex=0.9)
    device = DeviceReadings(
        name=f"cuda:{place}",
        card=model.at_work().name,
        is_cpu=False,
        flops=usual,
        bandwidth=0.9 * model.at_work().bandwidth,
        pinned=pinned,
        pageable=replace(pinned, up=0.9 * rate, down=0.9 * rate),
        is_intact=True,
        total_bytes=model.at_work().memory_bytes,
        free_bytes=model.at_work().memory_bytes - GB,
        usual_flops=usual,
        lanes=Lanes(used=lanes, of_card=16, generation=generation, of_card_generation=generation),
        power_limit=350,
        power_default=350,
        is_kept_ready=True,
        lost_words=0,
        degrees=61.0,
    )
    return replace(device, **more)


def two_3090() -> Readings:
    """A desktop: eight lanes each, a power limit, memory in one channel, no compiler."""
    slow = {key: 0.8 * rate for key, rate in card_named("3090").at_work().flops.items()}
    cards = [
        card("3090", place, lanes=8, flops=slow, power_limit=250, is_kept_ready=False)
        for place in range(2)
    ]
    host = HostReadings(
        threads=6,
        bandwidth_one_thread=11e9,
        bandwidth=19e9,
        usual_bandwidth=60e9,
        update_seconds=1.9e-9,
        update_threads=6,
        not_compiled="no C++ compiler: none of c++, g++, clang++ is on the path",
        machine_bytes=64 * GB,
        usable_bytes=64 * GB,
        cores=8,
        machine_cores=8,
        swapped_bytes=3 * GB,
        huge_pages="madvise",
        fresh=5e9,
    )
    return Readings(
        devices=tuple(cards),
        host=host,
        all_links=25e9,
        disks=(
            DiskReadings(
                used_for="runs and the hub's cache",
                folder="/data",
                free_bytes=1400 * GB,
                write=0.14e9,
                read=0.19e9,
            ),
        ),
        software=SoftwareReadings(
            python="3.12.3",
            torch="2.13.0+cu128, CUDA 12.8",
            packages=(
                PackageReadings(name="bitsandbytes", version=None, needs="0.48"),
                PackageReadings(name="gguf", version=None, needs="0.10", is_optional=True),
                PackageReadings(
                    name="transformers", version="4.57.0", needs="5.24", is_enough=False
                ),
            ),
            has_hub_token=True,
            num_cards=2,
            tool_seconds=3.2,
        ),
    )


def eight_4090() -> Readings:
    """A server with two sockets of which one is used: hot, narrow, shared and broken cards."""
    cards = [card("4090", place, node=place // 4) for place in range(8)]
    slow = {key: 0.6 * rate for key, rate in cards[0].flops.items()}
    cards[2] = card("4090", 2, node=0, lanes=4)
    cards[3] = replace(cards[3], flops=slow, slowed_by=("its heat",), degrees=87.0)
    cards[5] = replace(
        cards[5],
        free_bytes=9 * GB,
        processes=(OtherProcess(pid=4242, name="python3", num_bytes=15 * GB),),
    )
    cards[6] = replace(cards[6], is_intact=False)
    cards[7] = replace(cards[7], lost_words=2)
    for place in range(4, 8):
        far = CopyRates(up=17e9, down=17e9, duplex=0.9)
        cards[place] = replace(cards[place], pinned=far, pageable=far)
    nodes = tuple(
        NodeReadings(index=index, num_bytes=256 * GB, is_ours=index == 0) for index in (0, 1)
    )
    host = HostReadings(
        threads=6,
        bandwidth_one_thread=12e9,
        bandwidth=55e9,
        usual_bandwidth=60e9,
        update_seconds=0.5e-9,
        update_threads=6,
        machine_bytes=512 * GB,
        usable_bytes=256 * GB,
        limited_by="the memory limit of a group: /sys/fs/cgroup/job",
        nodes=nodes,
        cores=8,
        machine_cores=64,
        clock=(1.5e9, 3.6e9, "the governor powersave"),
        huge_pages="never",
        fresh=2e9,
    )
    return Readings(
        devices=tuple(cards),
        host=host,
        all_links=90e9,
        disks=(
            DiskReadings(
                used_for="runs", folder="/scratch", free_bytes=9000 * GB, write=3e9, read=5e9
            ),
            DiskReadings(
                used_for="the hub's cache", folder="/cache", free_bytes=12 * GB, read=0.3e9
            ),
        ),
        software=SoftwareReadings(
            python="3.12.3",
            torch="2.13.0+cu128, CUDA 12.8",
            variables={"WORLD_SIZE": "8", "CUDA_LAUNCH_BLOCKING": "1", "HF_HUB_OFFLINE": "1"},
            has_hub_token=False,
            num_cards=8,
            tool_seconds=0.2,
        ),
        unknown=("the lanes of cuda:0 are not shown by this system",),
    )


def one_5090_in_wsl() -> Readings:
    """A gamer's machine: Linux inside Windows, a desktop on the card, one of two cards hidden."""
    one = card("5090", 0, generation=5, lanes=16, processes=())
    one = replace(
        one,
        free_bytes=one.total_bytes - 5 * GB,
        pageable=CopyRates(up=9e9, down=8e9, duplex=0.9),
    )
    host = HostReadings(
        threads=14,
        bandwidth_one_thread=25e9,
        bandwidth=62e9,
        usual_bandwidth=60e9,
        update_seconds=0.5e-9,
        update_threads=14,
        machine_bytes=48 * GB,
        usable_bytes=48 * GB,
        limited_by="WSL: memory in .wslconfig",
        is_wsl=True,
        cores=16,
        machine_cores=16,
        huge_pages="always",
        fresh=8e9,
    )
    return Readings(
        devices=(one,),
        host=host,
        disks=(
            DiskReadings(
                used_for="runs and the hub's cache",
                folder="/data",
                free_bytes=800 * GB,
                write=1.5e9,
                read=2.5e9,
            ),
        ),
        software=SoftwareReadings(
            python="3.13.1",
            torch="2.13.0+cu130, CUDA 13.0",
            variables={"CUDA_VISIBLE_DEVICES": "0"},
            has_hub_token=True,
            num_cards=2,
            tool_seconds=0.3,
        ),
    )


def good_5090() -> Readings:
    """A machine without any problem."""
    rig = one_5090_in_wsl()
    device = replace(rig.devices[0], free_bytes=rig.devices[0].total_bytes - GB, pageable=None)
    return replace(
        rig,
        devices=(device,),
        host=replace(rig.host, is_wsl=False, limited_by=""),
        software=replace(rig.software, variables={}, num_cards=1),
    )


def speed(machine: Machine) -> float | None:
    """Tokens/s of a pretended model: 24 GB of weights a step come up and 64 TFLOP are computed by
    each card for 16,384 tokens, then the host updates one billion parameters.
    """
    if min(card.memory_bytes for card in machine.cards) < 8 * GB:
        return None
    compute = 64e12 / sum(card.flops["bf16"] for card in machine.cards) * 8
    links = [min(link.up, link.down) * (0.5 + link.duplex / 2) for link in machine.links]
    cap = min(sum(links), machine.link_cap or sum(links))
    update = machine.host.update_bandwidth or machine.host.bandwidth
    return 16384 * 8 / (max(compute, 24e9 * len(links) / cap) + 28e9 / update)


RIGS = {
    "2x3090": (two_3090, "2x3090,64GB,pcie4x8"),
    "8x4090": (eight_4090, "8x4090,512GB,pcie4"),
    "1x5090_wsl": (one_5090_in_wsl, "1x5090,48GB,pcie5"),
    "1x5090_good": (good_5090, "1x5090,96GB,pcie5"),
}


def largest(machine: Machine) -> str:
    return "8B, full" if machine.host.memory_bytes > 140 * GB else "8B, lora"


@pytest.mark.parametrize("name", RIGS)
def test_what_is_said_of_a_rig(name: str, golden: Callable[[str, str], None]) -> None:
    make, text = RIGS[name]
    readings = make()
    machine = parse_machine(text)
    links = tuple(
        replace(link, up=device.pinned.up, down=device.pinned.down, duplex=device.pinned.duplex)
        for link, device in zip(machine.links, readings.devices, strict=True)
    )
    cards = tuple(
        replace(card, flops=device.flops, memory_bytes=device.free_bytes)
        for card, device in zip(machine.cards, readings.devices, strict=True)
    )
    host = replace(
        machine.host,
        memory_bytes=60 * GB if len(cards) == 8 else machine.host.memory_bytes,
        bandwidth=readings.host.bandwidth,
        update_bandwidth=28 / readings.host.update_seconds,
    )
    machine = replace(machine, links=links, cards=cards, host=host, link_cap=readings.all_links)
    findings = judge(readings, machine, speed, largest=largest)
    lines = doctor_lines(readings, machine, findings, reference="a pretended model")
    golden(f"doctor/{name}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", RIGS)
def test_every_finding_is_one_sentence_with_a_price(name: str) -> None:
    make, text = RIGS[name]
    for finding in judge(make(), parse_machine(text), speed, largest=largest):
        assert finding.price or finding.level.value == "unknown", finding
        for part in (finding.text, finding.price, finding.hint):
            assert "\n" not in part
            assert not part.endswith((".", " "))
