"""The real engine on a machine one does not have: time, memory, failures, and the same numbers."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import nn

from roundpipe.device.emulated import emulate
from roundpipe.engine.call import LossRule, ask_training
from roundpipe.engine.caller import CallerState
from roundpipe.engine.engine import Engine
from roundpipe.engine.pool import DevicePool
from roundpipe.engine.program import Program
from roundpipe.engine.run import Call
from roundpipe.engine.updates import Update
from roundpipe.errors import StepError
from roundpipe.models.choose import spec_for
from roundpipe.models.ghost import GhostLayer, ghost_chain, ghost_loss
from roundpipe.optim import AdamW
from roundpipe.optim.host import HostOptimizer
from roundpipe.plan.actions import COMPUTE
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, at_start_device, round_robin
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.simulate import simulate_machine
from roundpipe.sim.work import Prices
from roundpipe.store.build import build_store

MB = 10**6
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
PARTITION = Partition(
    (range(3), range(3, 7)), range(7, 8), (range(5, 7), range(3, 5), range(1, 3), range(1))
)
# Slots: the largest two visits in a row are forward with 4 layers and backward with 2 for weights,
# and backward with 2 layers twice for gradients.
SLOTS = (4 + 2) * 200 * MB + (2 + 2) * 400 * MB


def machine(count=3, *, memory=24 * 10**9, link=25e9, host=150e9):
    return Machine(
        cards=(Card(name="card", memory_bytes=memory, flops={}, bandwidth=1e12),) * count,
        links=(Link(up=link, down=link, duplex=0.52),) * count,
        host=Host(memory_bytes=1 << 40, bandwidth=host),
    )


class Ghosts:
    """A chain of ghosts on an engine, run by a given schedule."""

    def __init__(self, what=None, *, module=None, microbatches=6, rounds=1, degrees=(1, 1, 1)):
        self.machine = what or machine()
        self.devices = emulate(self.machine, time_scale=0.0)
        self.clock = self.devices[0].clock
        self.pool = DevicePool(self.devices)
        spec = spec_for(module or ghost_chain(COSTS))
        self.layers = build_store([layer.tensors for layer in spec.layers])
        self.engine = Engine(self.pool, spec, self.layers)
        masters = [master for layer in self.layers for master in layer.masters.values()]
        self.optimizer = HostOptimizer(AdamW(masters, lr=1e-3), self.layers)
        computation = round_robin(
            PARTITION,
            COSTS,
            devices=len(self.devices),
            microbatches=microbatches,
            rounds=rounds,
            replicas=Replicas(*degrees),
        )
        self.lowered = lower_chain(computation, Options(costs=COSTS))[-1]
        self.asked = ask_training((torch.ones(microbatches, 1),), {}, None, ghost_loss, LossRule())
        self.number = itertools.count()

    def chain(self, steps):
        turn = self.lowered.next_start_device - self.lowered.start_device
        count = len(self.devices)
        return [at_start_device(self.lowered, turn * step % count) for step in range(steps)]

    def simulation(self, steps):
        return simulate_machine(self.chain(steps), Prices(costs=COSTS), self.machine)

    def train(self, steps):
        """Runs of so many steps that follow each other."""
        runs = []
        for schedule in self.chain(steps):
            call = Call(
                microbatches=self.asked.microbatches,
                caller=CallerState.capture(),
                seed=0,
                step=next(self.number),
                loss=self.asked.loss,
            )
            run = self.engine.start(Program(schedule, COSTS), call, follows=bool(runs))
            runs.append(run)
            self.engine.wait_results(run)
            update = Update(self.layers, self.optimizer.begin(), max_norm=1.0, publish=True)
            self.engine.step(run, update)
        self.engine.drain()
        return runs

    def allocated(self):
        return [device.allocated_bytes for device in self.devices]

    def close(self):
        self.engine.close()
        self.pool.close()


@pytest.fixture
def ghosts():
    made = []

    def make(*args, **how):
        made.append(Ghosts(*args, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def spans(run):
    return {span.action: span for span in run.timings.spans()}


@pytest.mark.parametrize(
    ("rounds", "degrees"), [(1, (1, 1, 1)), (2, (1, 1, 1)), (1, (3, 3, 3)), (1, (3, 1, 2))]
)
def test_steps_last_as_long_as_the_simulator_says(ghosts, rounds, degrees):
    rig = ghosts(rounds=rounds, degrees=degrees)
    runs = rig.train(4)
    ends = [max(s.end for s in run.timings.spans() if s.action.op in COMPUTE) for run in runs]
    simulated = rig.simulation(4).step_ends
    for step in range(1, 4):
        ours, theirs = ends[step] - ends[0], simulated[step] - simulated[0]
        assert ours == pytest.approx(theirs, rel=0.03)


def test_without_transfers_every_compute_action_runs_when_the_simulator_says(ghosts):
    rig = ghosts(machine(link=1e18, host=1e18))
    runs = rig.train(3)
    begin = min(span.start for span in runs[0].timings.spans())
    theirs = iter(rig.simulation(3).spans)
    per_step = len(list(rig.lowered.actions()))
    for run in runs:
        ours = spans(run)
        for span in itertools.islice(theirs, per_step):
            if span.action.op in COMPUTE:
                assert ours[span.action].start - begin == pytest.approx(span.start, abs=1e-6)
                assert ours[span.action].end - begin == pytest.approx(span.end, abs=1e-6)


def test_two_runs_of_one_schedule_take_the_same_time(ghosts):
    lengths = []
    for _ in range(2):
        ends = [max(span.end for span in run.timings.spans()) for run in ghosts().train(3)]
        lengths.append([ends[2] - ends[1]])
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-6)


def test_devices_hold_what_is_declared_and_give_back_what_steps_took(ghosts):
    rig = ghosts()
    rig.train(2)
    assert rig.allocated() == [SLOTS] * 3
    # At the worst: recompute of two layers, its input and gradient, and what comes and goes.
    least = SLOTS + 2 * 300 * MB + 50 * MB
    assert all(least <= d.peak_bytes <= least + 9 * 30 * MB for d in rig.devices)
    assert rig.pool.host.allocated_bytes == 0


def test_a_model_whose_slots_do_not_fit_is_out_of_memory_before_anything_runs(ghosts):
    rig = ghosts(machine(memory=SLOTS - 1))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on emulated:0"):
        rig.train(1)


def test_activations_that_do_not_fit_fail_the_step_and_are_given_back(ghosts):
    rig = ghosts(machine(memory=SLOTS + 600 * MB))
    with pytest.raises(StepError, match=r"R\d+\.\d .* failed: OutOfMemoryError") as caught:
        rig.train(1)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert rig.allocated() == [SLOTS] * 3


class Fails(GhostLayer):
    """A ghost that fails while ``broken`` is set."""

    broken = threading.Event()

    def forward(self, x):
        if self.broken.is_set():
            raise ZeroDivisionError("in the layer")
        return super().forward(x)


def test_a_step_that_failed_takes_no_more_time_and_the_next_one_is_right(ghosts):
    Fails.broken.set()
    module = nn.Sequential(*ghost_chain(COSTS)[:4], Fails(BLOCK), *ghost_chain(COSTS)[5:])
    rig = ghosts(module=module)
    begin = rig.clock.now
    with pytest.raises(StepError, match=r"F1\.0 .* failed: ZeroDivisionError: in the layer"):
        rig.train(1)
    # Of forward only the first stage, and what was under way beside it.
    assert rig.clock.now - begin < 0.1
    Fails.broken.clear()
    assert len(rig.train(2)) == 2
    assert rig.allocated() == [SLOTS] * 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_real_layers_train_as_in_plain_pytorch(rig, staleness):
    devices = emulate(machine(2), time_scale=0.0)
    losses, weights = rig.plain(3, staleness=staleness)
    trainer = rig.trainer(devices, staleness=staleness)
    assert trainer.train(3) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


def test_no_thread_is_left(ghosts):
    rig = ghosts()
    rig.train(1)
    rig.close()
    left = [thread.name for thread in threading.enumerate() if "emulated" in thread.name]
    assert left == []
