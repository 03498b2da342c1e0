"""What the host keeps of layers, as safetensors files: a large layer alone, small ones together.

    master/NAME       what the optimizer updates, in its dtype
    late/NAME         the working weight that the next call still reads, at staleness 1
    weight/NAME       the weight of a parameter that was trained and is frozen now
    buffer/NAME       a buffer: layers change some
    state/KEY/NAME    the optimizer's tensors; what it keeps beside them is in the file's metadata

A file's tensors are looked at when it is written and let go of then, layer by layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.checkpoint.values import decode, encode
from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.models.loading.shards import read_header, read_metadata
from roundpipe.models.loading.write_shards import write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from roundpipe.durable import Fingerprint
    from roundpipe.models.loading.shards import FileTensor
    from roundpipe.optim.on_disk import StateOnDisk
    from roundpipe.store.layer import HostLayer

    Entries = dict[str, dict[str, Any]]  # an optimizer's state: by parameter, by key

_TOGETHER = 64 << 20  # bytes of a file that holds several layers
_PIECE = 1 << 20  # elements looked at together
_PLAIN = "roundpipe"


@dataclass
class Kept:
    """One layer's tensors by their names in the file, and what else its optimizer keeps."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Keeper:
    """Knows what there is of one layer, as of now: to be asked until ``layer.reading`` is over.

    ``late``: the working weights that the next call reads, where those are not the newest.
    """

    layer: HostLayer
    optimizer: Optimizer | None
    on_disk: StateOnDisk | None
    late: Mapping[str, Tensor]

    @property
    def is_in_memory(self) -> bool:
        """Whether asking for it takes no memory."""
        return self.on_disk is None

    def kept(self) -> Kept:
        """Views of what is in memory, and copies of what is on disk, which is read."""
        layer, made = self.layer, Kept()
        entries, taken = self._entries()
        for name in layer.masters:
            made.tensors[f"master/{name}"] = layer.master_store.value(name, taken)
        for name, value in self.late.items():
            made.tensors[f"late/{name}"] = value
        for name in layer.retired_masters:
            made.tensors[f"weight/{name}"] = layer.newest(name).detach()
        for name, tensor in layer.tensors.items():
            is_mapped = layer.held is not None and name in layer.held
            if not isinstance(tensor, nn.Parameter) and not is_mapped:
                made.tensors[f"buffer/{name}"] = layer.weights.views[name]
        for name, entry in entries.items():
            made.plain[name] = {
                key: encode(value, made.tensors, f"state/{key}/{name}")
                for key, value in entry.items()
            }
        return made

    def _entries(self) -> tuple[Entries, dict[str, Tensor]]:
        """The optimizer's state, and the masters that are on disk with it."""
        if self.optimizer is None:
            return {}, {}
        if self.on_disk is None:
            held = {**self.layer.retired_masters, **self.layer.masters}
            state = self.optimizer.state
            return {name: dict(state[p]) for name, p in held.items() if p in state}, {}
        content = self.on_disk.content(self.layer.index)
        entries: Entries = {}
        taken: dict[str, Tensor] = {}
        for full, value in (*content.tensors.items(), *content.plain.items()):
            name, _, key = full.rpartition(".")
            if key == "master":
                taken[name] = value
            else:
                entries.setdefault(name, {})[key] = value
        return entries, taken


def file_name(number: int) -> str:
    """What the file of that number is called."""
    return f"optimizer-{number:05}.safetensors"


def write_layers(
    folder: Path, keepers: Sequence[Keeper], progress: Callable[[], None]
) -> Iterator[tuple[str, Fingerprint]]:
    """Write all layers in their order, and let each be changed as soon as it is written.

    Yields each file's name and what it is. ``progress`` is called after each tensor. Raises
    OSError, and RoundPipeError for a master that is not finite.
    """
    number = 0
    waiting: list[tuple[Keeper, Kept]] = []
    for keeper in keepers:
        is_full = sum(kept.num_bytes for _, kept in waiting) >= _TOGETHER
        if waiting and (is_full or not keeper.is_in_memory):
            yield _written(folder, number, waiting, progress)
            number += 1
        waiting.append((keeper, keeper.kept()))
    if waiting:
        yield _written(folder, number, waiting, progress)


def _written(
    folder: Path,
    number: int,
    layers: list[tuple[Keeper, Kept]],
    progress: Callable[[], None],
) -> tuple[str, Fingerprint]:
    """Write one file; empties ``layers``, so that nothing outlives its writing."""
    name = file_name(number)
    tensors = {key: value.to("meta") for _, kept in layers for key, value in kept.tensors.items()}
    plain = {keeper.layer.name: kept.plain for keeper, kept in layers if kept.plain}

    def parts() -> Iterator[dict[str, Tensor]]:
        while layers:
            keeper, kept = layers[0]
            order = sorted(kept.tensors, key=lambda key: -kept.tensors[key].itemsize)
            for key in order:
                value = kept.tensors.pop(key)
                if key.startswith("master/"):
                    _require_finite(key.removeprefix("master/"), value)
                yield {key: value.contiguous()}
                progress()
            if keeper.layer.reading is not None:
                keeper.layer.reading.end()
            del layers[0]

    written = write_shard(folder / name, tensors, parts(), metadata={_PLAIN: json.dumps(plain)})
    return name, written


def require_finite(layers: Iterable[HostLayer]) -> None:
    """Raise RoundPipeError for newest weights that no training can go on from."""
    for layer in layers:
        for name in layer.masters:
            _require_finite(name, layer.newest(name))


def _require_finite(name: str, master: Tensor) -> None:
    """Raise RoundPipeError for a master that no training can go on from."""
    flat = master.contiguous().view(-1)
    for start in range(0, flat.numel(), _PIECE):
        low, high = torch.aminmax(flat[start : start + _PIECE])
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise RoundPipeError(
                f"a weight is not finite, so no checkpoint is made: {name}\n"
                "hint: go on from the checkpoint before, with a lower learning_rate"
            )


class LayerFiles:
    """The layer files of a checkpoint, their headers read: what is there, and where.

    Raises ConfigError for files that are no sound safetensors or name a tensor twice.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tensors: dict[str, FileTensor] = {}
        self._plain: dict[str, dict[str, Any]] = {}  # by parameter
        for path in paths:
            found = read_header(path)
            if twice := found.keys() & self.tensors.keys():
                raise ConfigError(f"a tensor is in two files: {path}: {min(twice)}")
            self.tensors.update(found)
            self._plain.update(_plain_of(path))

    def names(self, kind: str) -> list[str]:
        """Of what parameters or buffers there is such a thing."""
        return [n.removeprefix(f"{kind}/") for n in self.tensors if n.startswith(f"{kind}/")]

    def entry(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps of a parameter, in new memory. Blocks on the disk."""
        plain = self._plain.get(name, {})
        made: dict[str, Any] = decode(plain, _Reading(self.tensors))
        return made

    def fill(self, name: str, target: Tensor) -> None:
        """Read a tensor into ``target``, which may have another dtype. Blocks on the disk."""
        found = self.tensors[name]
        if found.dtype == target.dtype and target.is_contiguous():
            found.fill(target)
            return
        flat, step = target.view(-1), _PIECE * found.dtype.itemsize
        for low in range(0, found.num_bytes, step):
            piece = found.part(low, min(step, found.num_bytes - low))
            start = low // found.dtype.itemsize
            flat[start : start + piece.numel()] = piece


class _Reading(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for."""

    def __init__(self, files: Mapping[str, FileTensor]) -> None:
        self._files = files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Tensor:
        found = self._files[name]
        value = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        found.fill(value)
        return value


def _plain_of(path: Path) -> dict[str, dict[str, Any]]:
    text = read_metadata(path).get(_PLAIN, "{}")
    try:
        by_layer = json.loads(text)
        return {name: dict(entry) for layer in by_layer.values() for name, entry in layer.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"metadata that makes no sense: {path}: {error}") from error
