"""Every single action fails in turn: the right error, the last committed state, and on it goes."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe.config import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import StepError
from roundpipe.optim import AdamW
from roundpipe.plan.actions import COMPUTE, OF_LAYERS, Op

SMALL = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])
SECONDS = 2.0  # within which a failure must reach the caller


class Saboteur:
    """Lets one action fail, once: what a fake device asks about every work."""

    def __init__(self, error=OSError):
        self.action, self.error = None, error

    def __call__(self, label):
        if self.action is None or label != self.action:
            return None
        self.action = None
        return self.error("sabotage")


def small(rig, devices, **options):
    trainer = rig.trainer(devices, model=rig.chain(3), microbatches=2, plan=SMALL, **options)
    trainer.use_schedule(rounds=2, chunk_bytes=256)
    return trainer


def one_step(trainer, step):
    loss = trainer.call(step)
    trainer.step()
    trainer.pipe.synchronize()
    return loss


def schedule_of(trainer):
    return trainer.lowered(trainer.pipe._chain._kind, 0, rounds=2, chunk_bytes=256)[-1]


def names_itself(text, action):
    """Whether an error says where: action, layers, and stage, microbatch, device if it has them."""
    wanted = [f"{action} (", "layer"]
    if action.op in OF_LAYERS or action.op is Op.MERGE:
        wanted.append("on host")
    else:
        wanted += ["stage", "on device ", "(fake"]
    if action.op in COMPUTE:
        wanted.append(f"microbatch {action.microbatch}")
    return all(word in text for word in wanted)


def nothing_in_flight(trainer):
    return not any(
        held
        for model in trainer.pipe._engine.models
        for held in (
            model.kept, model.kept_gradients, model.arrived, model.arrived_gradients,
            model.leaving, model.leaving_gradients, model.graphs,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_devices", "staleness", "error"),
    [(1, 0, OSError), (2, 0, torch.OutOfMemoryError), (2, 1, OSError)],
)
def test_each_action_may_fail(rig, num_devices, staleness, error):
    """A step of which an action failed did not happen, or did where it was committed before.

    At staleness 1 the step after a failure reads the newest weights, as a first step does.
    """
    saboteur = Saboteur(error)
    trainer = small(rig, rig.fakes(num_devices, fail=saboteur), staleness=staleness)
    loop = rig.Plain(model=rig.chain(3), microbatches=2, staleness=staleness)
    for step in range(2):  # makes all memory there will be, and all threads
        one_step(trainer, step)
        loop.call(step)
        loop.step()
    memory, threads = trainer.allocated_bytes(), threading.active_count()
    order = schedule_of(trainer).order
    updates = [action for action in order if action.op is Op.UPDATE]
    for step, action in enumerate(order, start=2):
        saboteur.action = action
        begin = time.monotonic()
        with pytest.raises(StepError) as caught:
            one_step(trainer, step)
        assert time.monotonic() - begin < SECONDS
        assert type(caught.value.__cause__) is error
        assert names_itself(str(caught.value), action), str(caught.value)
        committed = action in updates[1:]
        assert ("remaining updates were made after all" in str(caught.value)) == committed
        if committed:
            loop.call(step)
            loop.step()
        loop.refresh()
        assert rig.same_bits(trainer.state(), loop.state()) == [], action
        assert nothing_in_flight(trainer)
        assert trainer.allocated_bytes() == memory
        assert one_step(trainer, 1000 + step) == loop.call(1000 + step), action
        loop.step()
        assert rig.same_bits(trainer.state(), loop.state()) == [], action
        assert threading.active_count() == threads


class Trap:
    """Raises where it is stepped on: the n-th time, with or without gradient. Shells share it."""

    def __init__(self):
        self.grad, self.left = None, 0

    def __deepcopy__(self, _):
        return self

    def arm(self, *, grad, left=1):
        self.grad, self.left = grad, left

    def __call__(self):
        if torch.is_grad_enabled() == self.grad:
            self.left -= 1
            if self.left == 0:
                self.grad = None
                raise ZeroDivisionError("stepped on")


class Trapped(nn.Module):
    def __init__(self, block, trap):
        super().__init__()
        self.block, self.trap = block, trap

    def forward(self, x):
        self.trap()
        return self.block(x)


def trapped(rig, trap):
    blocks = rig.chain(3)
    return nn.Sequential(Trapped(blocks[0], trap), *blocks[1:])


@pytest.fixture
def trap():
    return Trap()


@pytest.mark.parametrize(("grad", "what"), [(False, "F0.1 (forward"), (True, "R4.1 (recompute")])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_layer_that_raises_names_its_place_and_the_step_is_dropped(
    rig, trap, num_devices, grad, what
):
    trainer = rig.trainer(
        ["cpu"] * num_devices, model=trapped(rig, trap), microbatches=2, plan=SMALL
    )
    loop = rig.Plain(model=trapped(rig, Trap()), microbatches=2)
    assert trainer.train(2) == [loop.call(0), (loop.step(), loop.call(1), loop.step())[1]]
    trainer.pipe.synchronize()
    threads = threading.active_count()
    trap.arm(grad=grad, left=2)
    with pytest.raises(StepError) as caught:
        one_step(trainer, 2)
    assert f"step 2: {what}, stage" in str(caught.value)
    assert re.search(r"layer 0, microbatch 1\) on device \d \(cpu", str(caught.value))
    assert str(caught.value).endswith("failed: ZeroDivisionError: stepped on")
    assert type(caught.value.__cause__) is ZeroDivisionError
    assert caught.value.__cause__.__traceback__ is not None
    assert threading.active_count() == threads
    assert rig.same_bits(trainer.state(), loop.state()) == []
    assert one_step(trainer, 3) == loop.call(3)
    loop.step()
    assert rig.same_bits(trainer.state(), loop.state()) == []


def test_a_loss_function_that_raises_fails_the_call_itself(rig):
    bad = []

    def loss_fn(outputs, labels):
        if bad and len(bad) == 2:
            bad.clear()
            raise KeyError("label 7")
        bad.append(1) if bad else None
        return mse_loss(outputs, labels)

    trainer = rig.trainer(["cpu", "cpu"], loss_fn=loss_fn)
    trainer.train(2)
    before = trainer.state()
    bad.append(1)
    with pytest.raises(StepError, match=r"step 2: X3\.1 .*microbatch 1.*KeyError: 'label 7'"):
        trainer.call()
    assert rig.same_bits(trainer.state(), before) == []
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


def test_a_failure_behind_the_losses_is_raised_by_the_next_call_and_by_the_result(rig):
    saboteur = Saboteur()
    trainer = rig.trainer(rig.fakes(2, fail=saboteur))
    trainer.train(2)
    trainer.pipe.synchronize()
    saboteur.action = next(action for action in schedule_of(trainer).order if action.op is Op.NORM)
    trainer.call()
    result = trainer.step()
    with pytest.raises(StepError, match="sabotage"):
        result.grad_norm  # noqa: B018 - reading it waits
    with pytest.raises(StepError, match=r"N\d \(gradient norm of layer \d\) on host failed"):
        trainer.call()
    with pytest.raises(StepError, match="sabotage"):
        result.skipped  # noqa: B018 - a second time too
    trainer.done = 2
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


@pytest.mark.parametrize("what", [Op.NORM, Op.UPDATE])
def test_an_update_may_fail_that_began_long_after_its_gradients_were_there(rig, what):
    saboteur = Saboteur()
    trainer = rig.trainer(rig.fakes(2, fail=saboteur))
    trainer.train(1)
    trainer.call()
    trainer.pipe.synchronize()
    order = schedule_of(trainer).order
    saboteur.action = next(action for action in order if action.op is what)
    result = trainer.step()
    with pytest.raises(StepError, match="sabotage"):
        trainer.pipe.synchronize()
    with pytest.raises(StepError, match="sabotage"):
        result.grad_norm  # noqa: B018 - reading it waits
    trainer.done = 1
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(2)[1]) == []


def test_a_committed_step_happened_whatever_fails_later_and_whoever_waited_before(rig):
    saboteur = Saboteur()
    trainer = rig.trainer(rig.fakes(2, fail=saboteur))
    trainer.train(1)
    trainer.call()
    trainer.pipe.synchronize()
    saboteur.action = schedule_of(trainer).order[-1]
    assert saboteur.action.op is Op.UPDATE
    result = trainer.step()
    with pytest.raises(StepError, match="its remaining updates were made after all"):
        trainer.pipe.synchronize()
    assert result.grad_norm > 0
    assert not result.skipped
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


def test_a_failed_call_takes_the_calls_before_it_in_its_step_with_it(rig):
    bad = []

    def loss_fn(outputs, labels):
        if bad:
            raise ValueError(bad.pop())
        return mse_loss(outputs, labels)

    trainer = rig.trainer(["cpu", "cpu"], loss_fn=loss_fn)
    trainer.call(50)
    bad.append("no")
    with pytest.raises(StepError, match="ValueError: no"):
        trainer.call(51)
    assert trainer.pipe.gradients() == {}
    with pytest.raises(ValueError, match="nothing to step with"):
        trainer.step()
    trainer.train(3)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


def test_a_failed_evaluation_takes_the_step_in_making_with_it(rig, trap):
    trainer = rig.trainer(["cpu", "cpu"], model=trapped(rig, trap), plan=SMALL)
    trainer.call(50)
    trainer.pipe.synchronize()
    trap.arm(grad=False)
    with torch.no_grad(), pytest.raises(StepError, match="stepped on"):
        trainer.pipe(rig.batch(0)[0])
    assert trainer.pipe.gradients() == {}
    trainer.train(2)
    expected = rig.plain(2, model=trapped(rig, Trap()))[1]
    assert rig.same_bits(trainer.pipe.state_dict(), expected) == []


class Moody(torch.optim.SGD):
    """Fails once, before it has changed anything."""

    def step(self, closure=None):
        if self.defaults.pop("angry", False):
            raise ArithmeticError("not today")
        return super().step(closure)


def test_an_optimizer_that_steps_as_a_whole_may_fail_and_says_that_weights_may_be_mixed(rig):
    trainer = rig.trainer(["cpu", "cpu"])
    trainer.optimizer = Moody(trainer.pipe.optim_parameters(), lr=0.1)
    trainer.train(2)
    before = trainer.state()
    trainer.optimizer.defaults["angry"] = True
    trainer.call()
    result = trainer.step()
    assert not result.skipped  # it had committed
    with pytest.raises(StepError, match="ArithmeticError: not today\nhint: the weights are mixed"):
        trainer.pipe.synchronize()
    assert rig.same_bits(trainer.state(), before) == []
    trainer.train(1)


@pytest.mark.parametrize("times", [1, 9])
def test_an_update_that_fails_midway_is_finished_or_the_weights_are_called_mixed(
    rig, monkeypatch, times
):
    trainer = rig.trainer(["cpu", "cpu"])
    trainer.train(2)
    trainer.pipe.synchronize()
    update, calls, failures = AdamW.update_, [], list(range(times))

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 3 and failures:
            failures.pop()
            raise MemoryError("moments")
        return update(self, *args, **kwargs)

    monkeypatch.setattr(AdamW, "update_", failing)
    with pytest.raises(StepError, match="MemoryError: moments") as caught:
        one_step(trainer, 2)
    monkeypatch.undo()
    if times == 1:
        assert "its remaining updates were made after all" in str(caught.value)
        assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []
    else:
        assert "the weights are mixed" in str(caught.value)
    one_step(trainer, 3)


def test_a_step_function_that_raises_leaves_no_gradient_behind(rig):
    trainer = rig.trainer(["cpu", "cpu"])
    trainer.train(2)
    before = trainer.state()
    trainer.call(50)

    def refuse():
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer.pipe.step(refuse)
    assert trainer.pipe.gradients() == {}
    assert rig.same_bits(trainer.state(), before) == []
    trainer.train(1)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(3)[1]) == []


def test_a_failure_of_one_model_does_not_touch_another_on_the_same_pool(rig, trap):
    with DevicePool("cpu*2") as pool:
        one = rig.trainer(None, pool=pool, model=trapped(rig, trap), microbatches=2, plan=SMALL)
        two = rig.trainer(None, pool=pool, staleness=1)
        for _ in range(2):
            two.train(1)
            trap.arm(grad=False)
            with pytest.raises(StepError, match="stepped on"):
                one.call()
        one.train(2)
        two.train(1)
        assert rig.same_bits(two.pipe.state_dict(), rig.plain(3, staleness=1)[1]) == []
        expected = rig.plain(2, model=trapped(rig, Trap()), microbatches=2)[1]
        assert rig.same_bits(one.pipe.state_dict(), expected) == []
        one.pipe.close()
        two.pipe.close()


def test_memory_that_cannot_be_had_fails_the_call_and_a_smaller_plan_works(rig):
    """Layers have 768 bytes each; a visit of all and the one after it do not fit into 4000."""
    devices = [CpuDevice(f"cpu:{index}", threads=1, capacity_bytes=4000) for index in range(2)]
    big = ModelExecutePlan([range(4)], [range(4, 5), range(4)])
    trainer = rig.trainer(devices, plan=big)
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory on cpu:\d: [\d,]+ bytes"):
        trainer.call()
    assert trainer.allocated_bytes() == [0, 0]
    assert trainer.pipe.gradients() == {}
    layers = [range(n, n + 1) for n in range(5)]
    trainer.config = RoundPipeRunConfig(
        num_microbatch=3, execute_plan=ModelExecutePlan(layers[:4], layers[::-1])
    )
    trainer.train(2)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(2)[1]) == []


def test_what_is_no_exception_of_ours_ends_the_call_as_itself(rig):
    def leave(_outputs, _labels):
        raise SystemExit(3)

    trainer = rig.trainer("cpu*2", loss_fn=leave)
    with pytest.raises(SystemExit):
        trainer.call()
    trainer.loss_fn = mse_loss
    trainer.train(2)
    assert rig.same_bits(trainer.pipe.state_dict(), rig.plain(2)[1]) == []
