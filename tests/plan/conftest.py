"""Small costs and lowered steps that the tests of this room share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import at_start_device, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.plan.schedule import Schedule

MIB = 1 << 20


def _costs(num_layers, *, trained=None, tied=False, weight=4 * MIB, gradient=4 * MIB) -> Costs:
    owners = frozenset(range(num_layers) if trained is None else trained)
    layers = []
    for layer in range(num_layers):
        borrows = (0,) if tied and layer == num_layers - 1 > 0 else ()
        is_trained = bool(owners.intersection((layer, *borrows)))
        layers.append(
            LayerCost(
                forward_seconds=1,
                backward_seconds=2,
                weight_bytes=weight,
                gradient_bytes=gradient if is_trained else 0,
                borrows=borrows,
            )
        )
    return Costs(tuple(layers), owners)


@pytest.fixture(scope="session")
def costs_of() -> Callable[..., Costs]:
    """``costs_of(num_layers, trained=..., tied=...)``: equal layers, 1 s forward, 2 s backward."""
    return _costs


@pytest.fixture(scope="session")
def for_ever() -> Callable[..., list[Schedule]]:
    """``for_ever(schedule)``: five steps, each the same schedule where the deal has gone on to."""

    def steps(schedule: Schedule, count: int = 5) -> list[Schedule]:
        turn = schedule.next_start_device - schedule.start_device
        starts = [schedule.start_device + turn * at for at in range(1 - count, 1)]
        return [at_start_device(schedule, start % schedule.num_devices) for start in starts]

    return steps


@pytest.fixture(scope="session")
def small_chain() -> Callable[..., Sequence[Schedule]]:
    """Three steps of 3 layers on 2 devices: forward 0-1, fused 2, backward 1 and 0."""

    def lower(*, costs=None, devices=2, microbatches=3, staleness=0, **more) -> Sequence[Schedule]:
        costs = costs or _costs(3)
        partition = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))
        computation = round_robin(
            partition, costs, devices=devices, microbatches=microbatches, **more
        )
        return lower_chain(computation, Options(costs=costs, staleness=staleness))

    return lower
