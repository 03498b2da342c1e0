"""What a plan decides: stages, and how they are dealt to devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roundpipe.plan.baselines import gpipe
from roundpipe.plan.generators import (
    DealName,
    Replicas,
    at_start_device,
    deal_visits,
    deals_on,
    round_robin,
)
from roundpipe.plan.partition import Partition
from roundpipe.plan.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.schedule import Visit


@dataclass(frozen=True)
class Candidate:
    """One way to run a step. ``is_bound``: stage s always runs on device s mod N, as in GPipe."""

    partition: Partition
    replicas: Replicas = field(default_factory=Replicas)
    rounds: int = 1
    deal: DealName = "cyclic"
    is_bound: bool = False
    speeds: tuple[float, ...] | None = None  # of devices that are not alike

    def computation(
        self, costs: Costs, *, devices: int, microbatches: int, start_device: int = 0
    ) -> Schedule:
        """What each device computes in one step."""
        if self.is_bound:
            stages = (*self.partition.forward, self.partition.fused)
            schedule = gpipe(stages, costs, devices=devices, microbatches=microbatches)
            return at_start_device(schedule, start_device)
        return round_robin(
            self.partition,
            costs,
            devices=devices,
            microbatches=microbatches,
            rounds=min(self.rounds, microbatches),
            start_device=start_device,
            replicas=self.replicas,
            deal=self.deal,
            speeds=self.speeds,
        )

    def visits(self, costs: Costs, *, devices: int, microbatches: int) -> tuple[Visit, ...]:
        """The visits of ``computation`` alone, in a small part of the time."""
        if self.is_bound:
            return self.computation(costs, devices=devices, microbatches=microbatches).visits
        return tuple(
            deal_visits(
                self.partition,
                costs,
                devices=devices,
                microbatches=microbatches,
                rounds=min(self.rounds, microbatches),
                replicas=self.replicas,
                deal=self.deal,
                speeds=self.speeds,
            )
        )

    def turn(self, visits: Sequence[Visit], *, devices: int) -> int:
        """By how many devices the deal goes on in the next step."""
        goes_on = not self.is_bound and deals_on(self.deal, self.speeds or (1.0,))
        schedule = Schedule(tuple(visits), {}, {}, devices, 0, deals_on=goes_on)
        return schedule.next_start_device

    def name(self, devices: int) -> str:
        """What the schedule is called."""
        if self.is_bound:
            return "gpipe"
        copies = {self.replicas.forward, self.replicas.fused, self.replicas.backward}
        if copies == {1}:
            return "round_robin"
        return "replicated" if copies == {devices} else "hybrid"

    @property
    def num_copies(self) -> int:
        """Replicas of the three kinds of stages together: how far it is from round-robin."""
        return self.replicas.forward + self.replicas.fused + self.replicas.backward

    def with_replicas(self, forward: int, fused: int, backward: int) -> Candidate:
        """The same stages dealt to so many devices at once, shared ones to the earliest free."""
        is_shared = (forward, fused, backward) != (1, 1, 1)
        return replace(
            self,
            replicas=Replicas(forward, fused, backward),
            deal="earliest" if is_shared else "cyclic",
        )

    def as_plain(self) -> dict[str, Any]:
        """The same in plain values, for a file; see `of_plain`."""
        return {**asdict(self), "partition": {
            "forward": [[stage.start, stage.stop] for stage in self.partition.forward],
            "fused": [self.partition.fused.start, self.partition.fused.stop],
            "backward": [[stage.start, stage.stop] for stage in self.partition.backward],
        }}  # fmt: skip

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Candidate:
        """Read one back; raises PlanError, TypeError or KeyError for anything else."""
        cut = plain["partition"]
        partition = Partition(
            tuple(range(*stage) for stage in cut["forward"]),
            range(*cut["fused"]),
            tuple(range(*stage) for stage in cut["backward"]),
        )
        speeds = None if plain["speeds"] is None else tuple(plain["speeds"])
        replicas = Replicas(**plain["replicas"])
        return cls(**{**plain, "partition": partition, "replicas": replicas, "speeds": speeds})

    def __str__(self) -> str:
        r = self.replicas
        copies = (r.forward, r.fused, r.backward)
        on = "" if copies == (1, 1, 1) else " · on {} / {} / {} devices at once".format(*copies)
        rounds = f" · {self.rounds} rounds" if self.rounds > 1 else ""
        return f"{self.partition}{on}{rounds}"
