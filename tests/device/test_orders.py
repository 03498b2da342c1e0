"""The CPU device and the fake device agree on random graphs of launches, events and waits.

Where the fake device sees no race, random delays must not change a result. Where it sees one, the
two works it names must really be able to run the other way round: the earlier is held back until
the later has run, which can only end if nothing orders them.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.errors import RaceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.device.api import Device, Event

STREAMS, BUFFERS = "abc", "xyz"


@dataclass(frozen=True)
class Work:
    """One launch on ``stream``; it writes a mix of its number and of all it reads."""

    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Wait:
    """``stream`` waits for what ``other`` has at this place of the program."""

    stream: str
    other: str


names = st.lists(st.sampled_from(BUFFERS), unique=True, max_size=2).map(tuple)
works = st.builds(Work, st.sampled_from(STREAMS), names, names)
waits = st.builds(Wait, st.sampled_from(STREAMS), st.sampled_from(STREAMS))
programs = st.lists(works | waits, min_size=2, max_size=14)


def play(
    device: Device, program: list[Work | Wait], run: Callable[[int, Work], object]
) -> list[Event]:
    """Put the program on ``device``; works are called by their place."""
    for place, item in enumerate(program):
        if isinstance(item, Wait):
            device.wait(item.stream, device.record(item.other))
        else:
            device.launch(
                item.stream,
                lambda place=place, item=item: run(place, item),
                reads=item.reads,
                writes=item.writes,
                label=place,
            )
    return [device.record(stream) for stream in STREAMS]


def race(program: list[Work | Wait]) -> tuple[int, int] | None:
    """The earlier and the later work of the first race the fake device sees."""
    try:
        play(FakeDevice(), program, lambda place, item: None)
    except RaceError as error:
        later, earlier = re.findall(r"fake\.[abc] (\d+)", str(error))
        return int(earlier), int(later)
    return None


def results(device: Device, program: list[Work | Wait]) -> dict[str, int]:
    memory = dict.fromkeys(BUFFERS, 0)

    def run(place: int, work: Work) -> None:
        mixed = hash((place, *(memory[name] for name in (*work.reads, *work.writes))))
        memory.update(dict.fromkeys(work.writes, mixed))

    for event in play(device, program, run):
        event.wait()
    device.close()
    return memory


quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@quick
@given(programs, st.integers(0, 3))
def test_delays_change_nothing_where_the_fake_device_sees_no_race(
    program: list[Work | Wait], seed: int
) -> None:
    found = race(program)
    if found is not None:
        program = program[: found[1]]  # up to the first race there is none
    delayed = CpuDevice(threads=1, max_delay_seconds=3e-4, seed=seed)
    assert results(delayed, program) == results(FakeDevice(), program)


@quick
@given(programs)
def test_what_the_fake_device_calls_a_race_can_run_the_other_way_round(
    program: list[Work | Wait],
) -> None:
    found = race(program)
    if found is None:
        return
    earlier, later = found
    program = program[: later + 1]
    later_ran = threading.Event()
    overtaken: list[bool] = []

    def run(place: int, work: Work) -> None:
        if place == earlier:
            overtaken.append(later_ran.wait(5))
        if place == later:
            later_ran.set()

    device = CpuDevice(threads=1)
    play(device, program, run)
    device.close()
    assert overtaken == [True]


@quick
@given(programs)
def test_what_the_fake_device_calls_ordered_never_runs_the_other_way_round(
    program: list[Work | Wait],
) -> None:
    found = race(program)
    if found is not None:
        program = program[: found[1]]
    last: dict[str, int] = {}  # the last write of each buffer, by place
    done: set[int] = set()
    must: dict[int, list[int]] = {}
    for place, item in enumerate(program):
        if isinstance(item, Work):
            must[place] = [last[name] for name in (*item.reads, *item.writes) if name in last]
            last.update(dict.fromkeys(item.writes, place))
    broken: list[int] = []

    def run(place: int, work: Work) -> None:
        broken.extend(before for before in must[place] if before not in done)
        done.add(place)

    device = CpuDevice(threads=1, max_delay_seconds=2e-4, seed=7)
    play(device, program, run)
    device.close()
    assert broken == []
