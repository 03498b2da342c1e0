"""What the planner says a step takes of a device, against what an emulated run of it allocates."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from roundpipe.device.emulated import emulate
from roundpipe.engine.call import LossRule, ask_training
from roundpipe.engine.caller import CallerState
from roundpipe.engine.engine import Engine
from roundpipe.engine.microbatch import Cut
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.program import Program
from roundpipe.engine.run import Call
from roundpipe.engine.updates import Update
from roundpipe.models.choose import spec_for
from roundpipe.models.ghost import ghost_chain, ghost_loss
from roundpipe.optim import AdamW
from roundpipe.optim.host import HostOptimizer
from roundpipe.plan.baselines import gpipe
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, at_start_device, round_robin
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import Partition, front
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.schedule_memory import schedule_bytes
from roundpipe.plan.shares import partition_bytes
from roundpipe.store.build import build_store

MB = 10**6
ROOM = 10**15


def a_chain(draw):
    num = draw.randint(1, 7)
    lowest = draw.choice([0, 0, draw.randrange(num)])

    def layer(at):
        weight = draw.choice([200, draw.randint(1, 900)]) * MB
        return LayerCost(
            forward_seconds=draw.uniform(0.01, 0.03),
            backward_seconds=draw.uniform(0.02, 0.06),
            weight_bytes=weight,
            gradient_bytes=2 * weight if at >= lowest else 0,
            boundary_bytes=draw.randint(0, 60) * MB,
            activation_bytes=draw.randint(0, 500) * MB,
            peak_bytes=draw.randint(0, 200) * MB,
        )

    return Costs(tuple(layer(at) for at in range(num)), frozenset(range(lowest, num)))


def a_computation(draw, costs, devices):
    cuts = front(costs, fuse=draw.randint(1, costs.num_layers))
    partition = draw.choice(cuts)
    microbatches = draw.randint(1, 5)
    if draw.random() < 0.2:
        stages = (*partition.forward, partition.fused)
        return partition, gpipe(stages, costs, devices=devices, microbatches=microbatches)
    copies = Replicas(*(draw.randint(1, devices) for _ in range(3)))
    return partition, round_robin(
        partition,
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=draw.randint(1, microbatches),
        replicas=copies if draw.random() < 0.6 else Replicas(),
        deal=draw.choice(["cyclic", "earliest"]),
    )


def peak_bytes(costs, computation, steps=3):
    """The most that any device of an emulated machine has held in a chain of steps."""
    count = computation.num_devices
    machine = Machine(
        cards=(Card(name="card", memory_bytes=ROOM, flops={}, bandwidth=1e12),) * count,
        links=(Link(up=20e9, down=20e9),) * count,
        host=Host(memory_bytes=ROOM, bandwidth=150e9),
    )
    devices = emulate(machine, time_scale=0.0)
    spec = spec_for(ghost_chain(costs))
    layers = build_store([layer.tensors for layer in spec.layers])
    with DevicePool(devices) as pool:
        engine = Engine(pool, spec, layers)
        masters = [master for layer in layers for master in layer.masters.values()]
        optimizer = HostOptimizer(AdamW(masters, lr=1e-3), layers)
        lowered = lower_chain(computation, Options(costs=costs))[-1]
        turn = lowered.next_start_device - lowered.start_device
        inputs = (torch.ones(lowered.num_microbatches, 1),)
        rule = LossRule(cut=Cut(lowered.num_microbatches))
        asked = ask_training(inputs, {}, None, ghost_loss, rule)
        for step in range(steps):
            program = Program(at_start_device(lowered, turn * step % count), costs)
            call = Call(
                microbatches=asked.microbatches,
                caller=CallerState.capture(),
                seed=0,
                step=step,
                loss=asked.loss,
            )
            run = engine.start(program, call, follows=step > 0)
            engine.wait_results(run)
            engine.step(run, Update(layers, optimizer.begin(), max_norm=None, publish=True))
        engine.drain()
        engine.close()
        return max(device.peak_bytes for device in devices)


@pytest.mark.parametrize("seed", range(12))
def test_no_device_ever_holds_more_than_was_planned(seed):
    draw = random.Random(seed)
    for _ in range(3):
        costs, devices = a_chain(draw), draw.randint(1, 4)
        partition, computation = a_computation(draw, costs, devices)
        turn = computation.next_start_device - computation.start_device
        planned = schedule_bytes(costs, computation.visits, devices=devices, turn=turn)
        held = peak_bytes(costs, computation)
        assert 0.7 * planned <= held <= planned, (costs, computation.visits)
        if computation.next_start_device != computation.start_device and devices > 1:
            assert planned <= partition_bytes(costs, partition) + 5 * 60 * MB


def test_boundaries_that_stay_on_a_device_are_counted_one_a_microbatch():
    layer = LayerCost(forward_seconds=0.01, backward_seconds=0.02, boundary_bytes=100 * MB)
    costs = Costs((layer, layer, layer, replace(layer, gradient_bytes=4)), frozenset({3}))
    computation = round_robin(
        Partition((range(1), range(1, 2), range(2, 3)), range(3, 4), ()),
        costs,
        devices=1,
        microbatches=20,
    )
    planned = schedule_bytes(costs, computation.visits, devices=1)
    # One is made while the one it is made from is there.
    assert planned == (20 + 1) * 100 * MB + 2 * 4
    assert peak_bytes(costs, computation, steps=1) == planned
