"""Segment files: complete or absent, trusted only as far as they prove themselves."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from roundpipe.store import mapped
from roundpipe.store.mapped import MappedSegment, read_segment_file, write_segment_file
from roundpipe.store.packed import Packed
from roundpipe.store.segment import Layout, Segment

LAYOUT = Layout.of(
    [
        ("layer.weight", (300, 70), torch.bfloat16),
        ("../../evil name\n", (5,), torch.float32),
        ("data", (16,), torch.uint8),
        ("data.scales", (1,), torch.float32),
    ]
)
PACKED = {"data": Packed((4, 8), torch.bfloat16, {"data": "data", "scales": "data.scales"})}


@pytest.fixture
def segment():
    segment = Segment(LAYOUT)
    torch.manual_seed(0)
    segment.buffer.copy_(torch.randint(0, 256, segment.buffer.shape).to(torch.uint8))
    return segment


@pytest.fixture
def path(tmp_path, segment):
    path = tmp_path / "0000.segment"
    write_segment_file(path, segment, PACKED, made_from="these files")
    return path


def read(path):
    return read_segment_file(path, made_from="these files")


def test_what_was_written_is_mapped_back_with_every_byte_and_how_it_is_packed(path, segment):
    file = read(path)
    assert file.segment.layout == LAYOUT
    assert dict(file.packed) == PACKED
    assert torch.equal(file.segment.buffer, segment.buffer)
    for name, view in segment.views.items():
        mine = file.segment.views[name]
        assert mine.dtype == view.dtype
        assert torch.equal(mine.view(torch.uint8), view.view(torch.uint8))


def test_equal_tensors_make_equal_files_whatever_lay_between_them(path, segment, tmp_path):
    segment.buffer[LAYOUT.slices[0].num_bytes] = 77  # in the gap behind the first
    again = tmp_path / "again.segment"
    write_segment_file(again, segment, PACKED, made_from="these files")
    num_bytes = LAYOUT.num_bytes
    assert again.read_bytes()[:num_bytes] == path.read_bytes()[:num_bytes]


def test_names_in_a_file_are_never_paths(path, tmp_path):
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 10, 1000, -1, -30])
def test_a_file_that_was_cut_short_is_not_used(path, caplog, kept):
    path.write_bytes(path.read_bytes()[:kept])
    assert read(path) is None
    assert "not used and made anew" in caplog.text


def test_a_file_made_from_something_else_is_not_used(path, caplog):
    assert read_segment_file(path, made_from="other files") is None
    assert "made from something else" in caplog.text


def test_a_file_whose_bytes_were_changed_is_not_used(path, caplog):
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    assert read(path) is None
    assert "its bytes have changed" in caplog.text


def test_a_copied_file_is_used_once_its_bytes_are_summed(path, tmp_path, monkeypatch):
    copied = tmp_path / "copied.segment"
    copied.write_bytes(path.read_bytes())
    assert read(copied) is not None
    monkeypatch.setattr(mapped, "_sum_of", None)  # not summed again: it has its time back
    assert read(copied) is not None


def test_an_untouched_file_is_not_read_through(path, monkeypatch):
    monkeypatch.setattr(mapped, "_sum_of", None)
    assert read(path) is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"float32"', b'"float31"'),
        (b"[300, 70]", b"[300, 71]"),
        (b"[300, 70]", b"[-30, 70]"),
        (b'"scales": "data.scales"', b'"scales": "data.scalez"'),
        (b'"kind": "nf4"', b'"kind": "nf5"'),
        (b'"entries"', b'"antries"'),
    ],
)
def test_a_file_that_describes_itself_wrongly_is_not_used(path, old, new):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    assert read(path) is None


def test_a_foreign_file_is_not_used(tmp_path):
    path = tmp_path / "x.segment"
    path.write_bytes(os.urandom(5000))
    assert read(path) is None


def test_no_file_is_no_error(tmp_path, caplog):
    assert read(tmp_path / "none") is None
    assert not caplog.text


def test_a_write_that_breaks_off_leaves_what_was_there(path, segment, monkeypatch):
    before = path.read_bytes()
    segment.buffer.zero_()

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(mapped.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_segment_file(path, segment, PACKED, made_from="these files")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_segment_without_bytes_has_a_file_too(tmp_path):
    empty = Segment(Layout.of([]))
    write_segment_file(tmp_path / "e", empty, {}, made_from="m")
    file = read_segment_file(tmp_path / "e", made_from="m")
    assert file.segment.layout.num_bytes == 0
    file.segment.let_go(0, 0)


def resident(path):
    """Bytes of the mapping of ``path`` that are in this process's memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"{re.escape(str(path))}\n(?:\w+:.*\n)*?Rss: +(\d+) kB", text)
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="known on Linux only")
def test_what_is_let_go_leaves_memory_and_comes_back_when_it_is_read(tmp_path):
    path = tmp_path / "large"
    segment = Segment(Layout.of([("w", (1 << 20,), torch.float32)]))
    segment.views["w"].copy_(torch.arange(1 << 20))
    write_segment_file(path, segment, {}, made_from="m")
    file = read_segment_file(path, made_from="m").segment
    assert resident(path) == 0
    assert torch.equal(file.views["w"], segment.views["w"])
    assert resident(path) == 4 << 20
    for low in range(0, 4 << 20, 1000_000):  # chunks that end within pages
        file.let_go(low, min(low + 1000_000, 4 << 20))
    assert resident(path) == 0
    assert torch.equal(file.views["w"], segment.views["w"])


def test_a_sparse_file_larger_than_memory_can_be_mapped(tmp_path):
    path = tmp_path / "sparse"
    layout = Layout.of([("w", (1 << 38,), torch.bfloat16)])  # half a terabyte
    with path.open("wb") as file:
        file.truncate(layout.num_bytes)
    segment = MappedSegment(path, layout)
    assert segment.views["w"][-1000:].sum() == 0
    segment.let_go(layout.num_bytes - 4096, layout.num_bytes)


def test_a_file_shorter_than_its_layout_is_not_mapped(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="length"):
        MappedSegment(path, LAYOUT)
