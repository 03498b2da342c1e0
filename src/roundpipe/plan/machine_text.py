"""From ``8x4090,512GB,pcie3`` to a Machine.

    4090 · 2x3090 · 1x4090+1x3060 · 2xcpu · a100-40    cards, each an entry of the table
    64GB                                               host memory
    pcie3 · pcie4x8 · x4                               generation and lanes of every link
    disk=2TB · bandwidth=200GB/s · link=25GB/s · duplex=0.5 · cap=100GB/s

What is not said is assumed from the table and from the kind of host, and a note says what.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.plan.amounts import read_bytes, read_rate, write_bytes, write_rate
from roundpipe.plan.cards import CardModel, card_named, find_card
from roundpipe.plan.hosts import (
    GENERATIONS,
    HostKind,
    cpu_card,
    cpu_link,
    host_kind,
    lanes_each,
    pcie_link,
    pcie_rate,
)
from roundpipe.plan.machine import Card, Host, Link, Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

_COUNTED = re.compile(r"(\d+)\s*[x×*]\s*(\S.*)")
_PCIE = re.compile(r"(?:pcie|gen)\s*-?(\d)(?:\.0)?(?:\s*x\s*(\d+))?")
_LANES = re.compile(r"x\s*(\d+)")
_UNIT = re.compile(r"\d[\d.]*\s*[kmgtp]i?b?", re.IGNORECASE)
MAX_CARDS = 64  # that one process could drive; a search takes longer with each
_KEYS = ("memory", "bandwidth", "disk", "link", "duplex", "cap")
_EXAMPLE = "machine=8x4090,512GB"


@dataclass
class Said:
    """What is said of a machine, before anything is assumed.

    ``values`` by the names of the text's keys: memory, disk (bytes), bandwidth, link, cap (bytes
    per second), duplex (a share). ``has_links``: what links carry is said card by card.
    """

    cards: list[CardModel | None] = field(default_factory=list)  # None: a CPU device
    generation: int | None = None
    lanes: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    has_links: bool = False

    @property
    def models(self) -> list[CardModel]:
        """The cards that have a link of their own."""
        return [model for model in self.cards if model is not None]


def parse_machine(text: str) -> Machine:
    """The machine that ``text`` describes; see the module docstring.

    Raises ConfigError for what it does not understand, with the nearest cards or the way to say it.
    """
    return assume(read_machine(text), text.strip())


def read_machine(text: str) -> Said:
    """What ``text`` says, nothing assumed. Raises ConfigError, see `parse_machine`."""
    said = Said()
    for term in text.split(","):
        if term.strip():
            _read_term(term.strip(), said)
    if not said.cards:
        raise ConfigError(f"a machine without a card: {text!r}\nhint: {_EXAMPLE}, or 1xcpu,16GB")
    return said


def _read_term(term: str, said: Said) -> None:
    lower = term.lower()
    key, equals, value = lower.partition("=")
    pcie = _PCIE.fullmatch(lower)
    lanes = _LANES.fullmatch(lower)
    if equals:
        _say(key.strip(), value.strip(), said)
    elif pcie is not None:
        said.generation = _known_generation(int(pcie.group(1)), term)
        if pcie.group(2):
            said.lanes = _known_lanes(int(pcie.group(2)), term)
    elif lanes is not None:
        said.lanes = _known_lanes(int(lanes.group(1)), term)
    elif _UNIT.fullmatch(lower):
        _say("memory", lower, said)
    else:
        if said.cards and term.isdecimal() and find_card(term) is None:
            raise ConfigError(f"neither a card nor a size: {term}\nhint: {term}GB is host memory")
        for part in term.split("+"):
            said.cards.extend(_read_cards(part.strip()))
    if len(said.cards) > MAX_CARDS:
        raise ConfigError(f"more cards than a machine has: {term}\nhint: {_EXAMPLE}")


def _read_cards(part: str) -> Sequence[CardModel | None]:
    counted = _COUNTED.fullmatch(part)
    count, name = (int(counted.group(1)), counted.group(2)) if counted else (1, part)
    if not 1 <= count <= MAX_CARDS or not name:
        raise ConfigError(f"not a number of cards: {part!r}\nhint: {_EXAMPLE}")
    return [None if name.lower() == "cpu" else card_named(name)] * count


def _known_generation(generation: int, term: str) -> int:
    if generation not in GENERATIONS:
        raise ConfigError(f"no such generation of PCIe: {term}\nhint: pcie4, or pcie4x8")
    return generation


def _known_lanes(lanes: int, term: str) -> int:
    if lanes not in (1, 2, 4, 8, 16):
        raise ConfigError(f"not a number of lanes: {term}\nhint: x16, x8 or x4")
    return lanes


def _say(key: str, value: str, said: Said) -> None:
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1) or [", ".join(_KEYS)]
        raise ConfigError(f"unknown in a machine: {key}={value}\nhint: {near[0]}")
    if key in said.values:
        raise ConfigError(f"{key} is given twice: {value}\nhint: leave one of them out")
    said.values[key] = _positive(key, value)


def _positive(key: str, value: str) -> float:
    if key == "duplex":
        share = float(value) if re.fullmatch(r"\d*\.?\d+", value) else 0.0
        if not 0 < share <= 1:
            raise ConfigError(f"not a share of a link's rate: duplex={value}\nhint: duplex=0.5")
        return share
    amount = read_rate(value) if key in ("bandwidth", "link", "cap") else read_bytes(value)
    if not amount or not _UNIT.match(value):
        shown = value if key == "memory" else f"{key}={value}"
        raise ConfigError(f"not an amount: {shown}\nhint: a unit, e.g. memory=64GB, link=25GB/s")
    return amount


def assume(said: Said, text: str) -> Machine:
    """The machine of which so much was said; the rest is filled in, with notes that say so."""
    notes: list[str] = []
    memory = said.values.get("memory")
    kind = host_kind(
        len(said.models),
        None if memory is None else int(memory),
        max((_generation(model, said) for model in said.models), default=0),
    )
    if memory is None:
        memory = kind.memory_bytes
        notes.append(
            f"host memory is not given: {write_bytes(memory)} assumed "
            f"(machine={text},{write_bytes(memory).replace(' ', '')} says it)"
        )
    bandwidth = said.values.get("bandwidth")
    if bandwidth is None:
        bandwidth = kind.bandwidth
        notes.append(f"memory of a {kind.name}: {write_rate(bandwidth)} assumed")
    disk = said.values.get("disk")
    host = Host(
        memory_bytes=int(memory),
        bandwidth=bandwidth,
        disk_bytes=None if disk is None else int(disk),
    )
    return Machine(
        cards=_cards(said, host),
        links=_links(said, kind, notes),
        host=host,
        link_cap=_cap(said, kind),
        text=text,
        notes=tuple(notes),
    )


def _cards(said: Said, host: Host) -> tuple[Card, ...]:
    num_cpus = said.cards.count(None)
    return tuple(
        cpu_card(num_cpus, memory_bytes=host.memory_bytes, bandwidth=host.bandwidth)
        if model is None
        else model.at_work()
        for model in said.cards
    )


def _links(said: Said, kind: HostKind, notes: list[str]) -> tuple[Link, ...]:
    share = lanes_each(kind, len(said.models))
    is_said = said.has_links or said.lanes is not None or "link" in said.values
    if not is_said and share < 16 and said.models:
        notes.append(
            f"{len(said.models)} cards on a {kind.name}: {share} lanes each assumed (x16 says more)"
        )
    return tuple(cpu_link() if model is None else _link(model, said, share) for model in said.cards)


def _link(model: CardModel, said: Said, share: int) -> Link:
    duplex = said.values.get("duplex", model.duplex)
    rate = said.values.get("link")
    if rate is not None:
        return Link(up=rate, down=rate, duplex=duplex)
    lanes = min(model.lanes, said.lanes or share)
    return pcie_link(_generation(model, said), lanes, duplex=duplex)


def _generation(model: CardModel, said: Said) -> int:
    """The slower of card and slot."""
    return min(model.pcie, said.generation or model.pcie)


def _cap(said: Said, kind: HostKind) -> float | None:
    """What all lanes of the host move each way, unless the text says or implies more."""
    if "cap" in said.values:
        return said.values["cap"]
    if not said.models or "link" in said.values:
        return None
    lanes = max(kind.lanes, (said.lanes or 0) * len(said.models))
    return pcie_rate(max(_generation(model, said) for model in said.models), lanes)
