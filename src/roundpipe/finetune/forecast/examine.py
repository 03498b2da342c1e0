"""Measure this machine: what `roundpipe doctor` does before it judges.

Devices are measured one after another, so that none takes power or memory from another, then all
links at once, then the host (`examine_host`), then disks and software (`examine_software`). CPU
devices of one run are alike: the first is measured for all. What cannot be known here (no tool, no
such file) is a sentence among the readings, never a failure.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from roundpipe.device.nvidia_smi import (
    CardState,
    Process,
    Slowed,
    card_states,
    processes,
    run_tool,
    what_slows,
)
from roundpipe.device.probe import (
    LinkRates,
    Probe,
    effort_for,
    effort_within,
    rate_of_all_links,
)
from roundpipe.device.survey import Place, each_card_once, is_card, survey_devices
from roundpipe.device.topology import Slot, slot_of
from roundpipe.finetune.forecast.examine_host import HostExamination, rounded
from roundpipe.plan.cards import find_card
from roundpipe.plan.machine import Card, Link, Machine
from roundpipe.report.readings import CopyRates, DeviceReadings, Lanes, OtherProcess, Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.device.api import Device
    from roundpipe.device.nvidia_smi import Run
    from roundpipe.device.probe import Effort
    from roundpipe.finetune.forecast.examine_software import SoftwareExamination

_UPDATE_BYTES = 28  # that update and publish of one parameter move


@dataclass(frozen=True)
class Told:
    """What the system's tool says of the cards; None where it does not answer.

    ``seconds``: how long it took to answer first. ``slowed`` asks what holds back each card now.
    """

    states: Mapping[str, CardState] | None = None
    processes: Mapping[str, Sequence[Process]] | None = None
    seconds: float | None = None
    slowed: Callable[[], Mapping[str, Slowed]] = dict


def ask_tool(run: Run = run_tool) -> Told:
    """Ask before this process makes a context: inside a container the tool shows foreign pids, so
    we could not tell ourselves from others.
    """
    start = time.monotonic()
    states = card_states(run)
    seconds = None if states is None else time.monotonic() - start
    return Told(states, processes(run), seconds, lambda: what_slows(run))


@dataclass(frozen=True)
class Examination:
    """How to measure. Every part can be given, for tests.

    ``probe`` and ``all_links`` measure devices, ``host`` the host; ``software`` None: not asked.
    """

    place: Place = field(default_factory=Place)
    probe: Callable[[Device, Effort], Probe] = Probe
    all_links: Callable[[Sequence[Probe]], float] = rate_of_all_links
    host: HostExamination = field(default_factory=HostExamination)
    software: SoftwareExamination | None = None
    say: Callable[[str], None] = lambda _: None  # what is measured now

    def of(self, devices: Sequence[Device], told: Told) -> tuple[Readings, Machine]:
        """Measure ``devices`` and the host: the readings, and the machine made of them.

        A card that several of them share is measured once.
        """
        devices = each_card_once(devices)
        surveyed = survey_devices(devices, place=self.place)
        unknown: list[str] = []
        cards = _Cards(self.place, told, unknown, is_amd=torch.version.hip is not None)
        if any(is_card(device) for device in devices):
            cards.say_what_is_not_told()
        room = min(surveyed.host.memory_bytes, *(card.memory_bytes for card in surveyed.cards))
        probes = [
            self.probe(device, effort_within(effort_for(device), room // len(devices)))
            for device in devices
        ]
        readings: list[DeviceReadings] = []
        for probe, card in zip(probes, surveyed.cards, strict=True):
            like = next((r for r in readings if r.is_cpu and card.in_host), None)
            if like is None:
                self.say(f"measuring {probe.device.name}")
                readings.append(_device(probe, card, cards))
            else:
                readings.append(replace(like, name=probe.device.name))
        self.say("measuring the host")
        with_links = [probe for probe in probes if is_card(probe.device)]
        found = Readings(
            devices=tuple(readings),
            host=self.host.of(surveyed.host.memory_bytes, readings),
            all_links=rounded(self.all_links(with_links)) if len(with_links) > 1 else None,
            unknown=tuple(unknown),
        )
        if self.software is not None:
            self.say("measuring the disk")
            found = replace(
                found,
                disks=self.software.disks(),
                software=replace(
                    self.software.software(readings),
                    num_cards=None if told.states is None else len(told.states),
                    tool_seconds=told.seconds,
                ),
            )
        return found, measured_machine(surveyed, found)


def measured_machine(surveyed: Machine, readings: Readings) -> Machine:
    """``surveyed`` with the rates of ``readings``. A limit shared by the links is kept if felt."""
    cards = tuple(
        replace(card, flops=dict(device.flops), bandwidth=device.bandwidth)
        for card, device in zip(surveyed.cards, readings.devices, strict=True)
    )
    links = tuple(
        Link(up=device.pinned.up, down=device.pinned.down, duplex=device.pinned.duplex)
        for device in readings.devices
    )
    host = replace(
        surveyed.host,
        bandwidth=readings.host.bandwidth,
        update_bandwidth=rounded(_UPDATE_BYTES / readings.host.update_seconds),
    )
    cap = readings.all_links
    alone = sum(device.pinned.up for device in readings.devices if not device.is_cpu)
    return replace(
        surveyed,
        cards=cards,
        links=links,
        host=host,
        link_cap=cap if cap is not None and cap < 0.95 * alone else None,
        text=_title(readings),
        notes=(),
    )


@dataclass(frozen=True)
class _About:
    """What is known of one device without measuring."""

    total_bytes: int
    free_bytes: int
    usual_flops: dict[str, float] = field(default_factory=dict)
    slot: Slot = field(default_factory=Slot)
    state: CardState = field(default_factory=lambda: CardState(None, None))
    processes: tuple[OtherProcess, ...] = ()
    bus: str = ""


@dataclass(frozen=True)
class _Cards:
    """Puts together what driver, kernel and tool say of a card; the rest goes to ``unknown``."""

    place: Place
    told: Told
    unknown: list[str]
    is_amd: bool = False

    def say_what_is_not_told(self) -> None:
        """Name what the tool would have told of every card."""
        if self.told.states is None or self.told.processes is None:
            tool = "AMD's tool is not asked" if self.is_amd else "nvidia-smi does not answer"
            self.unknown.append(
                f"{tool}: power limits, heat, errors of memory and other processes are not known"
            )

    def about(self, device: Device) -> _About:
        """Everything of the card that ``device`` is."""
        facts = self.place.card_facts(device.torch_device)
        slot = slot_of(facts.bus, self.place.root)
        if slot.lanes is None:
            self.unknown.append(f"the lanes of {device.name} are not shown by this system")
        model = find_card(facts.name, memory_bytes=facts.total_bytes)
        if model is None:
            self.unknown.append(
                f"{facts.name} is not in the table of cards: what it usually reaches is not known"
            )
        others = (self.told.processes or {}).get(facts.bus, ())
        return _About(
            facts.total_bytes,
            facts.free_bytes,
            {} if model is None else dict(model.at_work().flops),
            slot,
            (self.told.states or {}).get(facts.bus, CardState(None, None)),
            tuple(
                OtherProcess(pid=each.pid, name=each.name, num_bytes=each.num_bytes)
                for each in others
                if each.pid != os.getpid()
            ),
            facts.bus,
        )

    def slowed(self, probe: Probe, bus: str) -> Slowed:
        """What holds the card at ``bus`` back while it computes; nothing where it is not told."""
        told = self.told.states is not None and bus
        found = probe.busy_while(self.told.slowed) if told else {}
        return found.get(bus, Slowed((), None))


def _device(probe: Probe, card: Card, cards: _Cards) -> DeviceReadings:
    device = probe.device
    has_link = is_card(device)
    about = cards.about(device) if has_link else _About(card.memory_bytes, card.memory_bytes)
    rates = {key: probe.matrix_rate(key) for key in probe.arithmetics}
    slowed = cards.slowed(probe, about.bus)  # warm from the products
    return DeviceReadings(
        name=device.name,
        card=card.name,
        is_cpu=not has_link,
        flops={key: rounded(rate) for key, rate in rates.items() if rate is not None},
        bandwidth=rounded(probe.bandwidth()),
        pinned=_copy_rates(probe.link(pinned=True)),
        pageable=_copy_rates(probe.link(pinned=False)) if has_link else None,
        is_intact=probe.round_trip_is_intact(),
        total_bytes=about.total_bytes,
        free_bytes=about.free_bytes,
        usual_flops=about.usual_flops,
        lanes=Lanes(
            used=about.slot.lanes,
            of_card=about.slot.card_lanes,
            generation=about.slot.generation,
            of_card_generation=about.slot.card_generation,
        ),
        node=about.slot.node,
        power_limit=about.state.power_limit,
        power_default=about.state.power_default,
        processes=about.processes,
        is_kept_ready=about.state.is_kept_ready,
        lost_words=about.state.lost_words,
        slowed_by=slowed.by,
        degrees=slowed.degrees,
    )


def _copy_rates(rates: LinkRates) -> CopyRates:
    return CopyRates(up=rounded(rates.up), down=rounded(rates.down), duplex=round(rates.duplex, 3))


def _title(readings: Readings) -> str:
    names = [device.card for device in readings.devices]
    return " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
