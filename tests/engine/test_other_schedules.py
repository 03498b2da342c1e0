"""Schedules that are not dealt in turn run on the same engine, to the same bits as a plain loop."""

from __future__ import annotations

from itertools import pairwise

import pytest

from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.program import Program
from roundpipe.plan.baselines import gpipe
from roundpipe.plan.check import check
from roundpipe.plan.generators import Replicas, at_start_device, replicated, round_robin
from roundpipe.plan.passes import Options, lower_chain

STEPS = 3
NUM_LAYERS = 5


def dawdling(count):
    return [
        CpuDevice(
            f"cpu:{index}", threads=1, max_delay_seconds=2e-4, poison_released=True, seed=count
        )
        for index in range(count)
    ]


def run_computations(trainer, generate):
    """Let the trainer run what ``generate(partition, costs, devices=..., microbatches=...)`` makes.

    Returns the lowered schedules by kind of step.
    """
    planner, lowered = trainer.pipe._chain._planner, {}

    def training(kind, start):
        if kind not in lowered:
            computation = generate(
                kind.plan.partition,
                planner.costs,
                devices=len(trainer.pipe._pool.devices),
                microbatches=kind.num_microbatches,
            )
            options = Options(
                costs=planner.costs, staleness=kind.staleness, accumulate=kind.accumulate
            )
            chain = lower_chain(computation, options, steps=1 if kind.accumulate else 3)
            check(chain)
            lowered[kind] = chain[-1]
        return Program(at_start_device(lowered[kind], start))

    planner.training = training
    return lowered


def gpipe_over(*edges):
    """GPipe with stages between ``edges``, whatever the trainer's plan."""
    stages = [range(first, stop) for first, stop in pairwise((0, *edges, NUM_LAYERS))]

    def generate(_partition, costs, *, devices, microbatches):
        return gpipe(stages, costs, devices=devices, microbatches=microbatches)

    return generate


def dealt_to_earliest(partition, costs, *, devices, microbatches):
    """Two devices a backward stage, of which the first is twice as fast."""
    return round_robin(
        partition,
        costs,
        devices=devices,
        microbatches=microbatches,
        replicas=Replicas(1, 2, 2, ramp=3, ramp_stages=1),
        deal="earliest",
        speeds=[2.0, 1.0, 1.0][:devices],
    )


def train_and_compare(rig, trainer, staleness):
    losses, weights = rig.plain(STEPS, staleness=staleness)
    assert trainer.train(STEPS) == losses
    return rig.same_bits(trainer.pipe.state_dict(), weights)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("edges", [(3,), (1, 2, 4), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_gpipe_gives_plain_bits(rig, devices, edges, staleness) -> None:
    trainer = rig.trainer(dawdling(devices), staleness=staleness)
    lowered = run_computations(trainer, gpipe_over(*edges))
    assert train_and_compare(rig, trainer, staleness) == []
    for schedule in lowered.values():
        assert schedule.num_microbatches == 3
        assert {v.device == v.stage % devices for v in schedule.visits} == {True}


def test_gpipe_runs_on_devices_that_believe_events_alone(rig) -> None:
    trainer = rig.trainer(rig.fakes(2, watch=True), staleness=1)
    run_computations(trainer, gpipe_over(1, 2, 4))
    assert train_and_compare(rig, trainer, 1) == []


def test_calls_of_one_step_add_up_under_gpipe(rig) -> None:
    trainer = rig.trainer(dawdling(2))
    run_computations(trainer, gpipe_over(2))
    losses, weights = rig.plain(2, calls=2)
    found = []
    for step in range(2):
        found += [trainer.call(2 * step), trainer.call(2 * step + 1)]
        trainer.step()
    assert found == losses
    assert_close(trainer.pipe.state_dict(), weights)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("generate", [replicated, dealt_to_earliest])
def test_stages_shared_by_devices_give_plain_weights(rig, generate, staleness) -> None:
    """Partial sums of shares are added on the host: in another order than one after the other."""
    trainer = rig.trainer(dawdling(3), staleness=staleness)
    lowered = run_computations(trainer, generate)
    losses, weights = rig.plain(STEPS, staleness=staleness)
    found = trainer.train(STEPS)
    assert found[0] == losses[0]
    assert_close(trainer.pipe.state_dict(), weights)
    for schedule in lowered.values():
        assert len(schedule.visits) > len({visit.stage for visit in schedule.visits})


def assert_close(found, expected) -> None:
    """As near as sums of a few fp32 terms in another order: AdamW turns that into 1e-2 times it."""
    for name, weight in expected.items():
        assert (found[name] - weight).abs().max() <= 1e-5, name
