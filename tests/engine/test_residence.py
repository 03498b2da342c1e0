"""What generation keeps on a device, in which order it comes up, and that nothing is left."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tests.engine.generating_cases import NEW, block_bytes, made, prompts, train, uploaded, within
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe import RoundPipe
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.engine import generation
from roundpipe.engine.staging import Staging
from roundpipe.errors import DeviceError, RaceError

# What transformers says of tiny models, and of settings that a test gives on purpose.
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def llama():
    """A wrapped model, and a plain one of the same weights."""
    model = made("Llama")
    plain = copy.deepcopy(model).eval()
    with RoundPipe(model.train(), devices="cpu*3") as pipe:
        yield pipe, plain


def test_of_the_blocks_as_many_stay_as_there_is_room_for(llama):
    pipe, plain = llama
    given = {**prompts(), **NEW, "do_sample": False}
    within(pipe, None, **given)
    block = block_bytes(pipe) // 4
    outside = uploaded(pipe) - 4 * block
    fixed = outside + generation.work_bytes(plain, (), given)
    moved = []
    for blocks in (4, 3, 2):
        before = uploaded(pipe)
        within(pipe, fixed + blocks * block, **given)
        moved.append((uploaded(pipe) - before - outside) / block)
    # Eight forwards. With room for three one stays, two are in slots, and three go through these:
    # the last of them was brought up for a token that was not asked for.
    assert moved == [4, 1 + 3 * 8 + 1, 4 * 8 + 1]


def test_the_next_block_is_on_its_way_before_one_computes():
    log = []
    model = made("Llama")
    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: log.append(("run", index)))
    with RoundPipe(model, devices=[Logging(log)]) as pipe:
        log.clear()  # of the trial run
        within(pipe, 0, **prompts(), max_new_tokens=2, min_new_tokens=2)
    order = [0, 1, 2, 3, 0, 1, 2, 3]
    ups = [("up", f"model.layers.{index}") for index in [*order[1:], 0]]
    runs = [("run", index) for index in order]
    pairs = [event for pair in zip(ups, runs, strict=True) for event in pair]
    assert log == [("up", "outside the blocks"), ("up", "model.layers.0"), *pairs]


class Logging(FakeDevice):
    """Says what goes up, in the order in which it is put on the stream."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def launch(self, stream, work, **more):
        if stream == "weights":
            self.log.append(("up", more["label"]))
        return super().launch(stream, work, **more)


@pytest.mark.parametrize("forgotten", [None, "weights", "compute"])
def test_uploads_and_computing_wait_for_each_other(forgotten, monkeypatch):
    wait = FakeDevice.wait

    def forgetful(self, stream, event):
        if stream != forgotten:
            wait(self, stream, event)

    monkeypatch.setattr(FakeDevice, "wait", forgetful)
    with RoundPipe(made("Llama"), devices=[FakeDevice()]) as pipe:
        if forgotten is None:
            found = within(pipe, 0, **prompts(), do_sample=False, **NEW)
            assert torch.equal(found, made("Llama").generate(**prompts(), do_sample=False, **NEW))
        else:
            with pytest.raises(RaceError):
                within(pipe, 0, **prompts(), do_sample=False, **NEW)


def test_late_copies_into_slots_that_are_nan_are_waited_for():
    device = CpuDevice(max_delay_seconds=0.003, poison_released=True)
    with RoundPipe(made("Llama"), devices=[device]) as pipe:
        found = within(pipe, 0, **prompts(), do_sample=False, **NEW)
        assert torch.equal(found, made("Llama").generate(**prompts(), do_sample=False, **NEW))


@pytest.mark.parametrize(("error", "room"), [(KeyboardInterrupt, 0), (ValueError, None)])
def test_an_interrupted_generation_leaves_everything_as_it_was(llama, error, room):
    pipe, plain = llama
    before = [device.allocated_bytes for device in pipe._pool.devices]
    train(pipe, 0)
    gradients = {name: value.clone() for name, value in pipe.gradients().items()}

    def stop(ids, _scores, **_):
        if ids.shape[1] == 10:
            raise error("here")
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    with pytest.raises(error, match="here"):
        within(pipe, room, **prompts(), stopping_criteria=[stop], **NEW)
    after = pipe.gradients()
    assert all(torch.equal(after[name], value) for name, value in gradients.items())
    pipe.zero_grad()
    found = pipe.generate(**prompts(), do_sample=False, **NEW)
    assert torch.equal(found, plain.generate(**prompts(), do_sample=False, **NEW))
    held = [device.allocated_bytes for device in pipe._pool.devices]
    assert held[0] in (0, held[1])  # the arenas of training, unless their room was needed
    assert before[0] == 0 or held[1:] == before[1:]


def test_an_upload_that_fails_is_raised_and_the_next_one_works(llama, monkeypatch):
    pipe, plain = llama
    up, count = Staging.up, [0]

    def failing(self, target, source):
        count[0] += 1
        if count[0] == 12:
            raise OSError("the file is gone")
        up(self, target, source)

    monkeypatch.setattr(Staging, "up", failing)
    with pytest.raises(OSError, match="the file is gone"):
        within(pipe, 0, **prompts(), do_sample=False, **NEW)
    monkeypatch.undo()
    found = within(pipe, 0, **prompts(), do_sample=False, **NEW)
    assert torch.equal(found, plain.generate(**prompts(), do_sample=False, **NEW))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_no_memory_is_held_by_what_refers_to_itself():
    from peft import LoraConfig, get_peft_model

    taken = []

    class Taking(CpuDevice):
        def allocate(self, num_bytes):
            buffer = super().allocate(num_bytes)
            taken.append(StorageWeakRef(buffer.untyped_storage()))
            return buffer

    adapted = get_peft_model(made("Llama"), LoraConfig(target_modules=["q_proj"]))
    with RoundPipe(adapted, devices=[Taking()]) as pipe:
        gc.disable()
        try:
            for room in (None, 0):
                within(pipe, room, **prompts(), **NEW)
            assert len(taken) == (1 + 4) + (1 + 2)
            assert all(reference.expired() for reference in taken)
        finally:
            gc.enable()


def test_training_gives_up_its_memory_where_generation_needs_the_room(llama):
    pipe, plain = llama
    train(pipe, 0)
    pipe.zero_grad()
    device = pipe._pool.devices[0]
    arenas = device.allocated_bytes
    assert arenas
    whole = sum(layer.slot_layout.num_bytes for layer in pipe._layers)
    work = generation.work_bytes(plain, (), {**prompts(), **NEW})
    found = within(pipe, whole + work + arenas, **prompts(), do_sample=False, **NEW)
    assert device.allocated_bytes == arenas
    tight = within(pipe, whole + work, **prompts(), do_sample=False, **NEW)
    assert device.allocated_bytes == 0
    assert torch.equal(found, tight)
    train(pipe, 0)
    pipe.zero_grad()
    assert device.allocated_bytes == arenas


def test_a_device_too_small_for_two_blocks_says_so_and_gives_all_back():
    device = CpuDevice(capacity_bytes=50_000)
    with RoundPipe(made("Llama"), devices=[device]) as pipe:
        with pytest.raises(DeviceError, match=r"does not fit cpu: [\s\S]*hint: fewer sequences"):
            pipe.generate(**prompts(), **NEW)
        assert device.allocated_bytes == 0
