"""Judge a measured machine: what is broken, what is slow, and what each thing costs.

Every finding is one sentence. Its price is the speed of a reference model now and with the thing
put right, asked of a function that plays the machine; without one, findings have no price. What
costs nothing to the reference model is still said, with that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.plan.hosts import pcie_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.plan.machine import Card, Link, Machine
    from roundpipe.report.readings import DeviceReadings, Readings

    Speed = Callable[[Machine], float | None]  # tokens per second; None: does not fit


class Level(Enum):
    """How bad it is."""

    BROKEN = "broken"  # results cannot be trusted
    SLOW = "slow"  # less than this machine could do
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One sentence, what it costs, and what to do about it; the latter two may be empty."""

    level: Level
    text: str
    price: str = ""
    hint: str = ""


_SLOW_COMPUTE = 0.75  # of what cards of the name usually reach
_SLOW_LINK = 0.7  # of what the lanes usually reach
_SLOW_PAGEABLE = 0.8  # of pinned
_SHARED_LINKS = 0.8  # of the sum of the links
_LOW_POWER = 0.95  # of the card's default
_LOW_DUPLEX = 0.7
_SLOW_UPDATE = 0.6  # of host bandwidth
_SAME_SPEED = 0.01
_UPDATE_BYTES = 28  # that update and publish of one parameter move
_REFERENCE_PARAMETERS = 8e9


@dataclass(frozen=True)
class _Case:
    readings: Readings
    machine: Machine  # as measured
    speed: Speed | None

    def price(self, better: Machine, with_what: str) -> str:
        """What the reference model does now, and on ``better``."""
        if self.speed is None:
            return ""
        now, then = self.speed(self.machine), self.speed(better)
        if then is None:
            return "the reference model does not fit either way"
        if now is None:
            return f"the reference model does not fit now; {then:,.0f} tokens/s {with_what}"
        if abs(then - now) <= _SAME_SPEED * now:
            return f"no difference to the reference model: {now:,.0f} tokens/s"
        return f"{now:,.0f} tokens/s now, {then:,.0f} {with_what}"

    def with_card(self, place: int, card: Card) -> Machine:
        """The machine with another card in one place."""
        cards = list(self.machine.cards)
        cards[place] = card
        return replace(self.machine, cards=tuple(cards))

    def with_link(self, place: int, link: Link) -> Machine:
        """The machine with another link in one place, and no shared limit below it."""
        links = list(self.machine.links)
        links[place] = link
        cap = self.machine.link_cap
        if cap is not None:
            cap += max(0.0, link.up - self.machine.links[place].up)
        return replace(self.machine, links=tuple(links), link_cap=cap)


def judge(readings: Readings, machine: Machine, speed: Speed | None = None) -> list[Finding]:
    """Everything worth saying of ``readings``, the worst first.

    ``machine`` is made of the readings, device by device in the same order. ``speed`` plays a
    reference model on a machine.
    """
    case = _Case(readings, machine, speed)
    findings = [
        finding for rule in (_of_devices, _of_shared_links, _of_host) for finding in rule(case)
    ]
    findings += [Finding(Level.NOTE, sentence) for sentence in readings.unknown]
    order = list(Level)
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _of_devices(case: _Case) -> Iterator[Finding]:
    for place, device in enumerate(case.readings.devices):
        if not device.is_intact:
            yield Finding(
                Level.BROKEN,
                f"what is copied to {device.name} comes back changed: no result of it can be "
                "trusted",
                hint="another slot, riser or card; then roundpipe doctor again",
            )
        if device.is_cpu:
            continue
        for rule in (_lanes, _link, _pageable, _duplex, _compute, _power, _others, _node):
            yield from rule(case, place, device)


def _lanes(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    used, could = device.lanes.used, device.lanes.of_card
    if used is not None and could is not None and used < could:
        better = _faster(case.machine.links[place], could / used)
        yield Finding(
            Level.SLOW,
            f"{device.name} is attached with {used} of its {could} lanes: "
            f"{write_rate(device.pinned.up)} up, {write_rate(device.pinned.down)} down",
            case.price(case.with_link(place, better), f"with {could} lanes"),
            "a slot that is wired for them; the board's manual says which",
        )
    own, here = device.lanes.of_card_generation, device.lanes.generation
    if own is not None and here is not None and here < own:
        better = _faster(case.machine.links[place], pcie_rate(own, 1) / pcie_rate(here, 1))
        yield Finding(
            Level.NOTE,
            f"{device.name} runs PCIe {here}.0 in this slot, the card could {own}.0",
            case.price(case.with_link(place, better), f"with PCIe {own}.0"),
        )


def _link(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    """A link that is slower than its lanes."""
    lanes, generation = device.lanes.used, device.lanes.generation
    if lanes is None or generation is None:
        return
    usual = pcie_rate(generation, lanes)
    slower = min(device.pinned.up, device.pinned.down)
    if slower < _SLOW_LINK * usual:
        link = case.machine.links[place]
        better = replace(link, up=max(link.up, usual), down=max(link.down, usual))
        yield Finding(
            Level.SLOW,
            f"copies of {device.name} reach {write_rate(slower)} where PCIe {generation}.0 with "
            f"{lanes} lanes gives {write_rate(usual)}",
            case.price(case.with_link(place, better), f"with {write_rate(usual)}"),
            "look for link errors (dmesg), power saving of PCIe, and memory of another node",
        )


def _pageable(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    if device.pageable is None:
        return
    pinned, pageable = device.pinned.up, device.pageable.up
    if pageable < _SLOW_PAGEABLE * pinned:
        link = case.machine.links[place]
        worse = replace(
            link,
            up=min(link.up, device.pageable.up),
            down=min(link.down, device.pageable.down),
            duplex=device.pageable.duplex,
        )
        yield Finding(
            Level.NOTE,
            f"memory that is not pinned moves to {device.name} at {write_rate(pageable)} instead "
            f"of {write_rate(pinned)}",
            case.price(case.with_link(place, worse), "if nothing could be pinned"),
        )
    elif pinned < _SLOW_PAGEABLE * pageable:
        yield Finding(
            Level.SLOW,
            f"pinned memory moves to {device.name} at {write_rate(pinned)}, slower than pageable "
            f"memory at {write_rate(pageable)}",
            hint="a virtual machine or driver that does not really pin; tell its maker",
        )


def _duplex(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    if device.pinned.duplex < _LOW_DUPLEX:
        better = replace(case.machine.links[place], duplex=1.0)
        yield Finding(
            Level.NOTE,
            f"with copies both ways at once each way of {device.name} keeps "
            f"{device.pinned.duplex:.0%} of its rate",
            case.price(case.with_link(place, better), "if both kept all"),
        )


def _compute(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    key = _main_arithmetic(device)
    if key is None or device.flops[key] >= _SLOW_COMPUTE * device.usual_flops[key]:
        return
    if _is_power_limited(device):
        return  # said there, with the price
    yield Finding(
        Level.SLOW,
        f"{device.name} computes {device.flops[key] / 1e12:.3g} TFLOP/s in {key} where a "
        f"{device.card} usually reaches {device.usual_flops[key] / 1e12:.3g}",
        _price_of_usual(case, place, device),
        "heat, clocks held down, or another process computing on it: nvidia-smi -q -d PERFORMANCE",
    )


def _power(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    if not _is_power_limited(device):
        return
    key = _main_arithmetic(device)
    reaches = "" if key is None else f": {device.flops[key] / 1e12:.3g} TFLOP/s in {key}"
    yield Finding(
        Level.SLOW,
        f"{device.name} may draw {device.power_limit:.0f} of its {device.power_default:.0f} W"
        f"{reaches}",
        _price_of_usual(case, place, device),
        f"nvidia-smi -i {device.name.rpartition(':')[2].partition('/')[0]} "
        f"-pl {device.power_default:.0f}",
    )


def _others(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    if not device.processes:
        return
    card = case.machine.cards[place]
    theirs = sum(process.num_bytes or 0 for process in device.processes)
    better = replace(card, memory_bytes=min(device.total_bytes, card.memory_bytes + theirs))
    for process in device.processes:
        holds = "memory" if process.num_bytes is None else write_bytes(process.num_bytes)
        yield Finding(
            Level.SLOW,
            f"another process, {process.name} ({process.pid}), holds {holds} of {device.name}: "
            f"{write_bytes(device.free_bytes)} of {write_bytes(device.total_bytes)} are free",
            case.price(case.with_card(place, better), "without it"),
            f"end it if it is yours: kill {process.pid}",
        )


def _node(case: _Case, place: int, device: DeviceReadings) -> Iterator[Finding]:
    """A card whose near memory is not where this process runs."""
    nodes = {node.index: node for node in case.readings.host.nodes}
    near = nodes.get(-1 if device.node is None else device.node)
    if near is None or near.is_ours:
        return
    ours = ", ".join(str(node.index) for node in nodes.values() if node.is_ours)
    others = [
        other.pinned
        for other in case.readings.devices
        if other.node in nodes and nodes[other.node].is_ours
    ]
    price = ""
    if others:
        best = max(others, key=lambda rates: rates.up)
        link = replace(case.machine.links[place], up=best.up, down=best.down, duplex=best.duplex)
        price = case.price(case.with_link(place, link), "with memory that is near")
    yield Finding(
        Level.SLOW,
        f"{device.name} is near memory node {near.index}, but this process runs on node {ours}: "
        "every copy goes the long way",
        price,
        f"numactl --cpunodebind={near.index} --membind={near.index} roundpipe …",
    )


def _of_shared_links(case: _Case) -> Iterator[Finding]:
    together = case.readings.all_links
    if together is None:
        return
    alone = sum(device.pinned.up for device in case.readings.devices if not device.is_cpu)
    if together < _SHARED_LINKS * alone:
        better = replace(case.machine, link_cap=None)
        yield Finding(
            Level.SLOW,
            f"all links at once move {write_rate(together)} up, one by one {write_rate(alone)}: "
            "they share something",
            case.price(better, "if they did not"),
            "a PCIe switch, one root complex, or host memory with empty channels",
        )


def _of_host(case: _Case) -> Iterator[Finding]:
    host = case.readings.host
    update = _UPDATE_BYTES / host.update_seconds
    seconds = host.update_seconds * _REFERENCE_PARAMETERS
    better = replace(case.machine, host=replace(case.machine.host, update_bandwidth=None))
    is_slow = update < _SLOW_UPDATE * host.bandwidth
    yield Finding(
        Level.NOTE,
        f"the optimizer takes {host.update_seconds * 1e9:.3g} ns per parameter "
        f"({seconds:.3g} s a step for all of an 8B model), {write_rate(update)} of the "
        f"{write_rate(host.bandwidth)} of host memory",
        case.price(better, "if it kept up with memory") if is_slow else "",
    )
    if host.limited_by and host.usable_bytes is not None and host.machine_bytes is not None:
        yield Finding(
            Level.NOTE,
            f"{write_bytes(host.usable_bytes)} of {write_bytes(host.machine_bytes)} of host memory "
            f"may be used, by {host.limited_by}",
        )
    if all(device.is_cpu for device in case.readings.devices):
        yield Finding(Level.NOTE, "there is no card: training runs on the CPU")


def _faster(link: Link, factor: float) -> Link:
    return replace(link, up=link.up * factor, down=link.down * factor)


def _main_arithmetic(device: DeviceReadings) -> str | None:
    """What training would use: bf16 where the card has it."""
    both = device.flops.keys() & device.usual_flops.keys()
    return next((key for key in ("bf16", "fp16", "fp32") if key in both), None)


def _is_power_limited(device: DeviceReadings) -> bool:
    limit, default = device.power_limit, device.power_default
    return limit is not None and default is not None and limit < _LOW_POWER * default


def _price_of_usual(case: _Case, place: int, device: DeviceReadings) -> str:
    card = case.machine.cards[place]
    usual = {key: max(rate, device.usual_flops.get(key, rate)) for key, rate in card.flops.items()}
    return case.price(case.with_card(place, replace(card, flops=usual)), "at its usual rate")
