"""One layer's optimizer state as a file: whole, or refused.

The format is that of safetensors, so that other tools can look inside. A file is written beside its
place and renamed into it, and is never changed afterwards: a process that dies leaves the old file
or the new one. What renaming does not cover (a machine that loses power before the bytes reached
the disk, a damaged block) the checksum in the header shows: CRC-32 of the file as it is with eight
zeros in the checksum's place.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from roundpipe.errors import RoundPipeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

_PIECE = 1 << 22  # bytes: read and checked while they are in the cache
_MOST_HEADER = 100 << 20  # bytes: what safetensors allows
_NO_CHECKSUM = b"0" * 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class DamagedError(RoundPipeError):
    """A state file is not what was written."""


@dataclass(frozen=True)
class Content:
    """``tensors`` by a name that says what each is; ``plain``: anything JSON can hold."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)


def write_state(path: Path, content: Content) -> None:
    """Put ``content`` in the place of ``path``; blocks until the system has the bytes.

    They need not be on the disk yet. Raises OSError; ``path`` is then as it was.
    """
    beside = path.with_name(path.name + ".tmp")
    try:
        with beside.open("wb") as file:
            order, header = _header(content)
            checksum = zlib.crc32(header)
            file.write(header)
            for name in order:
                data = _bytes_of(content.tensors[name])
                for start in range(0, len(data), _PIECE):
                    piece = data[start : start + _PIECE]
                    checksum = zlib.crc32(piece, checksum)
                    file.write(piece)
            file.seek(header.index(_NO_CHECKSUM))
            file.write(f"{checksum:08x}".encode())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read_state(path: Path) -> Content:
    """Read and check a whole file. The tensors share one buffer.

    Raises DamagedError if it is not whole, OSError if it cannot be read.
    """
    with path.open("rb") as file:
        header, checksum = _read_header(file, path)
        buffer = torch.empty(_size(file) - file.tell(), dtype=torch.uint8, device="cpu")
        data = _bytes_of(buffer)
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if file.readinto(piece) != len(piece):
                raise DamagedError(f"a state file is cut off: {path}")
            checksum = zlib.crc32(piece, checksum)
    metadata = _checked(path, header, checksum)
    return Content(dict(_views(header, buffer)), json.loads(metadata["plain"]))


def check_state(path: Path) -> str:
    """Read a whole file in small pieces and return its checksum. Raises as `read_state` does."""
    with path.open("rb") as file:
        header, checksum = _read_header(file, path)
        while piece := file.read(_PIECE):
            checksum = zlib.crc32(piece, checksum)
    return _checked(path, header, checksum)["checksum"]


def checksum_of(path: Path) -> str:
    """The checksum that a file says it has; nothing but its header is read."""
    with path.open("rb") as file:
        header, _ = _read_header(file, path)
    return str(header["__metadata__"]["checksum"])


def _header(content: Content) -> tuple[list[str], bytes]:
    """The tensors' order, such that each is aligned, and the header with an empty checksum."""
    tensors = content.tensors
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    metadata = {
        "checksum": _NO_CHECKSUM.decode(),
        "plain": json.dumps(content.plain, allow_nan=True),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, Any], int]:
    """The header, and the checksum so far as it was when the file was written."""
    length = file.read(8)
    text = file.read(min(int.from_bytes(length, "little"), _MOST_HEADER, _size(file)))
    try:
        header: dict[str, Any] = json.loads(text)
        said = header["__metadata__"]["checksum"].encode()
        place = text.index(b'"' + said + b'"') + 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"a state file has no header: {path}") from error
    return header, zlib.crc32(length + text[:place] + _NO_CHECKSUM + text[place + len(said) :])


def _checked(path: Path, header: dict[str, Any], checksum: int) -> dict[str, str]:
    """Take the metadata out of the header, once the checksum says that all is what was written."""
    metadata: dict[str, str] = header.pop("__metadata__")
    if metadata["checksum"] != f"{checksum:08x}":
        raise DamagedError(f"a state file is not what was written: {path}")
    return metadata


def _views(header: Mapping[str, Any], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        yield name, buffer[start:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1)
    return memoryview(cast("Any", flat.view(torch.uint8).numpy()))


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
