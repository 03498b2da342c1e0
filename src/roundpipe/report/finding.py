"""What is said of a measured machine, and the machine put right on which it is priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from roundpipe.plan.machine import Card, Link, Machine
from roundpipe.report.readings import DeviceReadings, Readings

Speed = Callable[[Machine], float | None]  # tokens per second; None: does not fit
Group = list[tuple[int, DeviceReadings]]  # devices of which one thing is to be said, and where

_SAME_SPEED = 0.01


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


@dataclass(frozen=True)
class Case:
    """A machine, what was measured of it, and how to price a change of it."""

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

    def with_cards(self, group: Group, change: Callable[[DeviceReadings, Card], Card]) -> Machine:
        """The machine with the cards of ``group`` changed."""
        cards = list(self.machine.cards)
        for place, device in group:
            cards[place] = change(device, cards[place])
        return replace(self.machine, cards=tuple(cards))

    def with_links(self, group: Group, change: Callable[[DeviceReadings, Link], Link]) -> Machine:
        """The machine with the links of ``group`` changed, and as much more let through in all."""
        links, cap = list(self.machine.links), self.machine.link_cap
        for place, device in group:
            before = links[place]
            links[place] = change(device, before)
            if cap is not None:
                cap += max(0.0, links[place].up - before.up)
        return replace(self.machine, links=tuple(links), link_cap=cap)
