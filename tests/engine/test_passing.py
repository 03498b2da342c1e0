"""Blocks that pass from hand to hand: never two owners, and no more of them than needed."""

from __future__ import annotations

import random

import pytest
import torch

from roundpipe.device.fake import FakeDevice
from roundpipe.engine.passing import PassingBlocks
from roundpipe.store import pages as pages_module
from roundpipe.store.pages import PAGE, HostPages


class Point:
    def __init__(self):
        self.done = False

    def is_complete(self):
        return self.done

    def wait(self):
        self.done = True


@pytest.fixture
def passing(monkeypatch):
    monkeypatch.setattr(pages_module, "_KEPT", 0)
    return PassingBlocks(HostPages(FakeDevice(pinned_bytes=1 << 40)))


def sized(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_a_block_comes_back_when_its_last_view_has_gone_and_its_copies_are_over(passing):
    tensor, events = passing.like(sized(2 * PAGE))
    address, event = tensor.data_ptr(), Point()
    assert not events
    assert passing.has(tensor)
    assert passing.used(tensor, event)
    view = tensor[5:]
    del tensor
    other, _ = passing.like(sized(2 * PAGE))
    assert other.data_ptr() != address  # a view is left
    del view
    third, _ = passing.like(sized(2 * PAGE))
    assert third.data_ptr() not in (address, other.data_ptr())  # it is being copied
    event.done = True
    fourth, events = passing.like(sized(2 * PAGE))
    assert (fourth.data_ptr(), tuple(events)) == (address, ())


def test_others_memory_is_none_of_ours(passing):
    assert not passing.has(torch.zeros(3))
    assert not passing.used(torch.zeros(3), Point())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(7, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10.0)[::2],
        torch.ones(3).expand(2, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ],
)
def test_a_copy_has_shape_strides_and_values_of_what_it_is_like(passing, tensor):
    made, _ = passing.like(tensor)
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
    assert made.stride() == torch.empty_like(tensor).stride()
    assert torch.equal(made.copy_(tensor), tensor)


def test_a_block_is_locked_at_the_size_of_what_it_was_made_for(passing):
    tensor, _ = passing.like(sized(3 * PAGE + 1))
    assert passing._pages.is_locked(tensor)
    assert passing.num_bytes == 4 * PAGE


def test_a_smaller_tensor_may_have_a_larger_block_but_not_a_far_larger_one(passing):
    large, _ = passing.like(sized(8 * PAGE))
    address = large.data_ptr()
    del large
    tiny, _ = passing.like(sized(PAGE))
    assert tiny.data_ptr() != address
    half, _ = passing.like(sized(5 * PAGE))
    assert half.data_ptr() == address


def test_where_many_blocks_wait_the_next_owner_waits_for_the_oldest_copy(passing):
    events = []
    for _ in range(40):  # none is ever over
        tensor, waits = passing.like(sized(PAGE))
        events.append(Point())
        passing.used(tensor, events[-1])
        del tensor
        if waits:
            assert waits[0] in events
    assert passing.num_bytes <= 5 * PAGE
    assert waits[0] is events[-5]  # in turn


@pytest.mark.parametrize("seed", range(5))
def test_at_random_nobody_gets_what_is_held_or_copied_without_being_told(passing, seed):
    draw = random.Random(seed)
    held, under_way = [], []  # (tensor, value); (address, event)
    most = 0
    for turn in range(400):
        if held and draw.random() < 0.5:
            tensor, value = held.pop(draw.randrange(len(held)))
            assert bool((tensor == value).all())
            if draw.random() < 0.7:
                event = Point()
                passing.used(tensor, event)
                under_way.append((tensor.data_ptr(), event))
            del tensor
        else:
            tensor, waits = passing.like(sized(draw.choice([PAGE, 2 * PAGE, 5 * PAGE])))
            told = list(waits)
            for address, event in under_way:
                if address == tensor.data_ptr() and not event.done:
                    assert event in told
                    event.wait()
            tensor.fill_(turn % 256)
            held.append((tensor, turn % 256))
        for _, event in under_way:
            event.done = event.done or draw.random() < 0.2
        most = max(most, len(held))
    assert passing.num_bytes <= (2 * most + 4) * 5 * PAGE


def test_sizes_that_are_needed_no_more_are_given_up(passing):
    for size in range(1, 30, 2):
        passing.like(sized(size * PAGE))
    many = passing.num_bytes
    for _ in range(1000):
        passing.like(sized(PAGE))
    assert passing.num_bytes < many / 5
