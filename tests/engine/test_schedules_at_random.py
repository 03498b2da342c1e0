"""Random schedules on CPU devices that dawdle and spoil what they are done with: same bits."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from roundpipe.config import ModelExecutePlan
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.emulated import emulate
from roundpipe.engine.issue import Issuer
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import StepError
from roundpipe.plan.machine import Card, Host, Link, Machine

NUM_LAYERS = 4
STEPS = 3
LATE = 0.01  # seconds


def dawdling(count):
    return [
        CpuDevice(
            f"cpu:{index}", threads=1, max_delay_seconds=2e-4, poison_released=True, seed=count
        )
        for index in range(count)
    ]


def cuts(draw, stop):
    """Consecutive ranges that cover 0 to ``stop``."""
    inner = sorted(draw.sample(range(1, stop), draw.randrange(stop))) if stop else []
    edges = [0, *inner, stop] if stop else []
    return [range(a, b) for a, b in pairwise(edges)]


def random_plan(draw):
    fused = draw.randrange(NUM_LAYERS)
    return ModelExecutePlan(
        cuts(draw, fused), [range(fused, NUM_LAYERS), *reversed(cuts(draw, fused))]
    )


def emulated(count):
    card = Card(name="card", memory_bytes=1 << 34, flops={}, bandwidth=1e12)
    machine = Machine(
        cards=(card,) * count,
        links=(Link(up=25e9, down=25e9, duplex=0.52),) * count,
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )
    return emulate(machine, time_scale=0.0)


def pools(kind):
    """One of each size for many trainers: what one leaves in flight, the next one meets."""
    return {count: DevicePool(kind(count)) for count in (1, 2, 3)}


def groups_of(trainer):
    """For each layer the microbatches of its backward visits, in the order of visits."""
    chain = trainer.pipe._chain
    visits = chain._planner.training(chain._kind, 0).schedule.visits
    return [
        [visit.microbatches for visit in visits if visit.has_backward and layer in visit.layers]
        for layer in range(NUM_LAYERS)
    ]


def plain_in_groups(rig, trainer, **options):
    loop, losses = rig.Plain(model=rig.chain(NUM_LAYERS), **options), []
    for step in range(STEPS):
        losses.append(loop.call_in_groups(step, groups_of(trainer)))
        loop.step()
    return losses, loop.newest.state_dict()


def train_one_at_random(rig, draw, made):
    """A random schedule, in every way that a schedule may differ."""
    staleness, microbatches = draw.randrange(2), draw.choice([1, 2, 3, 6])
    is_eager = draw.random() < 0.3
    trainer = rig.trainer(
        None,
        model=rig.chain(NUM_LAYERS),
        pool=made[draw.choice([1, 2, 3])],
        staleness=staleness,
        microbatches=microbatches,
        plan=random_plan(draw),
        recompute_grain=draw.choice(["stage", "layer"]),
        clip=None if is_eager else draw.choice([None, 0.01]),
        eager=is_eager,
    )
    schedule = {
        "chunk_bytes": draw.choice([256, 1 << 22]),
        "rounds": min(draw.choice([1, 1, 2, 3]), microbatches),
        "replicas": draw.choice([(), (), (2, 2, 2), (1, 2, 3), (3, 1, 2)]),
    }
    trainer.use_schedule(**schedule, checked=False)
    trainer.pipe._chain.staleness = staleness  # from the first step on: one schedule less
    losses = trainer.train(STEPS)
    expected, weights = plain_in_groups(
        rig, trainer, staleness=staleness, microbatches=microbatches, clip=trainer.clip
    )
    assert losses == expected, (trainer.config, schedule)
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == [], (trainer.config, schedule)
    trainer.pipe.close()


@pytest.mark.parametrize("tenth", range(10))
def test_random_schedules_give_plain_bits(rig, tenth):
    draw, made = random.Random(tenth), pools(dawdling)
    for _ in range(20):
        train_one_at_random(rig, draw, made)
    for pool in made.values():
        pool.close()


def test_random_schedules_give_plain_bits_on_an_emulated_machine(rig):
    draw, made = random.Random(10), pools(emulated)
    for _ in range(20):
        train_one_at_random(rig, draw, made)
    for pool in made.values():
        pool.close()


@pytest.mark.accept
@pytest.mark.parametrize("kind", [dawdling, emulated])
def test_many_more_random_schedules_give_plain_bits(rig, kind):
    for seed in range(20):
        draw, made = random.Random(1000 + seed), pools(kind)
        for _ in range(20):
            train_one_at_random(rig, draw, made)
        for pool in made.values():
            pool.close()


def test_whatever_is_about_to_be_written_over_is_spoiled_first(rig, monkeypatch):
    spoiled, poison = [], CpuDevice.poison

    def noting(self, buffer):
        poison(self, buffer)
        assert buffer.view(torch.uint8).eq(0xFF).all()
        spoiled.append(buffer.numel())

    trainer = rig.trainer(dawdling(2), microbatches=2)
    trainer.use_schedule(rounds=2)
    monkeypatch.setattr(CpuDevice, "poison", noting)
    trainer.train(1)
    trainer.pipe.synchronize()
    schedule = trainer.pipe._chain._planner.training(trainer.pipe._chain._kind, 0).schedule
    model = trainer.pipe._engine.models[0]
    expected = []
    for visit in schedule.visits:
        expected.append(model.weight_bytes(visit.layers))
        if visit.has_backward:
            expected.append(model.sum_bytes(visit.layers))
            expected += [model.sum_bytes(range(n, n + 1)) for n in visit.layers]  # partial sums
    assert sorted(spoiled) == sorted(expected)


@pytest.mark.parametrize(
    ("waiting", "awaited", "staleness"),
    [
        ("FXR", "U", 0),  # weights are there before they are used
        ("FXR", "A", 0),
        ("B", "G", 0),
        ("U", "FXRB", 0),  # a slot is not filled while it is in use
        ("XB", "O", 0),
        ("U", "S", 0),  # weights of the right version
        ("U", "P", 1),
        ("P", "U", 1),  # weights are not written while they are read
        ("N", "O", 0),
        ("O", "XBag", 0),
        ("A", "a", 0),
        ("G", "g", 0),
        ("ag", "FXB", 0),
    ],
)
def test_a_wait_that_is_missing_shows(rig, unordered, monkeypatch, waiting, awaited, staleness):
    """Nothing else would hide it: what nobody awaits any more is late."""

    dropped = []

    def is_dropped(action, wait):
        return action.op.value in waiting and wait.op.value in awaited

    def without(schedule):
        waits = {
            action: tuple(unordered(w) if is_dropped(action, w) else w for w in after)
            for action, after in schedule.waits.items()
        }
        dropped.append(waits != schedule.waits)
        return replace(schedule, waits=waits)

    execute, seconds = Issuer._execute, LATE * (4 if awaited == "P" else 1)

    def late(self, run, worker, action):
        if action.op.value in awaited:
            time.sleep(seconds)  # much of a step passes before that
        execute(self, run, worker, action)

    monkeypatch.setattr(Issuer, "_execute", late)
    losses, weights = rig.plain(STEPS, staleness=staleness)

    def is_right():
        trainer = rig.trainer(dawdling(1 if awaited == "O" else 2), staleness=staleness)
        trainer.use_schedule(without)
        try:
            same = trainer.train(STEPS) == losses
            return same & (rig.same_bits(trainer.pipe.state_dict(), weights) == [])
        except (StepError, KeyError, RuntimeError):
            return False

    for _ in range(3):  # on a busy machine all else may be later still
        if not is_right():
            break
        seconds *= 4
    else:
        pytest.fail("nobody noticed")
    assert any(dropped)


def test_what_is_late_changes_nothing_where_it_is_awaited(rig, monkeypatch):
    execute, draw = Issuer._execute, random.Random(0)

    def late(self, run, worker, action):
        time.sleep(LATE * draw.random() / 4)
        execute(self, run, worker, action)

    monkeypatch.setattr(Issuer, "_execute", late)
    trainer = rig.trainer(dawdling(2), staleness=1)
    losses, weights = rig.plain(STEPS, staleness=1)
    assert trainer.train(STEPS) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []
