"""Copies through locked blocks: right bytes under any delay, never more than there are blocks."""

from __future__ import annotations

import random

import pytest
import torch
from tests.engine.late_device import LateDevice, late_devices

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.engine import staging as module
from roundpipe.engine.passing import PassingBlocks
from roundpipe.engine.staging import Landed, Landing, Ring, Staging
from roundpipe.store import pages as pages_module
from roundpipe.store.pages import PAGE, HostPages


class Point:
    """An event that a test completes."""

    def __init__(self):
        self.done, self.waits = False, 0

    def is_complete(self):
        return self.done

    def wait(self):
        self.waits += 1
        self.done = True


def values(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )


@pytest.fixture
def small(monkeypatch):
    """Blocks of a page, and nothing locked beforehand."""
    monkeypatch.setattr(module, "BLOCK_BYTES", PAGE)
    monkeypatch.setattr(pages_module, "_KEPT", 0)


def staging_on(device, limit_blocks=2 * module.NUM_BLOCKS):
    pages = HostPages(device, limit_bytes=limit_blocks * PAGE)
    return Staging(device, pages, PassingBlocks(pages))


def test_a_ring_waits_for_the_last_use_of_the_block_it_gives():
    blocks = [torch.zeros(1), torch.zeros(1)]
    ring, uses = Ring(blocks), [Point(), Point(), Point()]
    for turn, use in enumerate(uses):
        assert ring.take() is blocks[turn % 2]
        ring.give(use)
    assert [use.waits for use in uses] == [1, 0, 0]
    assert ring.take() is blocks[1]
    assert [use.waits for use in uses] == [1, 1, 0]


def test_what_has_come_down_lands_once_and_whoever_waits_does_it():
    block, target, event = torch.ones(4), torch.zeros(4), Point()
    landing = Landing(event, block, target)
    landed = Landed(event, [landing])
    assert not landed.is_complete()
    landed.wait()
    assert (target.tolist(), event.done, landed.is_complete()) == ([1.0] * 4, True, True)
    block.fill_(2)
    landed.wait()
    assert target.tolist() == [1.0] * 4


@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_go_up_late_are_right_whatever_becomes_of_their_source(small, seed):
    device = LateDevice(seed=seed)
    staging, draw = staging_on(device), random.Random(seed)
    expected, targets = [], []
    for turn in range(12):
        source = values(draw.randint(1, 3 * PAGE), turn)
        expected.append(source.clone())
        targets.append(torch.zeros_like(source))
        device.launch(
            "weights", lambda up=(targets[-1], source): staging.up(*up), on_error=pytest.fail
        )
        source.fill_(0)  # it was read when `up` returned
    device.record("weights").wait()
    assert all(map(torch.equal, targets, expected))
    device.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_come_down_late_are_right_when_their_event_is_over(small, seed, dtype):
    device = LateDevice(seed=seed)
    host = CpuDevice("host", threads=1)
    staging, draw = staging_on(device), random.Random(seed)
    pairs, seen = [], []
    for turn in range(8):
        source = values(draw.randint(1, 2 * PAGE), turn).float()
        target = torch.full(source.shape, torch.nan, dtype=dtype)
        pairs.append((source, target))
        device.launch(
            "gradients", lambda down=(target, source): staging.down(*down), on_error=pytest.fail
        )
        event = staging.landed("gradients", device.record("gradients"))
        assert isinstance(event, Landed)
        if draw.random() < 0.5:  # the others land when their blocks are needed
            host.wait("host", event)
            host.launch("host", lambda t=target, s=source: seen.append(torch.equal(t.float(), s)))
    staging.land()
    host.record("host").wait()
    assert all(seen)
    assert all(torch.equal(target.float(), source) for source, target in pairs)
    host.close()
    device.close()


def test_there_are_never_more_copies_under_way_than_blocks(small, monkeypatch):
    device = LateDevice(max_delay_seconds=2e-3)
    staging, open_events, most = staging_on(device), [], []
    record = device._cpu.record

    def counting(stream):
        open_events.append(record(stream))
        most.append(sum(not event.is_complete() for event in open_events))
        return open_events[-1]

    monkeypatch.setattr(device._cpu, "record", counting)
    source, target = values(30 * PAGE), torch.zeros(30 * PAGE, dtype=torch.uint8)
    device.launch("weights", lambda: staging.up(target, source), on_error=pytest.fail)
    device.launch("gradients", lambda: staging.down(source, target), on_error=pytest.fail)
    staging.land()
    assert len(open_events) == 60
    assert max(most) <= 2 * module.NUM_BLOCKS
    device.close()


def test_an_event_is_over_when_what_came_down_before_it_has_landed_too(small):
    staging = staging_on(FakeDevice(pinned_bytes=1 << 30))
    target, point = torch.zeros(PAGE, dtype=torch.uint8), Point()
    staging.down(target, values(PAGE))
    assert staging.landed("compute", point) is point
    staging.landed("gradients", Point())
    staging.landed("gradients", Point()).wait()
    assert torch.equal(target, values(PAGE))
    assert not staging.landed("gradients", point).is_complete()
    assert staging.landed("gradients", point) is point


def test_locked_memory_goes_straight_and_takes_no_block(small):
    device = FakeDevice(pinned_bytes=4 * PAGE)
    pages = HostPages(device)
    staging = Staging(device, pages, PassingBlocks(pages))
    locked = pages.allocate(4 * PAGE).fill_(3)
    target = torch.zeros(4 * PAGE, dtype=torch.uint8)
    staging.up(target, locked)
    staging.down(locked, target)
    assert target.tolist() == [3] * 4 * PAGE
    event = Point()
    assert staging.landed("gradients", event) is event
    assert pages.locked_bytes == 4 * PAGE


def test_without_room_for_blocks_copies_are_made_as_they_are(small):
    device = FakeDevice(pinned_bytes=PAGE)
    staging = staging_on(device)
    source, target = values(3 * PAGE), torch.zeros(3 * PAGE, dtype=torch.uint8)
    staging.up(target, source)
    assert torch.equal(target, source)
    staging.down(source, target)
    assert staging.landed("gradients", event := Point()) is event


class Noting(FakeDevice):
    """Notes which stream was told to wait for what."""

    def __init__(self):
        super().__init__(pinned_bytes=1 << 30)
        self.waited = []

    def wait(self, stream, event):
        self.waited.append((stream, event))


@pytest.mark.parametrize("way", ["down", "up"])
def test_who_writes_a_block_that_is_still_read_waits_for_that(small, way):
    device = Noting()
    staging = staging_on(device, 1 << 20)
    reads = []
    for _ in range(8):  # none is ever over
        kept, _ = staging._passing.like(torch.zeros(PAGE, dtype=torch.uint8))
        reads.append(Point())
        staging._passing.used(kept, reads[-1])
        del kept
    oldest = next(event for berth in staging._passing._free for event in berth.events)
    bring = {"down": staging.bring_down, "up": staging.bring_up}[way]
    assert torch.equal(bring(values(PAGE), []), values(PAGE))
    # What the host's thread writes it waits for itself.
    assert device.waited == ([("activations_down", oldest)] if way == "down" else [])
    assert [event for event in reads if event.done] == ([oldest] if way == "up" else [])


def test_trees_travel_with_all_that_is_in_them(small):
    staging = staging_on(FakeDevice(pinned_bytes=1 << 30), 1 << 20)
    tree = {"a": [torch.arange(3.0), None], "b": (torch.zeros(0), "text", torch.tensor(5))}
    sizes = []
    for bring in (staging.bring_up, staging.bring_down):
        tree = bring(tree, sizes)
    assert tree["a"][0].tolist() == [0.0, 1.0, 2.0]
    assert (tree["a"][1], tree["b"][1], tree["b"][2].item()) == (None, "text", 5)
    assert tree["b"][0].shape == (0,)
    assert sizes == [12, 0, 8] * 2


# ---- whole steps


def late_trainer(rig, count, *, pinned_bytes=1 << 40, **options):
    devices = late_devices(count, pinned_bytes=pinned_bytes)
    trainer = rig.trainer(devices, **options)
    for device in devices:
        device.passing = trainer.pipe._engine.models[0].staging._passing
    return trainer


@pytest.fixture
def segments_unlocked(small, monkeypatch):
    """Weights, gradients and partial sums go through blocks."""
    adopt = HostPages.adopt

    def only_urgent(self, block, *, urgent=False):
        return urgent and adopt(self, block, urgent=True)

    monkeypatch.setattr(HostPages, "adopt", only_urgent)


@pytest.mark.parametrize("pinned_pages", [1 << 20, 20, 0])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_with_late_copies_have_plain_bits_whatever_is_locked(
    rig, small, num_devices, pinned_pages
):
    trainer = late_trainer(rig, num_devices, pinned_bytes=pinned_pages * PAGE)
    losses, weights = rig.plain(4)
    assert trainer.train(4) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


@pytest.mark.parametrize("num_devices", [1, 2])
def test_steps_through_blocks_have_plain_bits(rig, segments_unlocked, num_devices):
    trainer = late_trainer(rig, num_devices)
    losses, weights = rig.plain(4)
    assert trainer.train(4) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []
    for model in trainer.pipe._engine.models:
        assert all(model.staging._rings.values())


@pytest.mark.parametrize("staleness", [0, 1])
def test_rounds_with_late_copies_have_the_bits_of_cpu_devices(rig, segments_unlocked, staleness):
    options = {"staleness": staleness, "microbatches": 6}
    trainer = late_trainer(rig, 2, **options)
    same = rig.trainer(["cpu"] * 2, **options)
    for each in (trainer, same):
        each.use_schedule(rounds=2, chunk_bytes=256)
    assert trainer.train(4) == same.train(4)
    assert rig.same_bits(trainer.state(), same.state()) == []


def test_gradients_have_landed_when_a_caller_looks_at_them(rig, segments_unlocked):
    trainer = late_trainer(rig, 2)
    same = rig.trainer(["cpu"] * 2)
    for each in (trainer, same):
        each.call()
    ours, theirs = trainer.pipe.gradients(), same.pipe.gradients()
    assert ours
    assert rig.same_bits(ours, theirs) == []


def test_nothing_of_a_failed_step_is_seen_by_the_next(rig, segments_unlocked):
    bad = []

    def loss_fn(outputs, labels):
        if bad and not bad.pop():
            raise ValueError("no")
        return torch.nn.functional.mse_loss(outputs, labels)

    trainer = late_trainer(rig, 2, loss_fn=loss_fn)
    losses, weights = rig.plain(4)
    assert trainer.train(2) == losses[:2]
    bad.extend([False, True])
    with pytest.raises(Exception, match="ValueError: no"):
        trainer.call(77)
    bad.clear()
    assert trainer.train(2) == losses[2:]
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


def test_what_passes_takes_no_more_memory_after_the_second_step(rig, small):
    trainer = rig.trainer(
        [FakeDevice("a", pinned_bytes=1 << 40), FakeDevice("b", pinned_bytes=1 << 40)]
    )
    passing = trainer.pipe._engine.models[0].staging._passing
    held = []
    for _ in range(12):
        trainer.train(1)
        trainer.pipe.synchronize()
        held.append(passing.num_bytes)
    assert held[1] > 0
    assert held[1:] == [held[1]] * 11


def test_closing_unlocks_what_was_locked(rig, small):
    devices = late_devices(2)
    trainer = rig.trainer(devices)
    trainer.train(2)
    assert devices[0].registrar.registered
    trainer.pipe.close()
    assert devices[0].registrar.registered == {}
