"""The longest sequence is set by one layer's working set, however many layers there are."""

from __future__ import annotations

import pytest
import torch

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.device.emulated import emulate
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import PlanError
from roundpipe.models.ghost import ghost_chain, ghost_loss
from roundpipe.optim import AdamW
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.sim.search import Setting, choose

MB = 10**6
MEMORY = 10_000 * MB
WEIGHTS = 200 * MB
KEPT, PEAK, BOUNDARY = 0.30 * MB, 0.05 * MB, 0.008 * MB  # of a token


def chain(tokens, layers):
    """Blocks, and a head whose loss is made in chunks: it keeps little, whatever the length."""
    block = LayerCost(
        forward_seconds=1e-6 * tokens,
        backward_seconds=2.2e-6 * tokens,
        weight_bytes=WEIGHTS,
        gradient_bytes=2 * WEIGHTS,
        download_bytes=WEIGHTS,
        boundary_bytes=int(BOUNDARY * tokens),
        activation_bytes=int(KEPT * tokens),
        peak_bytes=int(PEAK * tokens),
    )
    head = LayerCost(
        forward_seconds=2e-6 * tokens,
        backward_seconds=1e-7 * tokens,
        weight_bytes=WEIGHTS,
        gradient_bytes=2 * WEIGHTS,
        download_bytes=WEIGHTS,
        boundary_bytes=int(BOUNDARY * tokens),
        activation_bytes=2 * WEIGHTS + int(BOUNDARY * tokens),
        peak_bytes=1500 * MB,
    )
    return Costs((*[block] * layers, head), frozenset(range(layers + 1)))


def machine_of(devices):
    return Machine(
        cards=(Card(name="card", memory_bytes=MEMORY, flops={}, bandwidth=1e12),) * devices,
        links=(Link(up=25e9, down=25e9, duplex=0.5),) * devices,
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )


def plan_for(tokens, layers, devices):
    setting = Setting(
        costs=chain(tokens, layers),
        devices=devices,
        microbatches=2 * devices,
        machine=machine_of(devices),
        memory_limit=MEMORY,
    )
    return choose(setting, "round_robin")


def longest(layers, devices):
    """The most tokens, in thousands, that some plan has room for."""
    low, high = 1, 64
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_for(middle * 1000, layers, devices)
            low = middle
        except PlanError:
            high = middle
    return low


@pytest.mark.parametrize("devices", [1, 2])
def test_it_is_what_one_layer_leaves_room_for(devices):
    slots = 2 * 3 * WEIGHTS  # a stage of one layer and the next one
    one_layer = KEPT + PEAK + 6 * BOUNDARY  # boundaries and gradients: two places for each
    room = int((MEMORY - slots) / one_layer) // 1000
    found = [longest(layers, devices) for layers in (4, 12)]
    assert found[0] == found[1]
    assert room - 1 <= found[0] <= room


def test_a_plan_of_so_long_a_sequence_runs_in_that_memory():
    tokens, devices = 1000 * longest(12, 2), 2
    pool = DevicePool(emulate(machine_of(devices), time_scale=0.0))
    ghosts = ghost_chain(chain(tokens, 12))
    batch = (torch.ones(4, 1),)
    with pool, RoundPipe(ghosts, pool=pool, schedule="round_robin") as model:
        optimizer = AdamW(model.optim_parameters(), lr=1e-3)
        for _ in range(3):
            model.forward_backward(
                batch,
                label=torch.zeros(4),
                loss_fn=ghost_loss,
                run_config=RoundPipeRunConfig(num_microbatch=4),
            )
            model.step(optimizer)
        model.synchronize()
        backward = model.plan.candidate.partition.backward
        held = [device.peak_bytes for device in pool.devices]
    assert all(len(stage) == 1 for stage in backward)
    assert all(0.9 * MEMORY < most <= MEMORY for most in held)
