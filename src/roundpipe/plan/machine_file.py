"""A Machine as a mapping of plain values, both ways: what a machine file holds.

    machine: 8x4090,512GB          optional: the rest overrides it
    cards:                         a list, or one mapping that holds for every card of ``machine``
      - card: RTX 4090             from the table; the other keys override
        count: 8
        memory: 24.7 GB
        bandwidth: 850 GB/s
        tflops: {bf16: 150, fp16_fp16: 230}
        link: {up: 25 GB/s, down: 24 GB/s, duplex: 0.5}
    link_cap: 180 GB/s
    host: {memory: 512 GB, bandwidth: 150 GB/s, disk: 2 TB}
    measured: {…}                  anything; kept for people, never read

Nothing here reads a file: that is the caller's. Every key is checked, and a mapping that was
written by `machine_mapping` gives the same machine again, to the last byte.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import groupby
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.plan.amounts import read_bytes, read_rate, write_bytes, write_rate
from roundpipe.plan.card_table import Kind
from roundpipe.plan.cards import CardModel, card_named
from roundpipe.plan.machine_text import MAX_CARDS, Said, assume, read_machine

if TYPE_CHECKING:
    from roundpipe.plan.machine import Card, Link, Machine

_KEYS = ("machine", "name", "cards", "link_cap", "host", "measured")
_CARD_KEYS = ("card", "name", "count", "memory", "bandwidth", "tflops", "in_host", "link")
_LINK_KEYS = ("up", "down", "duplex")
_HOST_KEYS = ("memory", "bandwidth", "disk", "update_bandwidth")
_FLOPS_KEYS = ("fp32", "tf32", "bf16", "fp16", "fp16_fp16")
_WHOLE_CARD = ("memory", "bandwidth", "tflops", "link")  # what a card that no table has must say
_LEAST_AMOUNT = 1e6  # bytes; a bare number below it was meant in another unit
_MOST_TFLOPS = 1e6


def machine_of(mapping: Mapping[str, Any]) -> Machine:
    """The machine that the content of a machine file describes; see the module docstring.

    Raises ConfigError that names the key, with the nearest known one.
    """
    _check_keys(mapping, _KEYS, "")
    text = mapping.get("machine")
    base = None if text is None else read_machine(str(text))
    entries = _entries(mapping.get("cards"), base)
    said = base or Said()
    said.cards = [_model(entry, said.cards, place) for place, entry in enumerate(entries)]
    links = [entry.get("link") for entry, _ in entries]
    said.has_links = all(isinstance(link, dict) and {"up", "down"} <= link.keys() for link in links)
    host = _mapping(mapping.get("host"), "host", _HOST_KEYS)
    for key, read in (("memory", _bytes), ("disk", _bytes), ("bandwidth", _rate)):
        if host.get(key) is not None:
            said.values[key] = read(host[key], f"host.{key}")
    if mapping.get("link_cap") is not None:
        said.values["cap"] = _rate(mapping["link_cap"], "link_cap")
    machine = assume(said, str(mapping.get("name") or text or "a machine file"))
    if host.get("update_bandwidth") is not None:
        rate = _rate(host["update_bandwidth"], "host.update_bandwidth")
        machine = replace(machine, host=replace(machine.host, update_bandwidth=rate))
    if "link_cap" in mapping and mapping["link_cap"] is None:
        machine = replace(machine, link_cap=None)
    return replace(
        machine,
        cards=tuple(_card(c, e) for c, e in zip(machine.cards, entries, strict=True)),
        links=tuple(_link(k, e) for k, e in zip(machine.links, entries, strict=True)),
    )


def machine_mapping(machine: Machine) -> dict[str, Any]:
    """``machine`` as plain values that `machine_of` reads back to the same machine."""
    cards = []
    pairs = zip(machine.cards, machine.links, strict=True)
    for (card, link), group in groupby(pairs):
        entry = {"name": card.name, "count": len(list(group)), **_card_values(card)}
        cards.append({**entry, "link": _link_values(link)})
    host = {
        "memory": write_bytes(machine.host.memory_bytes, exact=True),
        "bandwidth": write_rate(machine.host.bandwidth, exact=True),
    }
    if machine.host.disk_bytes is not None:
        host["disk"] = write_bytes(machine.host.disk_bytes, exact=True)
    if machine.host.update_bandwidth is not None:
        host["update_bandwidth"] = write_rate(machine.host.update_bandwidth, exact=True)
    cap = machine.link_cap
    return {
        **({"name": machine.text} if machine.text else {}),
        "cards": cards,
        "link_cap": None if cap is None else write_rate(cap, exact=True),
        "host": host,
    }


def _card_values(card: Card) -> dict[str, Any]:
    return {
        "memory": write_bytes(card.memory_bytes, exact=True),
        "bandwidth": write_rate(card.bandwidth, exact=True),
        "tflops": {key: _tflops_number(rate) for key, rate in card.flops.items()},
        **({"in_host": True} if card.in_host else {}),
    }


def _tflops_number(rate: float) -> float:
    """TFLOP/s as a decimal number moved by twelve places: it reads back without rounding."""
    return float(Decimal(repr(rate)).scaleb(-12))


def _link_values(link: Link) -> dict[str, Any]:
    return {
        "up": write_rate(link.up, exact=True),
        "down": write_rate(link.down, exact=True),
        "duplex": link.duplex,
    }


Entry = tuple[Mapping[str, Any], str]  # what is said of one card, and where


def _entries(cards: Any, base: Said | None) -> list[Entry]:
    """One entry a card, in order."""
    there = 0 if base is None else len(base.cards)
    if cards is None or isinstance(cards, Mapping):
        if base is None:
            raise ConfigError("no card in the machine file\nhint: machine: 8x4090,512GB")
        return [(_mapping(cards, "cards", _CARD_KEYS), "cards")] * there
    if isinstance(cards, str) or not isinstance(cards, Sequence):
        raise ConfigError(
            f"not a list of cards: {cards!r}\nhint: cards: [{{card: 4090, count: 8}}]"
        )
    entries: list[Entry] = []
    for number, each in enumerate(cards):
        path = f"cards[{number}]"
        entry = _mapping({"card": each} if isinstance(each, str | int) else each, path, _CARD_KEYS)
        entries += [(entry, path)] * _count(entry.get("count", 1), path)
    if not entries:
        raise ConfigError("no card in the machine file\nhint: cards: [{card: 4090, count: 8}]")
    if len(entries) > MAX_CARDS:
        raise ConfigError(f"more cards than a machine has: {len(entries)}\nhint: count: 8")
    if base is not None and len(entries) != there:
        raise ConfigError(
            f"cards: {len(entries)} are listed, but machine has {there}\nhint: leave machine out"
        )
    return entries


def _count(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CARDS:
        raise ConfigError(f"not a number of cards: {path}.count: {value}\nhint: count: 8")
    return value


def _model(entry: Entry, base: Sequence[CardModel | None], place: int) -> CardModel | None:
    """The card of the table that an entry starts from; a stand-in where it says everything."""
    values, path = entry
    name = values.get("card")
    if name is not None:
        return None if str(name).lower() == "cpu" else card_named(str(name))
    if base:
        return base[place]
    missing = [key for key in _WHOLE_CARD if values.get(key) is None]
    if missing:
        raise ConfigError(
            f"{path} names no card of the table and says no: {', '.join(missing)}"
            f"\nhint: {path}.card: RTX 4090"
        )
    if values.get("in_host"):
        return None
    return CardModel("card", Kind.GEFORCE, 1, {}, 1, pcie=4, lanes=16)


def _card(card: Card, entry: Entry) -> Card:
    values, path = entry
    changes: dict[str, Any] = {}
    if values.get("name") is not None:
        changes["name"] = str(values["name"])
    if values.get("memory") is not None:
        changes["memory_bytes"] = _bytes(values["memory"], f"{path}.memory")
    if values.get("bandwidth") is not None:
        changes["bandwidth"] = _rate(values["bandwidth"], f"{path}.bandwidth")
    if values.get("in_host") is not None:
        changes["in_host"] = _truth(values["in_host"], f"{path}.in_host")
    if values.get("tflops") is not None:
        given = _mapping(values["tflops"], f"{path}.tflops", _FLOPS_KEYS)
        rates = {key: _tflops(each, f"{path}.tflops.{key}") for key, each in given.items()}
        # A card of the table keeps what is not said; what a card cannot do is said as null.
        kept = {**({} if _is_whole(values) else card.flops), **rates}
        changes["flops"] = {key: rate for key, rate in kept.items() if rate is not None}
    return replace(card, **changes)


def _is_whole(values: Mapping[str, Any]) -> bool:
    return values.get("card") is None and all(values.get(key) is not None for key in _WHOLE_CARD)


def _link(link: Link, entry: Entry) -> Link:
    values, path = entry
    given = _mapping(values.get("link"), f"{path}.link", _LINK_KEYS)
    changes = {
        key: _rate(given[key], f"{path}.link.{key}")
        for key in ("up", "down")
        if given.get(key) is not None
    }
    if given.get("duplex") is not None:
        changes["duplex"] = _share(given["duplex"], f"{path}.link.duplex")
    return replace(link, **changes)


def _check_keys(mapping: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            place = f"{path}.{key}" if path else str(key)
            hint = near[0] if near else ", ".join(known)
            raise ConfigError(f"unknown key in a machine file: {place}\nhint: {hint}")


def _mapping(value: Any, path: str, known: Sequence[str]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"not a mapping: {path}: {value!r}\nhint: its keys are {', '.join(known)}"
        )
    _check_keys(value, known, path)
    return value


def _bytes(value: Any, path: str) -> float:
    amount = read_bytes(value) if isinstance(value, str) else _number(value)
    if amount is None or amount < _LEAST_AMOUNT:
        raise ConfigError(f"not an amount of memory: {path}: {value}\nhint: with its unit: 24 GB")
    return int(amount)


def _rate(value: Any, path: str) -> float:
    rate = read_rate(value) if isinstance(value, str) else _number(value)
    if rate is None or rate < _LEAST_AMOUNT:
        raise ConfigError(f"not a rate: {path}: {value}\nhint: with its unit: 25 GB/s")
    return float(rate)


def _tflops(value: Any, path: str) -> float | None:
    if value is None:
        return None
    number = _number(value)
    if number is None or not 0 < number < _MOST_TFLOPS:
        raise ConfigError(f"not a number of TFLOP/s: {path}: {value}\nhint: bf16: 150")
    return float(Decimal(repr(number)).scaleb(12))


def _share(value: Any, path: str) -> float:
    number = _number(value)
    if number is None or not 0 < number <= 1:
        raise ConfigError(f"not a share: {path}: {value}\nhint: between 0 and 1, e.g. duplex: 0.5")
    return float(number)


def _truth(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"neither true nor false: {path}: {value}\nhint: in_host: true")
    return value


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
