"""What doctor says of devices and their links: one rule, one pair of functions.

The first function of a pair tells of which devices a thing is to be said, and which of them are
alike: it gives a key, or None. The second says it of all with one key, in one sentence with one
price.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.plan.hosts import pcie_rate
from roundpipe.report.finding import Case, Finding, Group, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from roundpipe.plan.machine import Card, Link
    from roundpipe.report.readings import CopyRates, DeviceReadings, OtherProcess

_SLOW_COMPUTE = 0.75  # of what cards of the name usually reach
_SLOW_LINK = 0.7  # of what the lanes usually reach
_SLOW_PAGEABLE = 0.8  # of pinned
_LOW_POWER = 0.95  # of the card's default
_LOW_DUPLEX = 0.7
_CONTEXT = 2**30  # bytes of a card that this process and the driver may hold
_UNSEEN = 0.05  # of a card's memory; less is the driver's and the desktop's


def device_findings(case: Case) -> Iterator[Finding]:
    """What is true of several devices alike is said, and priced, once."""
    devices = list(enumerate(case.readings.devices))
    for sort, say in _RULES:
        groups: dict[Hashable, Group] = {}
        for place, device in devices:
            key = sort(case, device) if say is _broken or not device.is_cpu else None
            if key is not None:
                groups.setdefault(key, []).append((place, device))
        for group in groups.values():
            yield say(case, group)


def _is_broken(_: Case, device: DeviceReadings) -> Hashable:
    return None if device.is_intact else True


def _broken(_: Case, group: Group) -> Finding:
    return Finding(
        Level.BROKEN,
        f"{_names(group)}: what is copied there comes back changed",
        "no result can be trusted",
        "another slot, riser or card; then roundpipe doctor again",
    )


def _has_lost_words(_: Case, device: DeviceReadings) -> Hashable:
    return device.name if device.lost_words else None


def _lost_words(_: Case, group: Group) -> Finding:
    device = group[0][1]
    words = device.lost_words
    return Finding(
        Level.BROKEN,
        f"{device.name}: {words} error{'s' * (words != 1)} of its memory could not be corrected "
        "since it was started",
        "no result since then can be trusted",
        "nvidia-smi -q -d ECC,ROW_REMAPPER says whether a restart mends it; else another card",
    )


def _has_few_lanes(_: Case, device: DeviceReadings) -> Hashable:
    used, could = device.lanes.used, device.lanes.of_card
    return (used, could) if used is not None and could is not None and used < could else None


def _few_lanes(case: Case, group: Group) -> Finding:
    used, could = group[0][1].lanes.used or 1, group[0][1].lanes.of_card or 1
    slowest = _slowest(group)
    better = case.with_links(group, lambda _, link: _faster(link, could / used))
    return Finding(
        Level.SLOW,
        f"{_names(group)}: attached with {used} of {could} lanes, {write_rate(slowest.up)} up and "
        f"{write_rate(slowest.down)} down",
        case.price(better, f"with {could} lanes"),
        "a slot that is wired for them; the board's manual says which",
    )


def _has_old_slot(_: Case, device: DeviceReadings) -> Hashable:
    own, here = device.lanes.of_card_generation, device.lanes.generation
    return (own, here) if own is not None and here is not None and here < own else None


def _old_slot(case: Case, group: Group) -> Finding:
    lanes = group[0][1].lanes
    own, here = lanes.of_card_generation or 1, lanes.generation or 1
    better = case.with_links(
        group, lambda _, link: _faster(link, pcie_rate(own, 1) / pcie_rate(here, 1))
    )
    return Finding(
        Level.NOTE,
        f"{_names(group)}: PCIe {here}.0 in this slot, the card could {own}.0",
        case.price(better, f"with PCIe {own}.0"),
    )


def _has_slow_link(case: Case, device: DeviceReadings) -> Hashable:
    """A link that is slower than its lanes, and not for the way to its memory: that is said so."""
    lanes, generation = device.lanes.used, device.lanes.generation
    if lanes is None or generation is None or _is_remote(case, device) is not None:
        return None
    slower = min(device.pinned.up, device.pinned.down)
    return (lanes, generation) if slower < _SLOW_LINK * pcie_rate(generation, lanes) else None


def _slow_link(case: Case, group: Group) -> Finding:
    lanes = group[0][1].lanes
    usual = pcie_rate(lanes.generation or 1, lanes.used or 1)
    slowest = _slowest(group)
    better = case.with_links(
        group, lambda _, link: replace(link, up=max(link.up, usual), down=max(link.down, usual))
    )
    return Finding(
        Level.SLOW,
        f"{_names(group)}: copies reach {write_rate(min(slowest.up, slowest.down))} where PCIe "
        f"{lanes.generation}.0 with {lanes.used} lanes gives {write_rate(usual)}",
        case.price(better, f"with {write_rate(usual)}"),
        "look for link errors (dmesg), power saving of PCIe, and memory of another node",
    )


def _has_slow_pageable(_: Case, device: DeviceReadings) -> Hashable:
    rates = device.pageable
    is_slow = rates is not None and rates.up < _SLOW_PAGEABLE * device.pinned.up
    return device.card if is_slow else None


def _slow_pageable(case: Case, group: Group) -> Finding:
    def worse(device: DeviceReadings, link: Link) -> Link:
        rates = device.pageable or device.pinned
        up, down = min(link.up, rates.up), min(link.down, rates.down)
        return replace(link, up=up, down=down, duplex=rates.duplex)

    slowest = min((d.pageable or d.pinned for _, d in group), key=lambda rates: rates.up)
    return Finding(
        Level.NOTE,
        f"{_names(group)}: memory that is not pinned moves at {write_rate(slowest.up)} instead of "
        f"{write_rate(_slowest(group).up)}",
        case.price(case.with_links(group, worse), "if nothing could be pinned"),
    )


def _has_slow_pinned(_: Case, device: DeviceReadings) -> Hashable:
    rates = device.pageable
    is_slow = rates is not None and device.pinned.up < _SLOW_PAGEABLE * rates.up
    return True if is_slow else None


def _slow_pinned(case: Case, group: Group) -> Finding:
    def better(device: DeviceReadings, link: Link) -> Link:
        rates = device.pageable or device.pinned
        return replace(link, up=max(link.up, rates.up), down=max(link.down, rates.down))

    pageable = min((d.pageable or d.pinned for _, d in group), key=lambda rates: rates.up)
    return Finding(
        Level.SLOW,
        f"{_names(group)}: pinned memory moves at {write_rate(_slowest(group).up)}, slower than "
        f"pageable memory at {write_rate(pageable.up)}",
        case.price(case.with_links(group, better), "if it were as fast"),
        "a virtual machine or driver that does not really pin; tell its maker",
    )


def _has_low_duplex(_: Case, device: DeviceReadings) -> Hashable:
    return device.card if device.pinned.duplex < _LOW_DUPLEX else None


def _low_duplex(case: Case, group: Group) -> Finding:
    worst = min(device.pinned.duplex for _, device in group)
    better = case.with_links(group, lambda _, link: replace(link, duplex=1.0))
    return Finding(
        Level.NOTE,
        f"{_names(group)}: with copies both ways at once each way keeps {worst:.0%} of its rate",
        case.price(better, "if both kept all"),
    )


def _computes_slowly(_: Case, device: DeviceReadings) -> Hashable:
    """Said together with the cause where that is a power limit, or what the card itself tells."""
    key = _main_arithmetic(device)
    if key is None or _is_power_limited(device) or device.slowed_by:
        return None
    return device.card if device.flops[key] < _SLOW_COMPUTE * device.usual_flops[key] else None


def _slow_compute(case: Case, group: Group) -> Finding:
    device = group[0][1]
    key = _main_arithmetic(device) or ""
    slowest = min(device.flops[key] for _, device in group)
    return Finding(
        Level.SLOW,
        f"{_names(group)}: {slowest / 1e12:.3g} TFLOP/s in {key} where {device.card} usually "
        f"reaches {device.usual_flops[key] / 1e12:.3g}",
        case.price(case.with_cards(group, _at_usual_rate), "at the usual rate"),
        "heat, clocks held down, or another process computing on it: nvidia-smi -q -d PERFORMANCE",
    )


def _is_held_back(_: Case, device: DeviceReadings) -> Hashable:
    return (device.card, device.slowed_by) if device.slowed_by else None


def _held_back(case: Case, group: Group) -> Finding:
    device = group[0][1]
    hottest = max((each.degrees or 0 for _, each in group), default=0)
    at = f" at {hottest:.0f} °C" if hottest else ""
    return Finding(
        Level.SLOW,
        f"{_names(group)}: held back by {' and '.join(device.slowed_by)}{at} while it worked"
        f"{_reaches(group)}",
        case.price(case.with_cards(group, _at_usual_rate), "at the usual rate"),
        "air for the cards, their fans, the cables of their power; nvidia-smi -q -d PERFORMANCE",
    )


def _has_low_power(_: Case, device: DeviceReadings) -> Hashable:
    limits = (device.power_limit, device.power_default, device.card)
    return limits if _is_power_limited(device) else None


def _low_power(case: Case, group: Group) -> Finding:
    device = group[0][1]
    places = ",".join(each.name.rpartition(":")[2].partition("/")[0] for _, each in group)
    return Finding(
        Level.SLOW,
        f"{_names(group)}: may draw {device.power_limit:.0f} of {device.power_default:.0f} W"
        f"{_reaches(group)}",
        case.price(case.with_cards(group, _at_usual_rate), "at the usual rate"),
        f"nvidia-smi -i {places} -pl {device.power_default:.0f}",
    )


def _is_shared(_: Case, device: DeviceReadings) -> Hashable:
    return device.name if device.processes else None


def _shared(case: Case, group: Group) -> Finding:
    [(_, device)] = group
    theirs = sum(process.num_bytes or 0 for process in device.processes)
    better = case.with_cards(
        group,
        lambda _, card: replace(
            card, memory_bytes=min(device.total_bytes, card.memory_bytes + theirs)
        ),
    )
    who = ", ".join(_process(process) for process in device.processes)
    pids = " ".join(str(process.pid) for process in device.processes)
    return Finding(
        Level.SLOW,
        f"{device.name}: another process holds memory, {who}; {write_bytes(device.free_bytes)} of "
        f"{write_bytes(device.total_bytes)} are free",
        case.price(better, "without it"),
        f"end it if it is yours: kill {pids}",
    )


def _is_used_unseen(_: Case, device: DeviceReadings) -> Hashable:
    """Memory that is in use by nobody who is shown: processes of other containers, a desktop."""
    used = device.total_bytes - device.free_bytes - _CONTEXT
    return device.name if not device.processes and used > _UNSEEN * device.total_bytes else None


def _used_unseen(case: Case, group: Group) -> Finding:
    [(_, device)] = group
    used = device.total_bytes - device.free_bytes
    better = case.with_cards(
        group,
        lambda _, card: replace(
            card, memory_bytes=max(card.memory_bytes, device.total_bytes - _CONTEXT)
        ),
    )
    return Finding(
        Level.NOTE,
        f"{device.name}: {write_bytes(used)} of {write_bytes(device.total_bytes)} are in use, by "
        "nobody who is shown here",
        case.price(better, "with all of it"),
        "nvidia-smi outside this container, or a desktop on this card",
    )


def _process(process: OtherProcess) -> str:
    holds = "" if process.num_bytes is None else f", {write_bytes(process.num_bytes)}"
    return f"{process.name} ({process.pid}{holds})"


def _is_remote(case: Case, device: DeviceReadings) -> Hashable:
    """The node of a card whose near memory is not where this process runs."""
    for node in case.readings.host.nodes:
        if node.index == device.node:
            return None if node.is_ours else (node.index,)
    return None


def _remote(case: Case, group: Group) -> Finding:
    near = group[0][1].node
    ours = [node.index for node in case.readings.host.nodes if node.is_ours]
    others = [each.pinned for each in case.readings.devices if each.node in ours]
    price = "no near card was measured to compare with"
    if others:
        best = max(others, key=lambda rates: rates.up)
        better = case.with_links(
            group,
            lambda _, link: replace(link, up=best.up, down=best.down, duplex=best.duplex),
        )
        price = case.price(better, "with memory that is near")
    return Finding(
        Level.SLOW,
        f"{_names(group)}: near memory node {near}, but this process runs on node "
        f"{', '.join(map(str, ours))}, so every copy goes the long way",
        price,
        f"numactl --cpunodebind={near} --membind={near} roundpipe …",
    )


# Which devices a thing is to be said of (None: not of this one; alike: together), and what.
_RULES: tuple[
    tuple[Callable[[Case, DeviceReadings], Hashable], Callable[[Case, Group], Finding]], ...
] = (
    (_is_broken, _broken),
    (_has_lost_words, _lost_words),
    (_has_few_lanes, _few_lanes),
    (_has_slow_link, _slow_link),
    (_has_slow_pinned, _slow_pinned),
    (_computes_slowly, _slow_compute),
    (_is_held_back, _held_back),
    (_has_low_power, _low_power),
    (_is_shared, _shared),
    (_is_used_unseen, _used_unseen),
    (_is_remote, _remote),
    (_has_old_slot, _old_slot),
    (_has_slow_pageable, _slow_pageable),
    (_has_low_duplex, _low_duplex),
)


def _faster(link: Link, factor: float) -> Link:
    return replace(link, up=link.up * factor, down=link.down * factor)


def _main_arithmetic(device: DeviceReadings) -> str | None:
    """What training would use: bf16 where the card has it."""
    both = device.flops.keys() & device.usual_flops.keys()
    return next((key for key in ("bf16", "fp16", "fp32") if key in both), None)


def _reaches(group: Group) -> str:
    """What the slowest of a group gets, where that is known."""
    key = _main_arithmetic(group[0][1])
    if key is None:
        return ""
    slowest = min(device.flops[key] for _, device in group)
    return f", {slowest / 1e12:.3g} TFLOP/s in {key}"


def _is_power_limited(device: DeviceReadings) -> bool:
    limit, default = device.power_limit, device.power_default
    return limit is not None and default is not None and limit < _LOW_POWER * default


def _at_usual_rate(device: DeviceReadings, card: Card) -> Card:
    usual = {key: max(rate, device.usual_flops.get(key, rate)) for key, rate in card.flops.items()}
    return replace(card, flops=usual)


def _slowest(group: Group) -> CopyRates:
    return min((device.pinned for _, device in group), key=lambda rates: rates.up)


def _names(group: Group) -> str:
    return ", ".join(device.name for _, device in group)
