"""Plans chosen anew: whatever changes, the bits may not."""

from __future__ import annotations

import math

import pytest

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import partition_for
from roundpipe.plan.schedule_memory import schedule_bytes
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.score import Scores
from roundpipe.sim.search import Setting, choose

MB = 10**6
BLOCK = LayerCost(
    forward_seconds=0.010,
    backward_seconds=0.022,
    weight_bytes=200 * MB,
    gradient_bytes=400 * MB,
    boundary_bytes=30 * MB,
    activation_bytes=300 * MB,
    peak_bytes=50 * MB,
    update_bytes=2800 * MB,
)
COSTS = Costs((BLOCK,) * 8, frozenset(range(8)))
MACHINE = Machine(
    cards=(Card(name="card", memory_bytes=24_000 * MB, flops={}, bandwidth=1e12),) * 2,
    links=(Link(up=25e9, down=25e9, duplex=0.52),) * 2,
    host=Host(memory_bytes=1 << 40, bandwidth=150e9),
)


def setting(**how):
    return Setting(costs=COSTS, microbatches=8, **{"devices": 1, **how})


def gradient_shares(candidate, devices=2):
    """Which microbatches are added up where, by layer: what bits of gradients depend on."""
    computation = candidate.computation(COSTS, devices=devices, microbatches=8)
    shares = {layer: [] for layer in range(8)}
    for visit in computation.visits:
        if visit.has_backward:
            for layer in visit.layers:
                shares[layer].append(visit.microbatches)
    return shares


def test_memory_decides_how_many_layers_are_fused_once_it_is_known():
    like = choose(setting(memory_limit=9_000 * MB, longest=0.070), "round_robin").candidate
    assert len(like.partition.fused) <= 2
    fused = []
    for memory in (4_500, 9_000, 90_000):
        found = choose(setting(memory_limit=memory * MB), like=like).candidate
        visits = round_robin(found.partition, COSTS, devices=1, microbatches=8).visits
        assert schedule_bytes(COSTS, visits, devices=1) <= memory * MB
        fused.append(len(found.partition.fused))
    assert fused == sorted(fused)
    assert fused[0] < 5
    assert fused[-1] == 8


@pytest.mark.parametrize("copies", [(1, 1, 1), (2, 2, 2), (1, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("num_fused", [1, 3])
def test_what_is_chosen_alike_adds_up_the_same_shares(copies, num_fused):
    like = Candidate(partition_for(COSTS, 0.1, fuse=num_fused), rounds=2).with_replicas(*copies)
    found = choose(setting(devices=2, machine=MACHINE), like=like).candidate
    assert gradient_shares(found) == gradient_shares(like)


def test_a_bound_schedule_stays_bound():
    like = choose(setting(devices=2, machine=MACHINE), "gpipe").candidate
    assert choose(setting(devices=2), like=like).candidate.is_bound


def test_shares_by_speed_are_never_dealt_anew():
    like = Candidate(partition_for(COSTS, 0.1), speeds=(1.0, 0.5)).with_replicas(2, 2, 2)
    assert choose(setting(devices=2, speeds=(1.0, 0.5)), like=like).candidate == like


def test_what_takes_more_than_a_device_has_is_never_chosen():
    whole = Candidate(partition_for(COSTS, 9.9, fuse=8))  # one stage, which follows itself
    need = schedule_bytes(COSTS, whole.visits(COSTS, devices=1, microbatches=8), devices=1)
    assert math.isfinite(Scores(setting(memory_limit=need)).of(whole))
    assert math.isinf(Scores(setting(memory_limit=need - 1)).of(whole))


def test_where_nothing_fits_any_more_all_stays_as_it_was():
    like = choose(setting(), "round_robin").candidate
    assert choose(setting(memory_limit=MB), like=like).candidate == like
