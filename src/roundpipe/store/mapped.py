"""Segments that lie in files: written once, complete or not at all, then mapped and only read.

    | the segment's bytes | what lies in it, as JSON | length of that | mark |

A file gets its name when all of it is on the disk, so a broken-off write leaves none. What a file
says of itself is checked against its size and against what it was made from. Its time of writing is
set to a whole second that it names: while it has that time nobody has written to it since. Where it
has another (it was copied, or changed) all its bytes are summed before it is trusted.

A shared read-only mapping needs no memory of its own: the kernel brings pages in as they are read
and may drop them at any time. Writing to it ends the process, so what is mapped is frozen.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.store.packed import Packed
from roundpipe.store.pages import PAGE
from roundpipe.store.segment import Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = b"segment of tensors v1\0\0\0"
_LARGEST_DESCRIPTION = 64 << 20
_PIECE = 32 << 20
_SECOND = 10**9  # nanoseconds
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class MappedSegment(Segment):
    """The first bytes of a file as a segment, read-only; the mapping ends with its last tensor.

    Raises OSError where the file cannot be mapped, ValueError where it is too short.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        if not layout.num_bytes:
            super().__init__(layout)
            return
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), layout.num_bytes, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            buffer = torch.frombuffer(self._mapping, dtype=torch.uint8)
        super().__init__(layout, buffer=buffer)

    def let_go(self, low: int, high: int) -> None:
        """Drop the pages of bytes ``low`` to ``high`` from this process; reading brings them back.

        Pages at both ends are dropped whole. Does nothing where the system cannot.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is None or low >= high:
            return
        start = low // PAGE * PAGE
        self._mapping.madvise(advice, start, min(high, self.layout.num_bytes) - start)


@dataclass(frozen=True)
class SegmentFile:
    """A segment that was read back from its file, and how its packed tensors are packed."""

    segment: MappedSegment
    packed: Mapping[str, Packed]


def write_segment_file(
    path: Path, segment: Segment, packed: Mapping[str, Packed], *, made_from: str
) -> None:
    """Write ``segment`` to ``path``, on the disk when this returns; replaces what was there.

    ``made_from``: what `read_segment_file` is to be asked for. Raises OSError where it cannot be
    written; what was at ``path`` is then still there.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    _clear_gaps(segment)
    try:
        with temporary.open("wb") as file:
            sum_of_bytes = hashlib.sha256()
            for piece in _pieces(segment.buffer.numpy().data):
                sum_of_bytes.update(piece)
                file.write(piece)
            time = os.fstat(file.fileno()).st_mtime_ns // _SECOND * _SECOND
            description = json.dumps(
                {
                    "made_from": made_from,
                    "entries": [_to_json(*entry) for entry in segment.layout.entries],
                    "packed": {name: _packed_to_json(each) for name, each in packed.items()},
                    "sha256": sum_of_bytes.hexdigest(),
                    "time": time,
                }
            ).encode()
            file.write(description + len(description).to_bytes(8, "little") + _MARK)
            file.flush()
            os.fsync(file.fileno())
        os.utime(temporary, ns=(time, time))
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_segment_file(path: Path, *, made_from: str) -> SegmentFile | None:
    """Map a file that `write_segment_file` wrote; None where there is none that can be trusted.

    Reads all of it only where it was copied or changed since it was written.
    """
    try:
        return _read(path, made_from)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        logger.warning("a segment file is not used and made anew: %s: %s", path, error)
        return None


def _read(path: Path, made_from: str) -> SegmentFile:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        end = status.st_size - len(_MARK) - 8
        if end < 0:
            raise ValueError("too short")
        file.seek(end)
        length = int.from_bytes(file.read(8), "little")
        if file.read() != _MARK or length > min(end, _LARGEST_DESCRIPTION):
            raise ValueError("not a complete segment file")
        file.seek(end - length)
        description: dict[str, Any] = json.loads(file.read(length))
        if description["made_from"] != made_from:
            raise ValueError("made from something else")
        layout = Layout.of(_from_json(*entry) for entry in description["entries"])
        if layout.num_bytes != end - length:
            raise ValueError(f"holds {end - length} bytes, tells of {layout.num_bytes}")
        packed = {n: _packed_from_json(p, layout) for n, p in description["packed"].items()}
        if status.st_mtime_ns != description["time"]:
            file.seek(0)
            if _sum_of(file, layout.num_bytes) != description["sha256"]:
                raise ValueError("its bytes have changed")
            with suppress(OSError):  # a folder that may only be read
                os.utime(path, ns=(description["time"], description["time"]))
    return SegmentFile(MappedSegment(path, layout), packed)


def _clear_gaps(segment: Segment) -> None:
    """Zero what lies between tensors, so that equal tensors make equal files."""
    end = 0
    for place in segment.layout.slices:
        segment.buffer[end : place.offset].zero_()
        end = place.offset + place.num_bytes
    segment.buffer[end:].zero_()


def _pieces(memory: memoryview) -> Any:
    return (memory[low : low + _PIECE] for low in range(0, len(memory), _PIECE))


def _sum_of(file: Any, num_bytes: int) -> str:
    found = hashlib.sha256()
    while num_bytes:
        piece = file.read(min(num_bytes, _PIECE))
        if not piece:
            raise ValueError("too short")
        found.update(piece)
        num_bytes -= len(piece)
    return found.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename last; where a folder cannot be opened (Windows) the system sees to it."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _to_json(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    word = str(dtype).removeprefix("torch.")
    assert word in _DTYPES, f"a dtype that no segment file holds: {dtype}"
    return [name, list(shape), word]


def _from_json(name: Any, shape: Any, dtype: Any) -> tuple[str, tuple[int, ...], torch.dtype]:
    if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"not a tensor: {name} {shape}")
    return name, tuple(shape), _DTYPES[dtype]


def _packed_to_json(packed: Packed) -> dict[str, Any]:
    _, shape, dtype = _to_json("", packed.shape, packed.dtype)
    return {
        "shape": shape,
        "dtype": dtype,
        "parts": packed.parts,
        "kind": packed.kind,
        "block": packed.block,
    }


def _packed_from_json(fields: Mapping[str, Any], layout: Layout) -> Packed:
    _, shape, dtype = _from_json("", fields["shape"], fields["dtype"])
    parts, kind, block = dict(fields["parts"]), fields["kind"], fields["block"]
    if not set(parts.values()) <= set(layout.names):
        raise ValueError(f"a packed tensor without its parts: {sorted(parts.values())}")
    if kind not in ("nf4", "fp4") or type(block) is not int or block < 1:
        raise ValueError(f"not a way to pack: {kind} {block}")
    return Packed(shape, dtype, parts, kind, block)
