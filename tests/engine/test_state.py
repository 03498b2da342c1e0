"""Changing buffers and kept choices: no race, and every failure leaves the last step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.config import ModelExecutePlan
from roundpipe.engine.recompute import doing_recompute
from roundpipe.engine.state import BufferState
from roundpipe.errors import ModelError, StepError
from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.store.layer import HostLayer

WIDTH = 8
PLAN = ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(2, 3), range(2)])


class Chooses(nn.Module):
    """The two largest of each row, which a recompute alone would not find again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x)
        order = -y if doing_recompute() else y
        chosen = order.topk(2).indices
        return x + torch.zeros_like(x).scatter(1, chosen, y.gather(1, chosen).tanh())


class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        before = self.average.clone()
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + torch.tanh(self.linear(x - before))


def model(seed=0):
    torch.manual_seed(seed)
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return nn.Sequential(norm, Chooses(), Averages(), nn.Linear(WIDTH, WIDTH)).train()


def trained_plainly(rig, steps):
    plain = rig.Plain(model=model(), microbatches=2)
    losses = []
    for step in range(steps):
        losses.append(plain.call(step))
        plain.step()
    return losses, plain.newest.state_dict()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_steps_on_fake_devices_have_no_race(rig, num_devices, staleness):
    trainer = rig.trainer(
        rig.fakes(num_devices, watch=True),
        model=model(),
        plan=PLAN,
        microbatches=2,
        staleness=staleness,
    )
    losses = trainer.train(3)
    if not staleness:
        expected, weights = trained_plainly(rig, 3)
        assert losses == expected
        assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


class Saboteur:
    def __init__(self):
        self.action = None

    def __call__(self, label):
        if self.action is None or label != self.action:
            return None
        self.action = None
        return OSError("sabotage")


def test_whatever_fails_buffers_are_those_of_the_last_step_and_the_next_is_right(rig):
    fail = Saboteur()
    trainer = rig.trainer(rig.fakes(2, fail=fail), model=model(), plan=PLAN, microbatches=2)
    trainer.train(1)
    losses, weights = trained_plainly(rig, 2)
    kept = {name: value.clone() for name, value in trainer.pipe.state_dict().items()}
    schedule = trainer.pipe._chain._last.program.schedule
    failing = [
        action
        for _, action in schedule.actions()
        if action.op in COMPUTE or action.op in (Op.ACTIVATION_IN, Op.ACTIVATION_OUT, Op.NORM)
    ]
    assert len(failing) > 20

    def one_step():
        trainer.call(1)
        trainer.step()
        trainer.pipe.synchronize()

    for action in failing:
        fail.action = action
        with pytest.raises(StepError, match="sabotage"):
            one_step()
        trainer.done = 1
        assert rig.same_bits(trainer.pipe.state_dict(), kept) == []
        assert all(not m.leaving_kept and not m.arrived_kept for m in trainer.pipe._engine.models)
    assert trainer.call(1) == losses[1]
    trainer.step()
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


def layer(shape=(2,)):
    return HostLayer(0, "norm", {"mean": torch.zeros(shape)}, trainable=frozenset())


def test_what_calls_leave_stays_with_their_step_and_is_taken_back_without():
    host = layer()
    state = BufferState([host])
    state.found(0, ["mean"])
    for value in (1.0, 2.0):
        state.leave(0, {"mean": torch.full((2,), value)})
        state.write()
        assert host.tensors["mean"].tolist() == [value, value]
    state.stepped()
    state.write()  # nothing is under way: the step has committed
    state.leave(0, {"mean": torch.full((2,), 3.0)})
    state.write()
    state.leave(0, {"mean": torch.full((2,), 4.0)})
    state.take_back()
    assert host.tensors["mean"].tolist() == [2.0, 2.0]
    state.write()
    assert host.tensors["mean"].tolist() == [2.0, 2.0]


def test_a_buffer_that_grows_is_refused_by_name():
    state = BufferState([layer()])
    state.found(0, ["mean"])
    with pytest.raises(ModelError, match=r"another shape .*: mean: \(2,\) .* -> \(3,\)"):
        state.leave(0, {"mean": torch.zeros(3)})


def test_calls_are_in_order_while_a_norm_is_in_training_or_once_a_buffer_changed():
    norm = nn.BatchNorm1d(2)
    state = BufferState([layer()], [norm])
    assert state.is_in_order
    norm.eval()
    assert not state.is_in_order
    state.found(0, ["mean"])
    assert state.is_in_order
