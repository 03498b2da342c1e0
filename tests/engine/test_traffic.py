"""What crosses the links in a step: counted, as much as the design says, and never far ahead."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from roundpipe.config import ModelExecutePlan
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.emulated import emulate
from roundpipe.engine.traffic import Traffic
from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.machine import Card, Host, Link, Machine

WIDTH = 16
PARAMETERS = WIDTH * WIDTH  # of a layer: 512 bytes in 16 bits, so that nothing is padded
PLAN = ModelExecutePlan([range(2), range(2, 4)], [range(4, 5), range(3, 4), range(1, 3), range(1)])
NUM_LAYERS, NUM_SAMPLES, MICROBATCHES = 5, 4, 4


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(super().forward(x))


def model(dtype=torch.bfloat16, frozen=0):
    torch.manual_seed(0)
    layers = [Layer().to(dtype) for _ in range(NUM_LAYERS)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def machine(count):
    return Machine(
        cards=(Card(name="card", memory_bytes=1 << 34, flops={}, bandwidth=1e12),) * count,
        links=(Link(up=25e9, down=25e9, duplex=0.52),) * count,
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )


KINDS = {
    "cpu": lambda rig, count: [CpuDevice(f"cpu:{at}", threads=1) for at in range(count)],
    "fake": lambda rig, count: rig.fakes(count, watch=True),
    "emulated": lambda rig, count: emulate(machine(count), time_scale=0.0),
}


class Counted:
    """The traffic of one step in the middle of others, and the schedule it ran."""

    def __init__(self, rig, devices, *, frozen=0, dtype=torch.bfloat16, plan=PLAN, **schedule):
        trainer = rig.trainer(
            devices, model=model(dtype, frozen), microbatches=MICROBATCHES, plan=plan
        )
        trainer.use_schedule(**schedule)
        self.trainer = trainer
        self.call(2)
        before = trainer.pipe._engine.traffic
        self.call(1)
        self.traffic = trainer.pipe._engine.traffic.since(before)
        chain = trainer.pipe._chain
        self.schedule = chain._planner.training(chain._kind, 0).schedule
        self.itemsize = dtype.itemsize

    def call(self, steps):
        generator = torch.Generator().manual_seed(0)
        dtype = next(self.trainer.pipe.model.parameters()).dtype
        x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator).to(dtype)
        for _ in range(steps):
            self.trainer.pipe.forward_backward(
                (x,), label=x, loss_fn=nn.functional.mse_loss, run_config=self.trainer.config
            )
            self.trainer.step()
        self.trainer.pipe.synchronize()

    def visited(self, *, backward):
        """How many layers all visits with or without backward have, taken together."""
        return sum(
            len(visit.layers) for visit in self.schedule.visits if visit.has_backward is backward
        )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_round_moves_six_bytes_for_each_trained_parameter(rig, kind, count):
    """Two up for forward, two up for backward (the fused stage is both), two down."""
    counted = Counted(rig, KINDS[kind](rig, count))
    moved = counted.traffic.num_bytes
    assert moved[Op.UPLOAD] == 2 * PARAMETERS * (NUM_LAYERS + NUM_LAYERS - 1)
    assert moved[Op.DOWNLOAD] == 2 * PARAMETERS * NUM_LAYERS


def test_a_layer_goes_up_and_its_gradients_come_down_in_one_copy(rig):
    counted = Counted(rig, KINDS["cpu"](rig, 2))
    assert counted.traffic.copies[Op.UPLOAD] == NUM_LAYERS + NUM_LAYERS - 1
    assert counted.traffic.copies[Op.DOWNLOAD] == NUM_LAYERS


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("schedule", "times"), [({"rounds": 2}, 2), ({"replicas": (2, 2, 2)}, 2)], ids=str
)
def test_rounds_and_replicas_move_weights_for_each_visit_and_sums_in_fp32(
    rig, kind, schedule, times
):
    counted = Counted(rig, KINDS[kind](rig, 2), **schedule)
    moved = counted.traffic.num_bytes
    assert moved[Op.UPLOAD] == times * 2 * PARAMETERS * (NUM_LAYERS + NUM_LAYERS - 1)
    assert moved[Op.DOWNLOAD] == times * 4 * PARAMETERS * NUM_LAYERS


def test_layers_below_the_first_trained_one_are_not_uploaded_for_backward(rig):
    plan = ModelExecutePlan([range(2), range(2, 4)], [range(4, 5), range(3, 4), range(2, 3)])
    counted = Counted(rig, KINDS["cpu"](rig, 2), frozen=2, plan=plan)
    moved = counted.traffic.num_bytes
    assert moved[Op.UPLOAD] == 2 * PARAMETERS * (NUM_LAYERS + 2)  # backward of layers 2 and 3
    assert moved[Op.DOWNLOAD] == 2 * PARAMETERS * 3
    assert min(v.layers.start for v in counted.schedule.visits if v.has_backward) == 2


@pytest.mark.parametrize("schedule", [{}, {"rounds": 2}, {"replicas": (1, 1, 3)}], ids=str)
def test_boundaries_move_once_for_each_stage_that_reads_them_elsewhere(rig, schedule):
    """Activations and their gradients: one boundary of one microbatch is rows * width."""
    counted = Counted(rig, KINDS["cpu"](rig, 3), **schedule)
    moved, done = counted.traffic.num_bytes, counted.schedule
    boundary = 2 * WIDTH * NUM_SAMPLES // MICROBATCHES
    keys = [(visit, m) for visit in done.visits for m in visit.microbatches]
    read = sum(v.layers.start > 0 and (v.number, m) not in done.resident for v, m in keys)
    given = sum(v.layers.start == 0 for v, _ in keys)
    labels = sum(v.layers.stop == NUM_LAYERS for v, _ in keys)
    assert moved[Op.ACTIVATION_IN] == boundary * (read + given + labels)
    sent = sum(len(done.sends.get((v.number, m), ())) for v, m in keys if not v.has_backward)
    losses = MICROBATCHES * 2
    assert moved[Op.ACTIVATION_OUT] == boundary * sent + losses
    crossing = sum(action.op is Op.GRADIENT_IN for _, action in done.actions())
    assert moved[Op.GRADIENT_IN] == moved[Op.GRADIENT_OUT] == boundary * crossing


def test_both_directions_are_the_sum_of_their_kinds():
    traffic = Traffic()
    for size, op in enumerate((*Traffic().num_bytes,), start=1):
        traffic.add(op, size, copies=2)
    assert traffic.up_bytes == 1 + 2 + 3
    assert traffic.down_bytes == 4 + 5 + 6
    more = Traffic.sum([traffic, traffic])
    assert more.up_bytes == 12
    assert more.since(traffic).down_bytes == 15
    assert more.copies[Op.UPLOAD] == 4


# ---- how far a device runs ahead


def dawdling(count):
    return [
        CpuDevice(f"cpu:{at}", threads=1, max_delay_seconds=1e-3, seed=at) for at in range(count)
    ]


def most_in_flight(trainer):
    """The most visits of one device whose weights are on it or on their way, at any time."""
    events = []
    for step in trainer.pipe.timeline.steps:
        for visit in step.visits:
            own = [s for s in step.spans if s.action.index == visit.number]
            begin = min(s.start for s in own if s.action.op is Op.UPLOAD)
            end = max(s.end for s in own if s.action.op in COMPUTE)
            events += [(begin, 1, visit.device), (end, -1, visit.device)]
    held, most = {}, 0
    for _, change, device in sorted(events):
        held[device] = held.get(device, 0) + change
        most = max(most, held[device])
    return most


@pytest.mark.parametrize(("count", "staleness"), [(1, 0), (2, 1), (3, 1)])
def test_no_device_has_more_than_two_visits_weights(rig, count, staleness):
    trainer = rig.trainer(dawdling(count), staleness=staleness)
    trainer.use_schedule(chunk_bytes=256)
    trainer.train(4)
    trainer.pipe.synchronize()
    assert most_in_flight(trainer) == 2


def test_without_its_waits_it_would_have_more(rig):
    """So the test above can fail."""

    def unbound(schedule):
        waits = {
            action: () if action.op is Op.UPLOAD else after
            for action, after in schedule.waits.items()
        }
        return replace(schedule, waits=waits)

    trainer = rig.trainer(dawdling(1))
    trainer.use_schedule(unbound)
    trainer.call()
    trainer.pipe.synchronize()
    assert most_in_flight(trainer) > 2


@pytest.mark.parametrize("count", [1, 2])
def test_an_activation_finds_no_chunk_before_it_but_those_whose_turn_has_come(rig, count):
    """A chunk of the next visit starts behind an activation of this one: see [Note: gates]."""
    trainer = rig.trainer(dawdling(count), microbatches=6)
    trainer.use_schedule(chunk_bytes=256)
    trainer.train(3)
    trainer.pipe.synchronize()
    gated = 0
    for step in trainer.pipe.timeline.steps:
        spans = {span.action: span for span in step.spans}
        for device in range(count):
            visits = [visit for visit in step.visits if visit.device == device]
            for one, two in pairwise(visits):
                chunks = sorted(
                    (a.chunk, s.start) for a, s in spans.items()
                    if a.op is Op.UPLOAD and a.index == two.number
                )  # fmt: skip
                arrivals = sorted(
                    s.end for a, s in spans.items()
                    if a.op is Op.ACTIVATION_IN and a.index == one.number
                )  # fmt: skip
                for chunk, start in chunks:
                    due = chunk * len(arrivals) // len(chunks)
                    assert chunk == 0 or arrivals[due] <= start
                    gated += chunk > 0
    assert gated > 10
