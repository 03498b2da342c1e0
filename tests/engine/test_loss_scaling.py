"""fp16 with a loss scale equals torch's own loop, steps that overflow included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.updates import LossScale, Update
from roundpipe.optim.scaler import GradScaler

STEPS = 9
SCALES = {"init_scale": 2.0**15, "growth_interval": 2}
LR = 1e-2


def loss_of(outputs, labels):
    return mse_loss(outputs.float(), labels)


def batch(rig, step):
    """The rig's, in fp16; the fourth one is too large for any scale at first."""
    inputs, labels = rig.batch(step)
    return inputs.half(), labels * (60.0 if step == 3 else 1.0)


class Loop:
    """torch's loop: fp16 weights, fp32 masters, a scaler; gradients of a step add up in fp32."""

    def __init__(self, rig, *, staleness=0, clip=None):
        self.rig, self.clip = rig, clip
        self.read = rig.chain().half()
        self.newest = copy.deepcopy(self.read) if staleness else self.read
        self.masters = [nn.Parameter(p.detach().float()) for p in self.read.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=LR, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", **SCALES)

    def step(self, step):
        sums = [None] * len(self.masters)
        parameters = list(self.read.parameters())
        total = torch.zeros(())
        for x, y in zip(*(t.split(2) for t in batch(self.rig, step)), strict=True):
            loss = loss_of(self.read(x), y)
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
            for at, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    grad, parameter.grad = parameter.grad.float(), None
                    sums[at] = grad if sums[at] is None else sums[at] + grad
        for master, grad in zip(self.masters, sums, strict=True):
            master.grad = None if grad is None else grad.half().float()
        self.scaler.unscale_(self.optimizer)
        norm = None
        if self.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        if self.read is not self.newest:
            self.read.load_state_dict(self.newest.state_dict())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for master, working in zip(self.masters, self.newest.parameters(), strict=True):
                working.copy_(master)
        return total.item(), norm


def trainer(rig, devices, **options):
    made = rig.trainer(
        devices, model=rig.chain().half(), loss_fn=loss_of, scaler=GradScaler(**SCALES), **options
    )
    made.optimizer = torch.optim.SGD(made.pipe.optim_parameters(), lr=LR, momentum=0.9)

    def call(step=None):
        inputs, labels = batch(rig, made.done if step is None else step)
        return made.pipe.forward_backward(
            (inputs,), label=labels, loss_fn=loss_of, run_config=made.config
        ).item()

    made.call = call
    return made


def dawdling(count):
    return [
        CpuDevice(f"cpu:{at}", threads=1, max_delay_seconds=2e-4, seed=at) for at in range(count)
    ]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fp16_training_equals_torchs_loop_bit_for_bit(rig, count, clip, staleness):
    ours = trainer(rig, dawdling(count), clip=clip, staleness=staleness)
    loop = Loop(rig, staleness=staleness, clip=clip)
    results, scales, skipped = [], [], []
    for step in range(STEPS):
        loss, norm = loop.step(step)
        assert ours.call() == loss
        results.append(ours.step())
        skipped.append(results[-1].skipped)
        scales.append(ours.scaler.get_scale())
        assert scales[-1] == loop.scaler.get_scale()
        if clip is not None and not skipped[-1]:
            assert torch.equal(results[-1].grad_norm, norm)
    ours.pipe.synchronize()
    masters = dict(ours.pipe.optim_named_parameters())
    for (name, master), expected in zip(masters.items(), loop.masters, strict=True):
        assert torch.equal(master, expected), name
    for ours_, theirs in zip(
        ours.pipe.state_dict().values(), loop.newest.state_dict().values(), strict=True
    ):
        assert torch.equal(ours_, theirs)
    assert any(skipped)
    assert not all(skipped)
    assert max(scales) > scales[0] or min(scales) < scales[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_waits_for_a_result_and_the_numbers_are_the_same(rig, staleness):
    ours = trainer(rig, dawdling(2), staleness=staleness)
    loop = Loop(rig, staleness=staleness)
    losses = [loop.step(step)[0] for step in range(STEPS)]
    assert ours.train(STEPS) == losses
    ours.pipe.synchronize()
    assert ours.scaler.state_dict() == loop.scaler.state_dict()
    for ours_, theirs in zip(ours.pipe.optim_parameters(), loop.masters, strict=True):
        assert torch.equal(ours_, theirs)


def test_a_step_that_overflows_changes_nothing_but_the_scale(rig):
    ours = trainer(rig, dawdling(2))
    ours.train(2)
    before, scale = ours.state(), ours.scaler.get_scale()
    ours.call(3)
    assert ours.step().skipped
    assert rig.same_bits(ours.state(), before) == []
    assert ours.scaler.get_scale() == scale / 2


def test_fp32_models_have_the_bits_of_no_scaling_where_the_scale_is_a_power_of_two(rig):
    ours = rig.trainer(dawdling(2), scaler=GradScaler(init_scale=2.0**10), clip=0.01)
    losses, weights = rig.plain(3, clip=0.01)
    assert ours.train(3) == losses
    for name, weight in ours.pipe.state_dict().items():  # 1 / scale and the clip are one factor
        assert torch.allclose(weight, weights[name], rtol=2e-7, atol=1e-9), name


def test_calls_of_one_step_share_a_scale(rig):
    ours = trainer(rig, dawdling(2))
    ours.scaler.update(512.0)
    ours.call(0)
    ours.call(1)
    result = ours.step()
    plain = rig.trainer(dawdling(2), model=rig.chain())
    plain.call(0)
    plain.call(1)
    assert torch.allclose(result.grad_norm, plain.step().grad_norm, rtol=2e-2)


def test_the_scale_is_read_once_the_step_before_has_committed():
    class Slow(Update):
        def __init__(self):
            super().__init__([], None, max_norm=None, publish=True)

    import threading

    scaler, update, read = GradScaler(init_scale=8.0), Slow(), []
    thread = threading.Thread(target=lambda: read.append(LossScale(scaler, update).read()))
    thread.start()
    assert read == []
    scaler.count(is_finite=False)
    update.known.set()
    thread.join()
    assert read == [4.0]


def test_a_function_in_an_optimizers_place_gets_unscaled_gradients(rig):
    trainer = rig.trainer("cpu", scaler=GradScaler(init_scale=256.0))
    plain = rig.trainer("cpu")
    seen = []
    for each in (trainer, plain):
        each.call(0)
        each.pipe.synchronize()
        masters = each.pipe.optim_parameters()

        def look(masters=masters):
            seen.append([None if m.grad is None else m.grad.clone() for m in masters])

        scaler = each.scaler
        Update.by_hand(each.pipe._layers, look, max_norm=None, scaler=scaler)
        each.pipe._chain.making.end()
    for ours, theirs in zip(*seen, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
