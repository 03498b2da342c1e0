"""The weight files of a model folder: what they hold, checked before anything is allocated.

Files come from anywhere. Their headers say where each tensor lies; a header that disagrees with
itself, with the size of its file or with the index is refused by name. Only safetensors files are
opened, and only by plain names within the folder: a pickle can run any code.

Tensors are read with ``pread`` straight into where they are to lie. A mapped file would count as
this process's memory as far as it was read.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import INDEX, is_plain, once, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

_ONE_FILE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
_PIECE = 16 << 20  # bytes read at once where they are cast on the way
_FETCH_AGAIN = "an interrupted download leaves such a file; fetch it again"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class FileTensor:
    """One tensor of one file: ``num_bytes`` from byte ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    offset: int
    num_bytes: int

    def pieces(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read it in flat consecutive pieces, each cast to ``dtype``; blocks on the disk."""
        step = max(1, _PIECE // self.dtype.itemsize)
        total = prod(self.shape)
        with _opened(self.path) as file:
            for start in range(0, total, step):
                piece = torch.empty(min(step, total - start), dtype=self.dtype)
                self._read(file, piece, start)
                yield piece.to(dtype)

    def fill(self, target: Tensor) -> None:
        """Read it into ``target``: contiguous, of its number of elements, in any dtype.

        Without a copy where the dtypes agree. Blocks on the disk; raises ConfigError where the
        file has become shorter.
        """
        flat = target.view(-1)
        assert flat.numel() == prod(self.shape), f"{self.name}: {target.shape} {self.shape}"
        if target.dtype == self.dtype:
            with _opened(self.path) as file:
                self._read(file, flat, 0)
            return
        start = 0
        for piece in self.pieces(target.dtype):
            flat[start : start + piece.numel()] = piece
            start += piece.numel()

    def part(self, low: int, num_bytes: int) -> Tensor:
        """Read ``num_bytes`` of it from byte ``low`` on, as a flat tensor of its dtype."""
        target = torch.empty(num_bytes // self.dtype.itemsize, dtype=self.dtype)
        with _opened(self.path) as file:
            self._read(file, target, low // self.dtype.itemsize)
        return target

    def _read(self, file: int, target: Tensor, start: int) -> None:
        if not target.numel():
            return
        memory = memoryview(target.view(torch.uint8).numpy().data)
        place = self.offset + start * self.dtype.itemsize
        while memory:
            num_read = os.preadv(file, [memory], place)
            if num_read == 0:
                raise ConfigError(
                    f"the file ended before its tensor did: {self.path}: {self.name}\n"
                    f"hint: {_FETCH_AGAIN}"
                )
            memory, place = memory[num_read:], place + num_read


@dataclass(frozen=True)
class Shards:
    """The weight files of one model: ``tensors`` by the name that the files give them."""

    folder: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, FileTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_shards(folder: Path, explicit: str | None = None) -> Shards:
    """Read the headers of a folder's weight files; ``explicit``: the file that its config names.

    Raises ConfigError, naming the file, for what is missing, torn, or not what it says.
    """
    if explicit is not None:
        return _merged(folder, _listed(folder, explicit))
    if (folder / _ONE_FILE).is_file():
        return _merged(folder, {_ONE_FILE: ()})
    if (folder / INDEX).is_file():
        return _merged(folder, _listed(folder, INDEX))
    raise ConfigError(_why_none(folder))


def read_header(path: Path) -> dict[str, FileTensor]:
    """Read what one safetensors file holds, by name; raises ConfigError where it is not sound."""
    size = path.stat().st_size
    header, start = _header_of(path, size)
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, fields, start) for name, fields in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise _broken(path, f"a tensor does not begin where another ended: {tensor.name}")
        end += tensor.num_bytes
    if end != size:
        raise _broken(path, f"it has {size} bytes, its header tells of {end}")
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Read what a safetensors file says beside its tensors; raises as `read_header` does."""
    header, _ = _header_of(path, path.stat().st_size)
    found = header.get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise _broken(path, "its metadata are no strings")
    return found


def _header_of(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """A file's header, and where what it tells of begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise _broken(path, f"its header of {length} bytes does not fit its {size}")
        try:
            header = json.loads(file.read(length), object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            raise _broken(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header holds no object")
    return header, 8 + length


def _entry(path: Path, name: str, fields: Any, start: int) -> FileTensor:
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"an entry of its header is not one of a tensor: {name}") from error
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or begin > end:
        raise _broken(path, f"numbers in its header make no sense: {name}: {shape} {begin} {end}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(
            f"a tensor is of a dtype that is not read: {path}: {name}: {dtype!r}\n"
            "hint: load the model in 16 bits; quantization=nf4 packs it while it is loaded"
        )
    if prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise _broken(path, f"a tensor's bytes are not those of its shape: {name}: {shape}")
    return FileTensor(name, tuple(shape), DTYPES[dtype], path, start + begin, end - begin)


def _listed(folder: Path, name: str) -> dict[str, tuple[str, ...]]:
    """The files that an index names, and the tensors that it says are in each."""
    if not is_plain(name):
        raise ConfigError(
            f"a file outside the model's folder: {folder}: {name!r}\n"
            "hint: transformers_weights of config.json names a file beside it, or is left out"
        )
    if name.endswith(".safetensors"):
        _require(folder, [name])
        return {name: ()}
    if not name.endswith(".json"):
        raise ConfigError(
            f"not a safetensors file: {folder / name}\nhint: only safetensors files are opened"
        )
    _require(folder, [name])
    listed = weight_files(folder / name)
    _require(folder, listed)
    return listed


def _require(folder: Path, names: Any) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} weight files are missing in: {folder}: {', '.join(missing[:3])}\n"
            f"hint: {_FETCH_AGAIN}"
        )


def _merged(folder: Path, listed: Mapping[str, tuple[str, ...]]) -> Shards:
    tensors: dict[str, FileTensor] = {}
    for file, expected in listed.items():
        found = read_header(folder / file)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            other = tensors[twice[0]].path.name
            raise ConfigError(
                f"a tensor is in two files: {folder}: {twice[0]}: {other} and {file}\n"
                f"hint: keep the files of one model only, as {INDEX} lists them"
            )
        absent = [name for name in expected if name not in found]
        if absent:
            raise _broken(folder / file, f"it lacks what its index names: {absent[0]}")
        tensors.update(found)
    return Shards(folder, tuple(folder / file for file in listed), tensors)


def _why_none(folder: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}\nhint: give a model folder or a hub id such as owner/name"
    if (folder / "adapter_config.json").is_file():
        return (
            f"an adapter, not a model: {folder}\n"
            "hint: name the model that the adapter was trained on"
        )
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"only pickled weights (pytorch_model.bin) in: {folder}\n"
            "hint: a pickle can run any code, so it is not opened; where you trust the file, "
            "convert it once: AutoModelForCausalLM.from_pretrained(folder)"
            '.save_pretrained("converted")'
        )
    if any(folder.glob("*.safetensors")):
        return f"its weight files have no index: {folder}\nhint: fetch {INDEX} too"
    return f"no weights (*.safetensors) in: {folder}\nhint: {_FETCH_AGAIN}"


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(f"not a sound safetensors file: {path}: {why}\nhint: {_FETCH_AGAIN}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        yield file
    finally:
        os.close(file)
