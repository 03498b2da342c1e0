"""What is said of a measured machine, and the machine put right on which it is priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from roundpipe.plan.machine import Card, Link, Machine
from roundpipe.report.readings import DeviceReadings, Readings

Speed = Callable[[Machine], float | None]  # tokens per second; None: does not fit
Largest = Callable[[Machine], str]  # the largest of the reference jobs that memory holds
Group = list[tuple[int, DeviceReadings]]  # devices of which one thing is to be said, and where

UPDATE_BYTES = 28  # that update and publish of one parameter move
_SAME_SPEED = 0.01


class Level(Enum):
    """How bad it is."""

    BROKEN = "broken"  # results cannot be trusted
    MISSING = "missing"  # something does not start
    SLOW = "slow"  # less than this machine could do
    NOTE = "note"
    UNKNOWN = "unknown"  # could not be found out


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
    largest: Largest | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether there is no card among the devices."""
        return all(device.is_cpu for device in self.readings.devices)

    @property
    def update_rate(self) -> float:
        """Bytes per second that the optimizer moves."""
        return UPDATE_BYTES / self.readings.host.update_seconds

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

    def speed_now(self) -> str:
        """What the reference model does on the machine as it is."""
        now = None if self.speed is None else self.speed(self.machine)
        return "" if now is None else f"{now:,.0f} tokens/s"

    def price_of_memory(self, more_bytes: int, with_what: str) -> str:
        """What host memory holds now, and with so much more."""
        if self.largest is None:
            return ""
        host = replace(self.machine.host, memory_bytes=self.machine.host.memory_bytes + more_bytes)
        now, then = self.largest(self.machine), self.largest(replace(self.machine, host=host))
        if now == then:
            return f"no difference to what fits of the reference jobs: {now}"
        return f"the largest reference job that it holds: {now} now, {then} {with_what}"

    def with_updates(self, rate: float | None) -> Machine:
        """The machine with another rate of the optimizer; None: as fast as its memory."""
        if rate is not None:
            rate = max(self.update_rate, min(rate, self.machine.host.bandwidth))
        return replace(self.machine, host=replace(self.machine.host, update_bandwidth=rate))

    def with_cores(self, times: float) -> Machine:
        """The machine with so many times the cores: the optimizer's, and those of CPU devices."""
        machine = self.with_updates(self.update_rate * times)
        cards = tuple(
            replace(card, flops={key: rate * times for key, rate in card.flops.items()})
            if card.in_host
            else card
            for card in machine.cards
        )
        return replace(machine, cards=cards)

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
