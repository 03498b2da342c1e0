"""Safetensors files that are written while their tensors are made, one group after another.

The header needs shapes alone, so it is written first; then each tensor goes to its place. A file
gets its name when it is whole, and its SHA-256 is taken as it is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch

from roundpipe.durable import Fingerprint, HashedFile
from roundpipe.models.loading.shards import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED = 8  # bytes, of what follows the header


@dataclass
class Shard:
    """What one file will hold: ``tensors`` without data, by name, of the ``groups`` given."""

    groups: list[int] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(map(_num_bytes, self.tensors.values()))

    @staticmethod
    def file_name(number: int, count: int) -> str:
        """Its file's name as one of ``count``."""
        return (
            "model.safetensors"
            if count == 1
            else f"model-{number + 1:05}-of-{count:05}.safetensors"
        )


def plan_shards(groups: Sequence[Mapping[str, Tensor]], most_bytes: int | None) -> list[Shard]:
    """Deal groups to files in order, each of ``most_bytes`` unless one group alone is larger."""
    shards = [Shard()]
    for index, group in enumerate(groups):
        size = sum(map(_num_bytes, group.values()))
        last = shards[-1]
        if most_bytes is not None and last.tensors and last.num_bytes + size > most_bytes:
            shards.append(last := Shard())
        last.groups.append(index)
        last.tensors.update(group)
    return shards


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    parts: Iterable[Mapping[str, Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> Fingerprint:
    """Write one file of ``tensors``, whose values come in ``parts``; holds one of these at a time.

    ``metadata``: more than stock readers look at. Blocks on the disk; returns what was written.
    The file is there whole or not at all.
    """
    offsets, header = _header(tensors, metadata or {})
    beside = path.with_name(f"{path.name}.partial")
    missing = set(tensors)
    beside.unlink(missing_ok=True)
    try:
        with HashedFile(beside) as file:
            file.write_at(0, header)
            for part in parts:
                missing -= part.keys()
                for name in part:
                    tensor = _checked(name, part[name], tensors[name])
                    file.write_at(len(header) + offsets[name], bytes_of(tensor))
                    del tensor
                del part  # before the next one is made
            assert not missing, f"{path.name}: {sorted(missing)[:3]}"
            written = file.finish()
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return written


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """Say which file holds what, if there are several."""
    if len(shards) == 1:
        return
    places = {
        name: shard.file_name(number, len(shards))
        for number, shard in enumerate(shards)
        for name in shard.tensors
    }
    every = [tensor for shard in shards for tensor in shard.tensors.values()]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in every),
            "total_size": sum(map(_num_bytes, every)),
        },
        "weight_map": dict(sorted(places.items())),
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, int], bytes]:
    """Where each tensor begins behind the header, and the header; wide dtypes come first.

    Those of one width lie in the order given, which is that in which they will be written.
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: -each[1].itemsize):
        offsets[name], end = end, end + _num_bytes(tensor)
        fields[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return offsets, len(text).to_bytes(8, "little") + text


def _checked(name: str, tensor: Tensor, expected: Tensor) -> Tensor:
    assert tensor.shape == expected.shape, f"{name}: {tensor.shape} {expected.shape}"
    assert tensor.dtype == expected.dtype, f"{name}: {tensor.dtype} {expected.dtype}"
    return tensor.detach().cpu().contiguous()


def _num_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
