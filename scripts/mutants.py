"""Drop each wait, let each action fail, break what goes unseen, and show what noticed.

A test suite that cannot fail proves nothing: here every wait of a step is taken away once. `check`
must name a rule that is broken; and real training steps on fake devices, which believe events
alone, must stop with a race, but for waits that only keep chunks out of an activation's way. Each
action that fails must end its step with an error that names it, and the next step must work. What
hands something on unseen is broken once too, and must show beside plain PyTorch; and so is what
makes a run go on as it was, whose tests must fail.

Exits with 1 if anything went unnoticed. ``--verbose`` shows each wait.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from broken_mechanisms import break_each
from broken_runs import break_each_of_runs
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.config import ModelExecutePlan
from roundpipe.device.fake import FakeDevice
from roundpipe.device.ledger import Ledger
from roundpipe.engine.program import Program
from roundpipe.engine.run import Run
from roundpipe.errors import PlanError, RaceError, StepError
from roundpipe.optim import AdamW
from roundpipe.plan.actions import Action
from roundpipe.plan.check import activation_waits_behind_one_chunk, check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.plan.schedule import Schedule

WIDTH = 4
ALONE = Replicas()  # one device a stage
GATE = activation_waits_behind_one_chunk.__name__
PARTITION = Partition(
    (range(1), range(1, 2)), range(2, 3), (range(1, 2), range(1))
)  # 2 forward stages, fused, 2 backward
BY_HAND = ModelExecutePlan(list(PARTITION.forward), [PARTITION.fused, *PARTITION.backward])


@dataclass(frozen=True)
class Case:
    """A kind of small step on two devices."""

    name: str
    staleness: int = 0
    microbatches: int = 3
    rounds: int = 1
    replicas: Replicas = ALONE

    def chain(self, costs: Costs, start_device: int = 0) -> list[Schedule]:
        """The step behind two others."""
        computation = round_robin(
            PARTITION,
            costs,
            devices=2,
            microbatches=self.microbatches,
            rounds=self.rounds,
            start_device=start_device,
            replicas=self.replicas,
        )
        return lower_chain(computation, Options(costs=costs, staleness=self.staleness))


CASES = (
    Case("exact"),
    Case("staleness 1", staleness=1),
    Case("exact, 2 rounds, replicas", microbatches=4, rounds=2, replicas=Replicas(1, 2, 2)),
    Case("staleness 1, 2 rounds", staleness=1, microbatches=4, rounds=2),
)


@dataclass
class Tally:
    """What noticed how many of a case's mutants, and which ones nothing noticed."""

    name: str
    verbose: bool
    caught: Counter[str]
    missed: list[str]

    @classmethod
    def of(cls, name: str, *, verbose: bool) -> Tally:
        """An empty one."""
        return cls(name, verbose, Counter(), [])

    def add(self, mutant: str, by: str | None) -> None:
        """Count one mutant, caught ``by`` something or not at all."""
        if by is None:
            self.missed.append(mutant)
        else:
            self.caught[by] += 1
        if self.verbose:
            print(f"  {mutant:44} {by or 'MISSED'}")

    def show(self) -> None:
        """Print the case's line of the table."""
        total = sum(self.caught.values()) + len(self.missed)
        print(
            f"{self.name:28} {total:4} · "
            + ", ".join(f"{n} {by}" for by, n in self.caught.most_common())
        )
        for mutant in self.missed:
            print(f"  MISSED: {mutant}")


def waits_of(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Each action with each of its waits."""
    for action, after in schedule.waits.items():
        for wait in after:
            yield action, wait


# ---- part 1: the rules of `check`, without any device


def large_costs() -> Costs:
    """Layers whose weights and gradients move in several chunks."""
    layer = LayerCost(
        forward_seconds=1, backward_seconds=2, weight_bytes=24 << 20, gradient_bytes=24 << 20
    )
    return Costs((layer,) * 3, frozenset(range(3)))


def broken_rules(chain: list[Schedule]) -> list[str]:
    """The rules that the last step breaks."""
    try:
        check(chain)
    except PlanError as error:
        return sorted({line.split(":")[0] for line in str(error).splitlines()})
    return []


def by_check(case: Case, *, verbose: bool) -> Tally:
    """Drop each wait: a rule must be broken."""
    chain = case.chain(large_costs())
    check(chain)
    tally = Tally.of(case.name, verbose=verbose)
    for action, wait in waits_of(chain[-1]):
        left = tuple(other for other in chain[-1].waits[action] if other != wait)
        mutant = replace(chain[-1], waits={**chain[-1].waits, action: left})
        rules = broken_rules([*chain[:-1], mutant])
        tally.add(f"{action} without {wait}", " + ".join(rules) or None)
    return tally


# ---- part 2: the engine, on fake devices


class Unordered(Action):
    """A wait for which hosts issue in order, but of which no stream is told.

    Dropped altogether it would also change the order of issue, and a fake device runs work as it
    is issued.
    """


class HostOnly:
    """Within it, a run gives no event for an `Unordered` wait."""

    def __enter__(self) -> None:
        self._receive = Run.receive

        def receive(run: Run, action: Action) -> Any:
            event = self._receive(run, Action.parse(str(action)))
            return None if isinstance(action, Unordered) else event

        Run.receive = receive  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        Run.receive = self._receive  # type: ignore[method-assign]


class Training:
    """Three small layers that train on two fake devices by a case's schedule."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.fails_at: Action | None = None
        ledger = Ledger()
        devices = [FakeDevice(f"fake{i}", ledger=ledger, fail=self._fail) for i in range(2)]
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.pipe = RoundPipe(model, devices=devices)
        self.optimizer = AdamW(self.pipe.optim_parameters(), lr=1e-2)
        self.config = RoundPipeRunConfig(num_microbatch=case.microbatches, execute_plan=BY_HAND)
        self.pipe._chain._planner.training = self._program  # type: ignore[method-assign, assignment]
        self.use({})

    def _fail(self, label: object) -> BaseException | None:
        if self.fails_at is None or label != self.fails_at:
            return None
        self.fails_at = None
        return OSError("it failed")

    def use(self, waits: dict[Action, tuple[Action, ...]]) -> None:
        """Train with some actions' waits replaced."""
        self._waits = waits
        self._programs: dict[int, Program] = {}
        self.pipe._chain._last = None  # the next run begins on idle devices

    @cached_property
    def chains(self) -> dict[int, list[Schedule]]:
        """The lowered steps by the device they begin at."""
        costs = self.pipe._chain._planner.costs
        return {start: self.case.chain(costs, start) for start in range(2)}

    def _program(self, _kind: object, start: int) -> Program:
        if start not in self._programs:
            schedule = self.chains[start][-1]
            changed = replace(schedule, waits={**schedule.waits, **self._waits})
            self._programs[start] = Program(changed)
        return self._programs[start]

    def train(self, steps: int) -> None:
        """Run steps and wait for their end."""
        for _ in range(steps):
            inputs = torch.randn(2 * self.case.microbatches, WIDTH)
            self.pipe.forward_backward(
                (inputs,), label=inputs.tanh(), loss_fn=mse_loss, run_config=self.config
            )
            self.pipe.step(self.optimizer, is_async=self.case.staleness == 1)
        self.pipe.synchronize()

    def failure(self, steps: int) -> BaseException | None:
        """What a few steps raise, if anything."""
        try:
            self.train(steps)
        except StepError as error:
            return error
        return None


def on_fake_devices(case: Case, *, verbose: bool) -> Tally:
    """Hide each wait from the streams: a race must be seen, if the wait guards any data."""
    tally = Tally.of(case.name, verbose=verbose)
    training = Training(case)
    training.train(3)
    for action, wait in waits_of(training.chains[0][-1]):
        chain = training.chains[0]
        after = chain[-1].waits[action]
        hidden = Unordered(wait.op, wait.index, wait.microbatch, wait.chunk, before=wait.before)
        left = tuple(other for other in after if other != wait)
        rules = broken_rules(
            [*chain[:-1], replace(chain[-1], waits={**chain[-1].waits, action: left})]
        )
        if rules == [GATE]:
            tally.add(f"{action} without {wait}", "only keeps chunks apart")
            continue
        training.use({action: tuple(hidden if other == wait else other for other in after)})
        error = training.failure(3)
        is_race = error is not None and isinstance(error.__cause__, RaceError)
        tally.add(f"{action} without {wait}", "RaceError" if is_race else None)
    training.use({})
    training.train(1)
    training.pipe.close()
    return tally


def failing_actions(case: Case, *, verbose: bool) -> Tally:
    """Let each action fail: the step's error must name it, and the next step must work."""
    tally = Tally.of(case.name, verbose=verbose)
    training = Training(case)
    training.train(2)
    for action in training.chains[0][-1].order:
        training.fails_at = action
        error = training.failure(2)
        named = (
            error is not None and isinstance(error.__cause__, OSError) and str(action) in str(error)
        )
        tally.add(f"{action} fails", "StepError that names it" if named else None)
        training.train(1)
    training.pipe.close()
    return tally


# ---- parts 4 and 5: what hands something on unseen, and what runs hang on


def mechanisms(broken: Iterator[tuple[str, str | None]], name: str, *, verbose: bool) -> Tally:
    """Break each: a small step must differ from plain PyTorch or fail, or a test must."""
    tally = Tally.of(name, verbose=verbose)
    for mechanism, by in broken:
        tally.add(mechanism, by)
    return tally


PARTS = (
    ("waits dropped, by the rules of check", by_check),
    ("waits hidden from streams, by training on fake devices", on_fake_devices),
    ("actions that fail, by the error", failing_actions),
)
MECHANISMS = (
    ("mechanisms broken, by small steps beside plain PyTorch", "of a step", break_each),
    ("mechanisms of runs broken, by quick tests of the suite", "of a run", break_each_of_runs),
)


def main() -> int:
    """Run every part on every case; 1 if anything went unnoticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="show each mutant")
    verbose = parser.parse_args().verbose
    torch.set_num_threads(1)
    missed = 0
    for title, part in PARTS:
        print(title)
        for case in CASES:
            with HostOnly():
                tally = part(case, verbose=verbose)
            tally.show()
            missed += len(tally.missed)
        print()
    for title, name, broken in MECHANISMS:
        print(title)
        tally = mechanisms(broken(), name, verbose=verbose)
        tally.show()
        missed += len(tally.missed)
        print()
    print(f"unnoticed: {missed}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
