"""Blocks of host memory, and which of them are page-locked."""

from __future__ import annotations

import gc
import itertools
import logging

import pytest
import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.device.host_memory import HostMemory, used_bytes
from roundpipe.errors import HostMemoryError, RoundPipeError
from roundpipe.store import pages as module
from roundpipe.store.pages import PAGE, Block, HostPages

ROOM = 1 << 40


@pytest.fixture(autouse=True)
def _keeps_nothing_beforehand(monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 0)


def test_a_block_begins_with_a_page_and_shares_none():
    sizes = [1, 255, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 1_000_000]
    blocks = [Block(size) for size in sizes]
    assert [block.tensor.numel() for block in blocks] == sizes
    assert all(block.address % PAGE == 0 for block in blocks)
    assert [block.whole_bytes // PAGE for block in blocks] == [1, 1, 1, 1, 2, 3, 245]
    spans = sorted((block.address, block.address + block.whole_bytes) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for block in blocks:
        block.tensor.fill_(1)


def test_a_block_without_bytes_is_an_empty_tensor():
    block = Block(0)
    assert (block.tensor.numel(), block.whole_bytes) == (0, 0)
    assert not HostPages(FakeDevice(pinned_bytes=ROOM)).adopt(block)


def test_the_memory_goes_back_to_the_system_when_the_last_view_has_gone():
    size = 64 << 20
    view = Block(size).tensor.fill_(1)[-5:].view(5, 1)
    gc.collect()
    full = used_bytes()
    assert view.tolist() == [[1]] * 5
    del view
    assert full - used_bytes() > 0.9 * size


def test_a_block_is_locked_in_whole_pages_and_unlocked_when_it_ends():
    device = FakeDevice(pinned_bytes=ROOM)
    pages = HostPages(device)
    block = Block(5 * PAGE + 1)
    assert pages.adopt(block)
    assert pages.adopt(block)  # once is enough
    assert device.registered == {block.address: 6 * PAGE}
    assert pages.locked_bytes == 6 * PAGE
    view = block.tensor[7:]
    assert pages.is_locked(view)
    del block
    assert device.registered
    del view
    assert device.registered == {}
    assert pages.locked_bytes == 0


def test_a_block_is_unlocked_before_its_memory_goes(monkeypatch):
    device = FakeDevice(pinned_bytes=ROOM)
    before, at_unlock, size = used_bytes(), [], 64 << 20
    unregister = device.unregister
    monkeypatch.setattr(
        device, "unregister", lambda at: (at_unlock.append(used_bytes()), unregister(at))
    )
    pages = HostPages(device)
    pages.allocate(size).fill_(1)
    assert at_unlock[0] - before > 0.9 * size
    assert used_bytes() - before < 0.1 * size


def test_nothing_is_locked_for_devices_that_gain_nothing_by_it():
    device = CpuDevice()
    pages = HostPages.for_devices([device, FakeDevice()])
    assert not pages.locks
    assert not pages.is_locked(pages.allocate(PAGE))
    pages.close()
    device.close()


def test_the_first_device_that_gains_does_it_for_all():
    gains = FakeDevice(pinned_bytes=ROOM)
    pages = HostPages.for_devices([FakeDevice(), gains, FakeDevice(pinned_bytes=ROOM)])
    kept = pages.allocate(PAGE)
    assert gains.registered == {kept.data_ptr(): PAGE}


def test_who_comes_first_is_locked_up_to_the_limit_and_the_rest_is_said_once(caplog):
    pages = HostPages(FakeDevice(pinned_bytes=ROOM), limit_bytes=10 * PAGE)
    blocks = [Block(size * PAGE) for size in (4, 5, 2, 1, 1)]
    with caplog.at_level(logging.WARNING):
        assert [pages.adopt(block) for block in blocks] == [True, True, False, True, False]
    (record,) = caplog.records
    assert f"{9 * PAGE:,} bytes so far: pinned_memory_limit is reached: {10 * PAGE:,}" in (
        record.message
    )
    assert "\nhint: " in record.message


def test_what_the_driver_refuses_is_not_asked_for_again(caplog):
    device = FakeDevice(pinned_bytes=6 * PAGE)
    asked, register = [], device.register
    device.register = lambda at, size: (asked.append(size // PAGE), register(at, size))
    pages = HostPages(device)
    blocks = [Block(size * PAGE) for size in (4, 3, 3, 5, 2, 1)]
    with caplog.at_level(logging.WARNING):
        assert [pages.adopt(block) for block in blocks] == [True, False, False, False, True, False]
    assert asked == [4, 3, 2, 1]
    assert len(caplog.records) == 1
    assert f"the driver refuses {3 * PAGE:,} bytes more: out of memory" in caplog.text


def test_a_limit_of_zero_locks_nothing_and_says_nothing(caplog):
    pages = HostPages(FakeDevice(pinned_bytes=ROOM), limit_bytes=0)
    assert not pages.adopt(Block(PAGE))
    assert not caplog.records


def test_a_little_is_locked_beforehand_for_what_comes_last_and_needs_it_most(monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 4 * PAGE)
    device = FakeDevice(pinned_bytes=10 * PAGE)
    pages = HostPages(device, limit_bytes=ROOM)
    weights = [Block(size * PAGE) for size in (5, 1, 1)]
    assert [pages.adopt(block) for block in weights] == [True, True, False]
    staging = [Block(size * PAGE) for size in (3, 1, 1)]
    assert [pages.adopt(block, urgent=True) for block in staging] == [True, True, False]


def test_closing_unlocks_all_and_the_memory_stays():
    device = FakeDevice(pinned_bytes=ROOM)
    pages = HostPages(device)
    tensor = pages.allocate(PAGE).fill_(3)
    pages.close()
    pages.close()
    assert device.registered == {}
    assert not pages.is_locked(tensor)
    assert bool((tensor == 3).all())
    assert not pages.adopt(Block(PAGE))


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 70])
def test_memory_that_is_not_there_is_an_error_of_ours(num_bytes):
    with pytest.raises(HostMemoryError, match=r"out of host memory: .+ bytes are needed, .+\nhint"):
        Block(num_bytes)
    assert issubclass(HostMemoryError, RoundPipeError)
    assert issubclass(HostMemoryError, MemoryError)


def test_what_would_not_fit_is_refused_before_the_machine_stands_still(monkeypatch):
    size = 1 << 27
    small = HostMemory(1 << 30, size - 1, 1 << 30, "a group")
    monkeypatch.setattr(module, "host_memory", lambda: small)
    with pytest.raises(HostMemoryError, match=r"134,217,728 bytes .+ 134,217,727 are free \(a gr"):
        Block(size)
    monkeypatch.setattr(
        module, "host_memory", lambda: HostMemory(1 << 30, size - 1, 1 << 30, swap_bytes=1)
    )
    assert Block(size).tensor.numel() == size


def test_two_tensors_of_one_block_are_views_of_the_same_memory():
    block = Block(PAGE)
    block.tensor.zero_()
    block.tensor[:8].view(torch.int64).fill_(-1)
    assert int(block.tensor.sum()) == 8 * 255
