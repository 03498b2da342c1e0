import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.store.segment import ALIGNMENT, Layout, Segment

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
entries = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=8).map(
    lambda items: [(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)]
)


def value(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@settings(max_examples=100, deadline=None)
@given(entries)
def test_slices_are_aligned_in_order_and_do_not_overlap(items):
    layout = Layout.of(items)
    end = 0
    for s in layout.slices:
        assert s.offset % ALIGNMENT == 0
        assert s.offset >= end
        end = s.offset + s.num_bytes
    assert layout.num_bytes % ALIGNMENT == 0
    assert end <= layout.num_bytes < end + ALIGNMENT
    assert list(layout.entries) == items


@settings(max_examples=100, deadline=None)
@given(entries, st.integers(0, 3))
def test_what_is_written_through_views_is_read_back_from_a_copy_of_the_bytes(items, blocks):
    layout = Layout.of(items)
    segment = Segment(layout)
    values = {name: value(shape, dtype, i) for i, (name, shape, dtype) in enumerate(items)}
    for name, tensor in values.items():
        segment.views[name].copy_(tensor)
    at = blocks * ALIGNMENT
    slot = torch.zeros(at + layout.num_bytes, dtype=torch.uint8)
    slot[at:].copy_(segment.buffer)
    views = layout.view(slot, at=at)
    assert list(views) == list(values)
    for name, tensor in values.items():
        assert views[name].dtype == tensor.dtype
        assert views[name].is_contiguous()
        assert torch.equal(views[name], tensor)


@settings(max_examples=50, deadline=None)
@given(entries, st.data())
def test_a_prefix_keeps_its_offsets_and_what_follows_is_laid_behind(items, data):
    cut = data.draw(st.integers(0, len(items)))
    whole = Layout.of(items)
    prefix = whole.prefix(cut)
    assert prefix == Layout.of(items[:cut])
    assert prefix.followed_by(items[cut:]) == whole


def test_views_share_memory_with_the_buffer():
    segment = Segment(Layout.of([("a", (3,), torch.float32), ("b", (), torch.int64)]))
    segment.views["a"].fill_(1.0)
    assert segment.views["a"].untyped_storage().data_ptr() == (
        segment.buffer.untyped_storage().data_ptr()
    )
    segment.buffer.zero_()
    assert segment.views["a"].tolist() == [0.0, 0.0, 0.0]


def test_a_segment_lies_in_pages_of_its_own_unless_it_is_given_memory():
    layout = Layout.of([("a", (3,), torch.float32)])
    segment = Segment(layout)
    assert segment.block.tensor is segment.buffer
    given = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    assert Segment(layout, buffer=given).block is None


def test_a_name_twice_is_refused():
    with pytest.raises(AssertionError, match="a name twice"):
        Layout.of([("a", (1,), torch.float32), ("a", (2,), torch.float32)])
