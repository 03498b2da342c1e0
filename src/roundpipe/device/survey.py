"""This machine as a Machine: what is free now, and how fast it should be.

Nothing is measured here. Memory and disk are asked of the system; rates come from the table of
cards and from what the kernel shows of their slots, or from a Machine that was measured here
before, where its cards are the cards at hand. What was assumed is said in the machine's notes.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CardFacts, card_facts
from roundpipe.device.host_memory import host_memory
from roundpipe.device.resolve import resolve_devices
from roundpipe.device.topology import Slot, slot_of
from roundpipe.plan.amounts import write_bytes
from roundpipe.plan.cards import CardModel, find_card, guessed_card
from roundpipe.plan.hosts import (
    DESKTOP,
    GENERATIONS,
    HostKind,
    cpu_card,
    cpu_link,
    host_kind,
    pcie_link,
    pcie_rate,
)
from roundpipe.plan.machine import Card, Host, Link, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from roundpipe.device.api import Device
    from roundpipe.device.resolve import DeviceSpec

_OTHERS_FROM = 0.05  # of a card's memory; less is the driver's and the desktop's
_CONTEXT = 2**30  # bytes of a card that this process and the driver may hold


@dataclass(frozen=True)
class Place:
    """What the answer depends on beside the devices; every part can be given, for tests."""

    root: Path = Path("/")
    folder: Path = Path()  # where a run would write
    card_facts: Callable[[torch.device], CardFacts] = card_facts


@dataclass(frozen=True)
class _Found:
    """One device of this machine: what it is, and its link as it is attached."""

    card: Card
    link: Link
    generation: int = 0  # of its PCIe; 0: it has none


def survey(
    spec: DeviceSpec = "auto",
    *,
    environment: Mapping[str, str] | None = None,
    saved: Machine | None = None,
    place: Place | None = None,
) -> Machine:
    """This machine with the devices that ``spec`` asks for; ``saved`` was measured on it.

    Makes the devices for a moment: cards get a context. Raises DeviceError as `resolve_devices`.
    """
    devices = resolve_devices(spec, environment=environment)
    try:
        return survey_devices(devices, saved=saved, place=place)
    finally:
        for device in devices:
            device.close()


def survey_devices(
    devices: Sequence[Device], *, saved: Machine | None = None, place: Place | None = None
) -> Machine:
    """This machine with ``devices``; see `survey`."""
    here = place or Place()
    notes: list[str] = []
    memory = host_memory(here.root)
    if memory is None:
        notes.append(f"host memory is not known: {write_bytes(DESKTOP.memory_bytes)} assumed")
    elif memory.limited_by:
        notes.append(
            f"host memory: {write_bytes(memory.usable_bytes)} of "
            f"{write_bytes(memory.machine_bytes)} by {memory.limited_by}"
        )
    free = DESKTOP.memory_bytes if memory is None else memory.free_bytes
    alone = each_card_once(devices)
    num_cpus = sum(not is_card(device) for device in alone)
    found = tuple(
        _card(device, here, notes) if is_card(device) else _cpu(device, free, num_cpus)
        for device in alone
    )
    kind = host_kind(
        len(alone) - num_cpus,
        None if memory is None else memory.machine_bytes,
        max((each.generation for each in found), default=0),
    )
    machine = Machine(
        cards=tuple(each.card for each in found),
        links=tuple(each.link for each in found),
        host=Host(memory_bytes=free, bandwidth=kind.bandwidth, disk_bytes=free_disk(here.folder)),
        link_cap=_cap(found, kind),
        text="this machine",
    )
    measured, note = with_measured(machine, saved)
    return replace(_shared_out(measured, alone, devices), notes=(*notes, note))


def is_card(device: Device) -> bool:
    """Whether a device computes elsewhere than on the CPU."""
    return device.torch_device.type != "cpu"


def each_card_once(devices: Sequence[Device]) -> list[Device]:
    """``devices`` without those that are further workers on one card."""
    first = {device.torch_device: device for device in reversed(devices) if is_card(device)}
    return [each for each in devices if not is_card(each) or first[each.torch_device] is each]


def _shared_out(machine: Machine, alone: Sequence[Device], devices: Sequence[Device]) -> Machine:
    """From one entry a card to one a worker: workers on one card have a part of it each."""
    if len(alone) == len(devices):
        return machine
    workers = Counter(device.torch_device for device in devices if is_card(device))
    places = {device.torch_device: place for place, device in enumerate(alone) if is_card(device)}
    cpus = iter([place for place, device in enumerate(alone) if not is_card(device)])
    cards, links = [], []
    for device in devices:
        place = places[device.torch_device] if is_card(device) else next(cpus)
        share = workers[device.torch_device] or 1
        card, link = machine.cards[place], machine.links[place]
        cards.append(
            replace(
                card,
                memory_bytes=card.memory_bytes // share,
                flops={key: rate / share for key, rate in card.flops.items()},
                bandwidth=card.bandwidth / share,
            )
        )
        links.append(replace(link, up=link.up / share, down=link.down / share))
    return replace(machine, cards=tuple(cards), links=tuple(links))


def with_measured(machine: Machine, saved: Machine | None) -> tuple[Machine, str]:
    """``machine`` with the rates of ``saved`` where it has the same cards; and what was done."""
    if saved is None:
        return machine, "rates are by data sheet: roundpipe doctor --save measures them"
    known: defaultdict[str, list[tuple[Card, Link]]] = defaultdict(list)
    for card, link in zip(saved.cards, saved.links, strict=True):
        known[card.name].append((card, link))
    for name in dict.fromkeys(card.name for card in machine.cards):
        wanted = sum(card.name == name for card in machine.cards)
        shared = any(card.in_host for card in machine.cards if card.name == name)
        if wanted > len(known[name]) or (shared and wanted != len(known[name])):
            return machine, (
                f"rates are by data sheet: what was measured has {len(known[name])} × {name}, "
                f"not {wanted} (roundpipe doctor --save measures anew)"
            )
    pairs = [known[card.name].pop(0) for card in machine.cards]
    cards = tuple(
        replace(card, flops=rates.flops, bandwidth=rates.bandwidth)
        for card, (rates, _) in zip(machine.cards, pairs, strict=True)
    )
    host = replace(
        machine.host,
        bandwidth=saved.host.bandwidth,
        update_bandwidth=saved.host.update_bandwidth,
    )
    links = tuple(link for _, link in pairs)
    measured = replace(machine, cards=cards, links=links, host=host, link_cap=saved.link_cap)
    return measured, "rates were measured here by roundpipe doctor"


def free_disk(folder: Path) -> int | None:
    """Free bytes where ``folder`` is or will be; None where the system does not say."""
    for place in (folder.absolute(), *folder.absolute().parents):
        if place.exists():
            try:
                return shutil.disk_usage(place).free
            except OSError:
                return None
    return None


def _cpu(device: Device, host_bytes: int, num_cpus: int) -> _Found:
    threads = device.threads if isinstance(device, CpuDevice) else 1
    card = cpu_card(
        num_cpus,
        memory_bytes=host_bytes,
        bandwidth=DESKTOP.bandwidth,
        cores=threads * num_cpus,
    )
    return _Found(card, cpu_link())


def _card(device: Device, here: Place, notes: list[str]) -> _Found:
    facts = here.card_facts(device.torch_device)
    model = find_card(facts.name, memory_bytes=facts.total_bytes)
    card, duplex = _rated(facts, model, device.name, notes)
    used = facts.total_bytes - facts.free_bytes - _CONTEXT
    if used > _OTHERS_FROM * facts.total_bytes:
        notes.append(
            f"{device.name}: {write_bytes(used)} of {write_bytes(facts.total_bytes)} are in use "
            "by others"
        )
    slot = slot_of(facts.bus, here.root)
    generation = _known_generation(slot, model)
    lanes = slot.lanes or (16 if model is None else model.lanes)
    return _Found(card, pcie_link(generation, lanes, duplex=duplex), generation)


def _rated(
    facts: CardFacts, model: CardModel | None, name: str, notes: list[str]
) -> tuple[Card, float]:
    if model is not None:
        return replace(model.at_work(), memory_bytes=facts.free_bytes), model.duplex
    notes.append(f"{name}: {facts.name} is not in the table: its rates are guessed")
    guess = guessed_card(
        facts.name, memory_bytes=facts.free_bytes, multiprocessors=facts.multiprocessors
    )
    return guess, 0.5


def _known_generation(slot: Slot, model: CardModel | None) -> int:
    """What the kernel shows, unless it is older than any card that trains; else the sheet's."""
    shown = slot.generation
    if shown is not None and shown >= 2:
        return min(shown, GENERATIONS[-1])
    return 4 if model is None else model.pcie


def _cap(found: Sequence[_Found], kind: HostKind) -> float | None:
    """What all lanes of the host move each way; never less than one card's own link."""
    generation = max((each.generation for each in found), default=0)
    if not generation:
        return None
    widest = max(each.link.up for each in found if each.generation)
    return max(pcie_rate(generation, kind.lanes), widest)
