"""Steps that update each layer as soon as its gradient is there: same bits, less safety."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.functional import mse_loss

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.emulated import emulate
from roundpipe.engine.updates import Update, refuse_eager
from roundpipe.errors import ConfigError, StepError
from roundpipe.optim.host import HostOptimizer
from roundpipe.optim.scaler import GradScaler
from roundpipe.plan.actions import Op


def dawdling(count):
    return [
        CpuDevice(
            f"cpu:{index}", threads=1, max_delay_seconds=2e-4, poison_released=True, seed=count
        )
        for index in range(count)
    ]


def eager(rig, devices, *, schedule=(), **options):
    trainer = rig.trainer(devices, eager=True, **options)
    trainer.use_schedule(**dict(schedule))
    return trainer


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_ten_eager_steps_have_the_bits_of_a_plain_loop(rig, num_devices):
    trainer = eager(rig, dawdling(num_devices))
    losses, weights = rig.plain(10)
    assert trainer.train(10) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("schedule", [{}, {"rounds": 2}, {"replicas": (1, 2, 2)}], ids=str)
def test_eager_steps_have_the_bits_of_committed_ones(rig, schedule, staleness):
    states = []
    for kind in (eager, rig.trainer):
        trainer = eager(rig, dawdling(2), schedule=schedule, staleness=staleness, microbatches=4)
        if kind is not eager:
            trainer.is_eager = False
            trainer.use_schedule(**schedule)
        trainer.train(4)
        states.append(trainer.state())
    assert rig.same_bits(*states) == []


@pytest.mark.parametrize(("num_devices", "staleness"), [(1, 0), (2, 0), (3, 1)])
def test_eager_steps_on_fake_devices_have_no_race(rig, num_devices, staleness):
    trainer = eager(
        rig,
        rig.fakes(num_devices, watch=True),
        schedule={"rounds": 2, "chunk_bytes": 256},
        staleness=staleness,
        microbatches=4,
    )
    trainer.train(4)
    trainer.pipe.synchronize()


def test_layers_are_updated_as_their_gradients_come_last_layer_first(rig):
    trainer = eager(rig, "cpu*2")
    trainer.train(3)
    trainer.pipe.synchronize()
    spans = trainer.pipe.timeline.steps[-1].spans
    order = [
        s.action.index for s in sorted(spans, key=lambda s: s.start) if s.action.op is Op.UPDATE
    ]
    assert order == sorted(order, reverse=True)
    # When it runs is a matter of luck; what it waits for is not: never for what comes down last.
    schedule = trainer.pipe._chain._last.program.schedule
    first = next(action for action in schedule.streams["host"] if action.op is Op.UPDATE)
    last = max(action.index for _, action in schedule.actions() if action.op is Op.DOWNLOAD)
    assert all(wait.index < last for wait in schedule.waits[first])


def test_the_norm_is_known_at_the_end_and_nothing_is_skipped(rig):
    trainer, committed = eager(rig, "cpu*2"), rig.trainer("cpu*2")
    for one in (trainer, committed):
        one.call()
    norm, expected = trainer.step(), committed.step()
    assert torch.equal(norm.grad_norm, expected.grad_norm)
    assert not norm.skipped


def test_a_step_that_is_not_eager_after_an_eager_call_commits_whole(rig):
    trainer = eager(rig, dawdling(2), schedule={"rounds": 2}, microbatches=4)
    other = rig.trainer(dawdling(2), microbatches=4)
    other.use_schedule(rounds=2)
    for step in range(4):
        for one in (trainer, other):
            one.call(step)
            one.clip = 0.01 if step in (1, 2) else None
            one.is_eager = one is trainer and step in (0, 3)
        norms = [one.step().grad_norm for one in (trainer, other)]
        assert torch.equal(*norms)
    assert rig.same_bits(trainer.state(), other.state()) == []


def test_calls_that_add_up_are_updated_eagerly_too(rig):
    trainer, other = eager(rig, dawdling(2)), rig.trainer(dawdling(2))
    for step in range(3):
        for one in (trainer, other):
            one.call(2 * step)
            one.call(2 * step + 1)
            one.step()
    assert rig.same_bits(trainer.state(), other.state()) == []


# ---- what can go wrong


class Signalling(Update):
    """Says when its first layer is updated."""

    def __init__(self, *args, ready, **options):
        super().__init__(*args, **options)
        self.ready = ready

    def update(self, layer, order):
        super().update(layer, order)
        self.ready.set()


def test_a_failure_after_the_first_update_says_that_the_weights_are_mixed(rig, monkeypatch):
    ready = threading.Event()
    trainer = eager(rig, "cpu*2")
    trainer.train(2)
    trainer.pipe.synchronize()
    trainer.pipe._engine.last_checkpoint = "runs/one/step-2"
    issue = trainer.pipe._engine._issuer
    execute = issue._execute

    def failing(run, worker, action):
        if action.op is Op.BACKWARD and run.program.schedule.visits[action.index].layers.start == 0:
            assert ready.wait(10)
            raise ZeroDivisionError("late")
        return execute(run, worker, action)

    monkeypatch.setattr(issue, "_execute", failing)
    trainer.call()
    update = Signalling(
        trainer.pipe._layers,
        HostOptimizer(trainer.optimizer, trainer.pipe._layers).begin(),
        max_norm=None,
        publish=True,
        is_eager=True,
        ready=ready,
    )
    trainer.pipe._chain.step(update, is_async=False)
    with pytest.raises(StepError, match="late") as caught:
        trainer.pipe.synchronize()
    assert "the weights are mixed" in str(caught.value)
    assert "load the last checkpoint: runs/one/step-2" in str(caught.value)


def test_a_failure_before_the_first_update_changes_nothing(rig):
    trainer = eager(rig, "cpu*2")
    trainer.train(2)
    before = trainer.state()

    def fails(outputs, labels):
        raise ZeroDivisionError("in the loss")

    trainer.loss_fn = fails
    with pytest.raises(StepError, match="in the loss") as caught:
        trainer.call()
    assert "mixed" not in str(caught.value)
    assert rig.same_bits(trainer.state(), before) == []
    trainer.loss_fn = mse_loss
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


def test_a_whole_step_after_an_eager_call_that_fails_is_finished_or_nothing_happened(rig):
    trainer = eager(rig, "cpu*2")
    trainer.train(2)
    trainer.is_eager = False
    trainer.call()
    update_, names = trainer.optimizer.update_, []

    def fails_once(parameter, *args, **more):
        names.append(parameter)
        if len(names) == 3:
            raise OSError("sabotage")
        update_(parameter, *args, **more)

    trainer.optimizer.update_ = fails_once
    with pytest.raises(StepError, match="its remaining updates were made after all"):
        trainer.step()
    trainer.done += 1
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(4)[1]) == []


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"max_norm": 1.0}, "cannot clip their norm: max_grad_norm=1.0"),
        ({"scaler": GradScaler()}, "cannot skip a step that overflows"),
        ({"is_layered": False}, "updates layer by layer"),
    ],
)
def test_what_needs_all_gradients_is_refused(asked, text):
    given = {"max_norm": None, "is_layered": True, **asked}
    with pytest.raises(ConfigError, match=text) as caught:
        refuse_eager(**given)
    assert "hint: leave out commit" in str(caught.value)


def test_a_scaler_that_is_off_is_not_refused():
    refuse_eager(max_norm=None, is_layered=True, scaler=GradScaler(enabled=False))


def test_real_layers_train_eagerly_on_an_emulated_machine(rig):
    from roundpipe.plan.machine import Card, Host, Link, Machine

    machine = Machine(
        cards=(Card(name="card", memory_bytes=1 << 34, flops={}, bandwidth=1e12),) * 2,
        links=(Link(up=25e9, down=25e9, duplex=0.52),) * 2,
        host=Host(memory_bytes=1 << 40, bandwidth=150e9),
    )
    trainer = eager(rig, emulate(machine, time_scale=0.0))
    losses, weights = rig.plain(3)
    assert trainer.train(3) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []
