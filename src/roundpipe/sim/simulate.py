"""Play schedules in virtual time: when each action runs, what waits for what, and for how long.

``simulate`` gives durations by hand and ideal streams. ``simulate_machine`` takes costs and a
machine: links, host memory and Python are shared, and the result tells what held the devices up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.schedule import Schedule
from roundpipe.plan.timeline import Span, busy_share
from roundpipe.sim.events import Player, graph
from roundpipe.sim.sharing import Sharing
from roundpipe.sim.work import Prices, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Machine

_HELD_UP_BY = {
    Op.UPLOAD: "transfer",
    Op.DOWNLOAD: "transfer",
    Op.ACTIVATION_IN: "transfer",
    Op.ACTIVATION_OUT: "transfer",
    Op.GRADIENT_IN: "transfer",
    Op.GRADIENT_OUT: "transfer",
    Op.MERGE: "optimizer",
    Op.NORM: "optimizer",
    Op.UPDATE: "optimizer",
    Op.PUBLISH: "optimizer",
}


@dataclass(frozen=True)
class Idle:
    """Why compute streams stood still, in seconds summed over devices.

    ``transfer``: weights, activations or gradients were on their way; ``optimizer``: the host
    updated or added up; ``dependency``: another device had yet to compute; ``python``: the process
    had yet to issue.
    """

    transfer: float = 0.0
    optimizer: float = 0.0
    dependency: float = 0.0
    python: float = 0.0


class Simulation:
    """What a chain of steps does in time. All seconds count from the start of the first step."""

    def __init__(self, player: Player, num_steps: int, num_devices: int) -> None:
        self._player, self.num_steps, self.num_devices = player, num_steps, num_devices

    @cached_property
    def spans(self) -> list[Span]:
        """Every action's place in time, step by step."""
        player, nodes = self._player, self._player.nodes
        return [
            Span(nodes.streams[node], nodes.actions[node], player.start[node], player.end[node])
            for node in range(len(nodes.actions))
        ]

    @cached_property
    def step_ends(self) -> tuple[float, ...]:
        """For each step when its last compute action ends."""
        ends = [0.0] * self.num_steps
        player, nodes = self._player, self._player.nodes
        for node, action in enumerate(nodes.actions):
            if action.op in COMPUTE:
                step = nodes.steps[node]
                ends[step] = max(ends[step], player.end[node])
        return tuple(ends)

    @property
    def moved_bytes(self) -> float:
        """What went over links and through host memory, of all steps."""
        return sum(work.num_bytes for work in self._player.nodes.works)

    @property
    def makespan(self) -> float:
        """Seconds until everything is over, updates included."""
        return max(self._player.end, default=0.0)

    def step_seconds(self, first: int, last: int) -> float:
        """Seconds of one step, between the ends of steps ``first`` and ``last`` of the chain."""
        return (self.step_ends[last] - self.step_ends[first]) / (last - first)

    @cached_property
    def busy(self) -> dict[str, float]:
        """Share of the time that each compute stream works, from its first start to the last end.

        One minus this is the stream's bubble.
        """
        return busy_share(self.spans)

    @cached_property
    def idle(self) -> Idle:
        """Why compute streams stood still."""
        player, nodes = self._player, self._player.nodes
        found = {"transfer": 0.0, "optimizer": 0.0, "dependency": 0.0, "python": 0.0}
        free: dict[str, float] = {}
        for node in sorted(range(len(nodes.actions)), key=player.start.__getitem__):
            name = nodes.streams[node]
            if nodes.actions[node].op in COMPUTE:
                self._blame(node, free.get(name, 0.0), found)
                free[name] = player.end[node]
        return Idle(**found)

    def _blame(self, node: int, free: float, found: dict[str, float]) -> None:
        """Charge the gap before ``node``, which its device was free for since ``free``."""
        player, nodes = self._player, self._player.nodes
        at, kind = player.start[node], "python"
        while at > free:
            cause = player.cause[node]
            if cause < 0:
                found[kind] += at - free
                return
            end = max(min(player.end[cause], at), free)
            arrived = "transfer" if kind != "python" else kind
            found[arrived] += at - end  # a result on its way, or Python not there yet
            op = nodes.actions[cause].op
            kind = _HELD_UP_BY.get(op, "dependency")
            start = max(player.start[cause], free)
            found[kind] += max(end - start, 0.0)
            at, node = min(start, end), cause

    def critical_path(self, *, most: int = 2000) -> list[Span]:
        """What the end of the last compute action waited for, first to last, ``most`` at most."""
        player, nodes = self._player, self._player.nodes
        last = max(
            (node for node, action in enumerate(nodes.actions) if action.op in COMPUTE),
            key=player.end.__getitem__,
            default=-1,
        )
        path: list[Span] = []
        while last >= 0 and len(path) < most:
            path.append(
                Span(nodes.streams[last], nodes.actions[last], player.start[last], player.end[last])
            )
            last = player.cause[last]
        return path[::-1]


def simulate_machine(
    chain: Sequence[Schedule],
    prices: Prices,
    machine: Machine | None,
    *,
    hop_seconds: float = 0.0,
) -> Simulation:
    """Play a chain of steps on a machine; without one what moves bytes takes no time.

    ``hop_seconds``: how long a boundary takes between two devices where the schedule has no
    transfers of activations; where it has, they take what their bytes need.
    """
    delay = hop(chain, hop_seconds) if hop_seconds else None
    sharing = Sharing(machine) if machine is not None else None
    player = Player(graph(chain, prices.work, delay), sharing)
    player.play()
    return Simulation(player, len(chain), chain[-1].num_devices)


def hop(chain: Sequence[Schedule], seconds: float) -> Callable[[Action, Action], float]:
    """A delay of ``seconds`` between compute actions of visits on different devices."""
    devices = [visit.device for visit in chain[-1].visits]

    def delay(made: Action, user: Action) -> float:
        if made.op not in COMPUTE or user.op not in COMPUTE or made.before:
            return 0.0
        return 0.0 if devices[made.index] == devices[user.index] else seconds

    return delay


def simulate(
    steps: Schedule | Sequence[Schedule],
    seconds: Callable[[Action], float],
    *,
    delay: Callable[[Action, Action], float] | None = None,
) -> list[Span]:
    """Return when each action runs if every stream starts its head as soon as it may.

    ``steps`` is one step, or steps that follow each other without a flush: a wait with a minus is
    for the step before, and is over at once in the first. ``delay(made, user)`` is how long a
    result is on its way to another device. Spans come step by step. Raises DeadlockError when no
    stream can move.
    """
    chain = [steps] if isinstance(steps, Schedule) else steps

    def work(_: Schedule) -> Callable[[Action], Work]:
        return lambda action: Work(seconds(action))

    player = Player(graph(chain, work, delay))
    player.play()
    return Simulation(player, len(chain), 0).spans


def makespan(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end; 0 without spans."""
    if not spans:
        return 0.0
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Sequence[Span]) -> float:
    """Idle share of the devices that compute, between their first start and their last end."""
    shares = busy_share(spans).values()
    return 1 - sum(shares) / len(shares) if shares else 0.0


def compute_seconds(schedule: Schedule, costs: Costs) -> Callable[[Action], float]:
    """Durations by the costs of a visit's layers: transfers and what the host does take none."""
    of = Prices(costs=costs).work(schedule)
    return lambda action: of(action).seconds
