"""Measure this machine: what `roundpipe doctor` does before it judges.

Devices are measured one after another, so that none takes power or memory from another, then all
links at once. CPU devices of one run are alike: the first is measured for all. What cannot be
known here (no tool, no such file) is a sentence among the readings, never a failure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.host_memory import host_memory
from roundpipe.device.nvidia_smi import CardState, Process, card_states, processes, run_tool
from roundpipe.device.probe import (
    CPU_EFFORT,
    LinkRates,
    Probe,
    effort_for,
    effort_within,
    rate_of_all_links,
)
from roundpipe.device.survey import Place, each_card_once, is_card, survey_devices
from roundpipe.device.topology import Slot, memory_nodes, slot_of
from roundpipe.optim.adamw import AdamWConfig, adamw_
from roundpipe.plan.cards import find_card
from roundpipe.plan.machine import Card, Link, Machine
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
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device
    from roundpipe.device.nvidia_smi import Run
    from roundpipe.device.probe import Effort

_HOST_EFFORT = replace(CPU_EFFORT, copy_bytes=256 * 2**20)  # more than caches hold
_PARAMETERS = 2**24
_UPDATE_BYTES = 28  # that update and publish of one parameter move


def _cores() -> frozenset[int]:
    """The cores this process may run on; empty where the system does not say."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset()


@dataclass(frozen=True)
class Told:
    """What the system's tool says of the cards; None where it does not answer."""

    states: Mapping[str, CardState] | None = None
    processes: Mapping[str, Sequence[Process]] | None = None


def ask_tool(run: Run = run_tool) -> Told:
    """Ask before this process makes a context: inside a container the tool shows foreign pids, so
    we could not tell ourselves from others.
    """
    return Told(card_states(run), processes(run))


@dataclass(frozen=True)
class Examination:
    """How to measure. Every part can be given, for tests.

    ``probe`` and ``all_links`` measure devices; ``host_effort`` and ``parameters`` say how much is
    done on the host.
    """

    place: Place = field(default_factory=Place)
    probe: Callable[[Device, Effort], Probe] = Probe
    all_links: Callable[[Sequence[Probe]], float] = rate_of_all_links
    host_effort: Effort = _HOST_EFFORT
    parameters: int = _PARAMETERS
    cores: Callable[[], frozenset[int]] = _cores
    say: Callable[[str], None] = lambda _: None  # what is measured now

    def of(self, devices: Sequence[Device], told: Told) -> tuple[Readings, Machine]:
        """Measure ``devices`` and the host: the readings, and the machine made of them.

        A card that several of them share is measured once.
        """
        devices = each_card_once(devices)
        surveyed = survey_devices(devices, place=self.place)
        unknown: list[str] = []
        cards = _Cards(self.place, told, unknown)
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
            host=self._host(surveyed.host.memory_bytes),
            all_links=_rounded(self.all_links(with_links)) if len(with_links) > 1 else None,
            unknown=tuple(unknown),
        )
        return found, measured_machine(surveyed, found)

    def _host(self, free_bytes: int) -> HostReadings:
        effort = effort_within(self.host_effort, free_bytes)
        threads = torch.get_num_threads()
        parameters = min(self.parameters, free_bytes // 100)
        one = _on_host(1, effort, _bandwidth)
        several = one if threads == 1 else _on_host(threads, effort, _bandwidth)
        update = _on_host(threads, effort, lambda probe: update_seconds(probe, parameters))
        memory = host_memory(self.place.root)
        cores = self.cores()
        nodes = tuple(
            NodeReadings(
                index=node.index,
                num_bytes=node.num_bytes,
                is_ours=not cores or bool(cores & node.cores),
            )
            for node in memory_nodes(self.place.root)
        )
        return HostReadings(
            threads=threads,
            bandwidth_one_thread=_rounded(one),
            bandwidth=_rounded(max(one, several)),
            update_seconds=_rounded(update),
            machine_bytes=None if memory is None else memory.machine_bytes,
            usable_bytes=None if memory is None else memory.usable_bytes,
            limited_by="" if memory is None else memory.limited_by,
            nodes=nodes,
        )


def update_seconds(probe: Probe, parameters: int) -> float:
    """Seconds that our optimizer takes for one of ``parameters``: bf16 weights, fp32 state."""
    master, exp_avg, exp_avg_sq = (torch.full((parameters,), 0.01) for _ in range(3))
    grad = torch.full((parameters,), 1e-3, dtype=torch.bfloat16)
    working: Tensor = torch.empty_like(grad)
    config = AdamWConfig(lr=1e-5)

    def update() -> None:
        adamw_(master, grad, exp_avg, exp_avg_sq, 10, config, out=working)

    return probe.median_seconds(update) / parameters


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
        update_bandwidth=_rounded(_UPDATE_BYTES / readings.host.update_seconds),
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


@dataclass(frozen=True)
class _Cards:
    """Puts together what driver, kernel and tool say of a card; the rest goes to ``unknown``."""

    place: Place
    told: Told
    unknown: list[str]

    def say_what_is_not_told(self) -> None:
        """Name what the tool would have told of every card."""
        if self.told.states is None or self.told.processes is None:
            self.unknown.append(
                "nvidia-smi does not answer: power limits and other processes are not known"
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
        )


def _device(probe: Probe, card: Card, cards: _Cards) -> DeviceReadings:
    device = probe.device
    has_link = is_card(device)
    about = cards.about(device) if has_link else _About(card.memory_bytes, card.memory_bytes)
    rates = {key: probe.matrix_rate(key) for key in probe.arithmetics}
    return DeviceReadings(
        name=device.name,
        card=card.name,
        is_cpu=not has_link,
        flops={key: _rounded(rate) for key, rate in rates.items() if rate is not None},
        bandwidth=_rounded(probe.bandwidth()),
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
    )


def _on_host(threads: int, effort: Effort, measure: Callable[[Probe], float]) -> float:
    device = CpuDevice("host", threads=threads)
    try:
        return measure(Probe(device, effort))
    finally:
        device.close()


def _bandwidth(probe: Probe) -> float:
    return probe.bandwidth()


def _copy_rates(rates: LinkRates) -> CopyRates:
    return CopyRates(
        up=_rounded(rates.up), down=_rounded(rates.down), duplex=round(rates.duplex, 3)
    )


def _title(readings: Readings) -> str:
    names = [device.card for device in readings.devices]
    return " + ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _rounded(rate: float) -> float:
    """To four digits: a measurement is not better than that."""
    return float(f"{rate:.4g}")
