"""After the second step nothing grows: not what devices hold, not the tensors that are alive."""

from __future__ import annotations

import gc

import pytest
import torch

from roundpipe.config import ModelExecutePlan
from roundpipe.device.cpu import CpuDevice

STEPS = 50
SMALL = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])


def alive():
    gc.collect()
    return sum(1 for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def held(trainer):
    trainer.pipe.synchronize()
    devices = trainer.pipe._pool.devices
    return (
        [device.allocated_bytes for device in devices],
        [device.peak_bytes for device in devices],
        alive(),
    )


@pytest.mark.parametrize(
    ("count", "staleness", "how"),
    [(2, 1, {}), (3, 0, {"rounds": 2}), (1, 0, {"eager": True})],
    ids=str,
)
def test_nothing_grows_after_the_second_step(rig, count, staleness, how):
    devices = [CpuDevice(f"cpu:{at}", threads=1, poison_released=True) for at in range(count)]
    trainer = rig.trainer(
        devices,
        model=rig.chain(3),
        microbatches=2,
        plan=SMALL,
        staleness=staleness,
        eager=how.get("eager", False),
    )
    trainer.use_schedule(rounds=how.get("rounds", 1))
    trainer.train(12)  # every layer has been at every place it may have
    *memory, tensors = held(trainer)
    trainer.train(STEPS)
    *memory_after, tensors_after = held(trainer)
    assert memory_after == memory
    assert tensors_after <= tensors  # of other tests' that have ended meanwhile there are fewer


def test_a_tensor_that_a_loss_function_keeps_is_seen(rig):
    kept = []

    def keeps(outputs, labels):
        kept.append(outputs)
        return torch.nn.functional.mse_loss(outputs, labels)

    trainer = rig.trainer("cpu")
    trainer.train(2)
    before = held(trainer)
    trainer.loss_fn = keeps
    trainer.train(1)
    assert held(trainer)[-1] > before[-1]


def test_a_closed_wrapper_that_is_kept_holds_no_device_memory(rig):
    trainer = rig.trainer("cpu")
    trainer.train(2)
    arenas = [arena for m in trainer.pipe._engine.models for arena in (m.weights, m.sums)]
    places = {arena.buffer.untyped_storage().data_ptr() for arena in arenas}
    trainer.pipe.close()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    assert places.isdisjoint(each.untyped_storage().data_ptr() for each in tensors)
