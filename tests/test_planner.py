"""What a RoundPipe plans: on machines one does not have, as measured, anew, and by hand."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe import ConfigError, ModelExecutePlan, PlanError, RoundPipe, RoundPipeRunConfig
from roundpipe.device.emulated import emulate
from roundpipe.engine.drift import DriftWatch
from roundpipe.models.ghost import ghost_chain, ghost_loss
from roundpipe.optim import AdamW
from roundpipe.plan.actions import COMPUTE, Action
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import replicated, round_robin
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import layer_by_layer, partition_for
from roundpipe.planner import Planner

MB = 10**6
WIDTH = 8
BLOCK = LayerCost(
    forward_seconds=0.010,
    backward_seconds=0.022,
    weight_bytes=200 * MB,
    gradient_bytes=400 * MB,
    download_bytes=200 * MB,
    boundary_bytes=30 * MB,
    activation_bytes=300 * MB,
    peak_bytes=50 * MB,
    update_bytes=2800 * MB,
)
COSTS = Costs((BLOCK,) * 8, frozenset(range(8)))
COSTS_OF_SIX = Costs((BLOCK,) * 6, frozenset(range(6)))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def machine(*rates, memory=24 * 10**9):
    return Machine(
        cards=tuple(
            Card(name="card", memory_bytes=memory, flops={"bf16": rate}, bandwidth=1e12)
            for rate in rates
        ),
        links=(Link(up=25e9, down=25e9, duplex=0.52),) * len(rates),
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )


def train_ghosts(devices, *, steps=3, microbatches=8, costs=COSTS, **options):
    """The pipe, closed, after so many steps of a chain of ghosts."""
    with RoundPipe(ghost_chain(costs), devices=devices, **options) as pipe:
        optimizer = AdamW(pipe.optim_parameters(), lr=1e-3)
        for _ in range(steps):
            pipe.forward_backward(
                (torch.ones(microbatches, 1),),
                loss_fn=ghost_loss,
                run_config=RoundPipeRunConfig(num_microbatch=microbatches),
            )
            pipe.step(optimizer)
        pipe.synchronize()
        return SimpleNamespace(
            plan=pipe.plan, steps=pipe.timeline.steps, devices=pipe._pool.devices
        )


def work_by_device(step):
    """Microbatches times layers that each device runs backward or forward in a step."""
    work = Counter()
    for visit in step.visits:
        work[visit.device] += len(visit.microbatches) * len(visit.layers)
    return work


def ends(steps):
    return [max(s.end for s in step.spans if s.action.op in COMPUTE) for step in steps]


# ---- machines one does not have


def test_an_emulated_machine_runs_the_automatic_plan_in_the_time_it_was_chosen_for():
    done = train_ghosts("emulated:8x4090,512GB,time_scale=0", steps=4)
    found = ends(done.steps)
    assert (found[3] - found[1]) / 2 == pytest.approx(done.plan.seconds, rel=0.12)
    assert "8 microbatches on 8 devices" in done.plan.why
    limit = done.devices[0].clock.machine.cards[0].memory_bytes
    assert all(device.peak_bytes <= limit for device in done.devices)


@pytest.mark.parametrize("memory", [3_800, 5_000, 8_000])
def test_a_plan_never_takes_more_than_scarce_devices_have(memory):
    done = train_ghosts(emulate(machine(1e14, 1e14, memory=memory * MB), time_scale=0.0))
    assert max(device.peak_bytes for device in done.devices) <= memory * MB


def test_a_limit_given_by_hand_is_kept_too():
    done = train_ghosts("emulated:2x4090,512GB,time_scale=0", device_memory_limit=4_500 * MB)
    assert max(device.peak_bytes for device in done.devices) <= 4_500 * MB


def test_what_does_not_fit_at_all_is_refused_with_the_way_out():
    with pytest.raises(PlanError, match=r"bytes of 1000000000\nhint: device_memory_limit=\d+"):
        train_ghosts(emulate(machine(1e14, memory=1_000 * MB), time_scale=0.0))


@pytest.mark.parametrize("schedule", ["auto", "round_robin"])
def test_a_device_twice_as_fast_gets_about_twice_the_work(schedule):
    devices = emulate(machine(2e14, 1e14), time_scale=0.0)
    done = train_ghosts(devices, microbatches=12, schedule=schedule)
    busy = Counter()
    for span in done.steps[-1].spans:
        if span.action.op in COMPUTE:
            busy[span.stream] += span.end - span.start
    assert busy["1.compute"] == pytest.approx(busy["0.compute"], rel=0.35)


def test_mixed_cards_are_as_fast_as_the_table_says():
    done = train_ghosts("emulated:1x4090+1x3060,96GB,time_scale=0", microbatches=12)
    cards = done.devices[0].clock.machine.cards
    ratio = cards[0].flops["bf16"] / cards[1].flops["bf16"]
    work = work_by_device(done.steps[-1])
    assert ratio / 2.5 < work[0] / work[1] < ratio * 2.5


# ---- the same bits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def chain(num_layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_layers)))


def batch(step, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, size, WIDTH, generator=generator)


def trained(devices, *, steps=4, execute_plan=None, recompute_grain=None, **options):
    """Losses and weights after so many steps, and the pipe."""
    config = RoundPipeRunConfig(
        num_microbatch=4, execute_plan=execute_plan, recompute_grain=recompute_grain
    )
    losses = []
    with RoundPipe(chain(), devices=devices, **options) as pipe:
        optimizer = AdamW(pipe.optim_parameters(), lr=1e-2)
        for step in range(steps):
            x, y = batch(step)
            loss = pipe.forward_backward((x,), label=y, loss_fn=mse_loss, run_config=config)
            losses.append(loss.item())
            pipe.step(optimizer)
        return losses, {name: t.clone() for name, t in pipe.state_dict().items()}, pipe


@pytest.fixture(scope="module")
def plain():
    model, losses = chain(), []
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(4) for t in batch(step)), strict=True):
            loss = mse_loss(model(x), y)
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def assert_same(found, plain):
    assert found[0] == plain[0]
    assert [
        name for name, value in plain[1].items() if not torch.equal(found[1][name], value)
    ] == []


@pytest.mark.parametrize("devices", ["cpu", "cpu*2", "cpu*3"])
@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
def test_a_schedule_by_name_gives_plain_bits(plain, devices, schedule):
    found = trained(devices, schedule=schedule)
    assert_same(found, plain)
    assert schedule == "auto" or found[2].plan.candidate.is_bound


def test_replicated_differs_from_plain_by_the_order_of_sums_alone(plain):
    losses, weights, pipe = trained("cpu*2", schedule="replicated")
    assert losses == pytest.approx(plain[0], rel=1e-5)
    for name, value in plain[1].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert pipe.plan.candidate.name(2) == "replicated"
    assert len({visit.device for visit in pipe.timeline.steps[-1].visits if visit.stage == 0}) == 2


@pytest.mark.parametrize("num_fused", [1, 2, 5, 6])
def test_how_many_layers_are_fused_changes_no_bit(plain, num_fused):
    below = 6 - num_fused
    by_hand = ModelExecutePlan(
        [range(below)] if below else [], [range(below, 6), *([range(below)] if below else [])]
    )
    assert_same(trained("cpu*2", execute_plan=by_hand), plain)


# ---- schedules of one's own


def test_a_schedule_can_be_a_function(plain):
    asked = []

    def make(costs, machine, microbatches):
        asked.append((costs.num_layers, machine.num_devices, microbatches))
        partition = partition_for(costs, 1.0, fuse=2)
        return round_robin(partition, costs, devices=machine.num_devices, microbatches=microbatches)

    found = trained("cpu*2", schedule=make)
    assert_same(found, plain)
    assert asked == [(6, 2, 4)]
    assert found[2].plan.why.startswith("as schedule= gave it · 4 microbatches on 2 devices")


def test_a_function_may_replicate():
    def make(costs, machine, microbatches):
        partition = partition_for(costs, 0.0)
        return replicated(partition, costs, devices=2, microbatches=microbatches, rounds=2)

    losses, _, pipe = trained("cpu*2", schedule=make, steps=2)
    assert len(losses) == 2
    assert len(pipe.timeline.steps[-1].visits) == 2 * 2 * 11  # rounds, devices, stages


def without_a_layer(costs, machine, microbatches):
    cut = Costs(costs.layers[:-1], costs.owners - {costs.num_layers - 1})
    partition = partition_for(cut, 1.0)
    return round_robin(partition, cut, devices=2, microbatches=microbatches)


def for_other_devices(costs, machine, microbatches):
    partition = partition_for(costs, 1.0)
    return round_robin(partition, costs, devices=3, microbatches=microbatches)


def in_a_circle(costs, machine, microbatches):
    made = for_two(costs, microbatches)
    first, last = made.visits[0].first, made.visits[-1].last
    made.waits[first] = (Action(last.op, last.index, last.microbatch),)
    return made


def for_two(costs, microbatches):
    partition = partition_for(costs, 1.0)
    return round_robin(partition, costs, devices=2, microbatches=microbatches)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (for_other_devices, PlanError, "no more: {'devices': 3, .*}, not {'devices': 2"),
        (without_a_layer, PlanError, "must end with the last of 6 layers"),
        (in_a_circle, PlanError, "circle|waits"),
        (lambda *_: "gpipe", ConfigError, "must return a roundpipe.plan.Schedule: str"),
    ],
)
def test_a_bad_schedule_is_refused_before_anything_runs(make, error, message):
    with pytest.raises(error, match=message):
        trained("cpu*2", schedule=make, steps=1)


def test_an_unknown_name_is_refused_when_wrapping():
    with pytest.raises(ConfigError, match="unknown schedule: round\nhint: auto, round_robin"):
        RoundPipe(chain(), devices="cpu", schedule="round")


# ---- measuring and planning anew


def test_a_plan_is_made_anew_from_what_was_measured_and_the_bits_stay(plain, caplog):
    with caplog.at_level(logging.INFO, logger="roundpipe.planner"):
        found = trained("cpu*2")
    assert_same(found, plain)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("plan: round-robin · forward")
    assert "measured in step 2" in found[2].plan.why
    layers = found[2].planner.costs.layers
    size = 2 * WIDTH * 4  # two samples a microbatch
    assert [layer.boundary_bytes for layer in layers] == [0, *[size] * 5]
    assert all(layer.activation_bytes == 2 * size for layer in layers[1:-1])  # input, tanh


def bits_of(plan):
    candidate, copies = plan.candidate, plan.candidate.replicas
    num_fused = len(candidate.partition.fused) if copies.fused != copies.backward else None
    return copies, candidate.rounds, candidate.deal, num_fused


def slower(costs, factors):
    """The costs as a machine would have measured them whose layers took so many times as long."""
    layers = [
        replace(layer, forward_seconds=layer.forward_seconds * factor)
        for layer, factor in zip(costs.layers, factors, strict=True)
    ]
    return replace(costs, layers=tuple(layers))


@pytest.mark.parametrize("factors", [(9, 9, 9, 0.1, 0.1, 0.1), (0.1,) * 5 + (40,)])
def test_what_bits_a_number_of_microbatches_that_comes_up_later_has_hangs_on_no_clock(factors):
    with RoundPipe(chain(), devices="cpu*3", schedule="hybrid") as pipe:
        planner = pipe.planner
        planner.plan(3, None)  # for a pass without gradient: whatever it is
        first = planner.plan(6, None, rows=1)
        planner.costs = slower(planner.costs, factors)
        later = [planner.plan(count, None, rows=1) for count in (2, 3, 5)]
        assert {bits_of(plan) for plan in later} == {bits_of(first)}
        assert first.candidate.num_copies > 3
        assert list(planner.candidates) == [6, 2, 3, 5]
        known = planner.candidates
    with RoundPipe(chain(), devices="cpu*3", schedule="hybrid") as again:
        again.planner.like = known
        again.planner.costs = slower(again.planner.costs, reversed(factors))
        assert bits_of(again.planner.plan(4, None, rows=1)) == bits_of(first)


@pytest.mark.parametrize(("grain", "is_known"), [("stage", True), ("layer", False)])
def test_what_is_recomputed_layer_by_layer_tells_nothing_of_stages(plain, grain, is_known):
    found = trained("cpu", recompute_grain=grain)
    assert_same(found, plain)
    assert (found[2].planner.costs.layers[-1].activation_bytes > 0) is is_known
    assert (found[2].planner._setting(4).longest is None) is is_known


def longest_share(plan, costs):
    def both(stage):
        held = costs.layers[stage.start : stage.stop]
        return sum(layer.forward_seconds + layer.backward_seconds for layer in held)

    work = sum(2 * layer.forward_seconds + layer.backward_seconds for layer in costs.layers)
    partition = plan.partition
    return max(map(both, (partition.fused, *partition.backward))) / work


def test_before_activations_are_known_no_stage_takes_more_than_a_quarter_of_a_step():
    with RoundPipe(chain(12), devices="cpu") as pipe:
        first = pipe.planner.plan(8, None)
        assert longest_share(first, pipe.planner.costs) <= 1 / 4
        pipe.planner._is_weighed = True
        pipe.planner._plans.clear()
        assert longest_share(pipe.planner.plan(8, None), pipe.planner.costs) > 1 / 2


LIMIT = 10**9  # bytes; all of `chain` would fit


@pytest.mark.parametrize("devices", ["cpu", "cpu*2"])
def test_where_memory_is_limited_layers_are_stages_until_activations_are_known(plain, devices):
    with RoundPipe(chain(), devices=devices, device_memory_limit=LIMIT) as pipe:
        first = pipe.planner.plan(4, None).partition
    assert first == layer_by_layer(COSTS_OF_SIX)
    found = trained(devices, device_memory_limit=LIMIT)
    assert_same(found, plain)
    assert not found[2].planner._setting(4).by_layer


def test_what_is_recomputed_layer_by_layer_stays_cut_so_where_memory_is_limited(plain):
    found = trained("cpu", device_memory_limit=LIMIT, recompute_grain="layer")
    assert_same(found, plain)
    assert found[2].plan.partition == layer_by_layer(COSTS_OF_SIX)


@pytest.mark.parametrize("schedule", ["hybrid", "replicated", "gpipe"])
def test_all_schedules_begin_where_memory_is_limited(plain, schedule):
    losses, weights, _ = trained("cpu*2", device_memory_limit=LIMIT, schedule=schedule)
    assert losses == pytest.approx(plain[0], rel=1e-5)
    for name, value in plain[1].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_a_layer_that_does_not_fit_by_itself_is_refused_when_wrapping():
    with pytest.raises(PlanError, match="layer 0 does not fit on the device"):
        RoundPipe(chain(), devices="cpu", device_memory_limit=100)


def test_times_that_have_drifted_are_learned_from_and_the_bits_stay(plain, monkeypatch):
    learned, learn = [], Planner.learn
    monkeypatch.setattr(DriftWatch, "has_drifted", lambda self, kind, timings: len(timings) == 3)

    def seen(self, run, sizes, reason):
        learned.append((run.call.step, sizes is not None, reason))
        learn(self, run, sizes, reason)

    monkeypatch.setattr(Planner, "learn", seen)
    assert_same(trained("cpu*2"), plain)
    assert learned == [
        (1, True, "measured in step 2"),
        (2, False, "times have drifted by step 3"),
    ]
