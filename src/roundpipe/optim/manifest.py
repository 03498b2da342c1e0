"""What a folder of optimizer state says about itself while nobody writes to it.

The manifest names optimizer and parameters, and the checksum of each layer's file. It is written
when all files have reached the disk and removed before the next one is written, so a folder with a
manifest is of one step. See [Note: what a folder is worth] in `roundpipe.optim.on_disk`.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from roundpipe.durable import sync, write_text
from roundpipe.errors import ConfigError
from roundpipe.optim.state_file import DamagedError, check_state, checksum_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from roundpipe.store.layer import HostLayer

KEY = "optim_state_dir"
MANIFEST = "manifest.json"
_FORMAT = "roundpipe optimizer state 1"


def state_path(folder: Path, layer: HostLayer) -> Path:
    """The file of a layer: the same name for the same model, whatever characters names have."""
    return folder / f"{layer.index:05d}-{quote(layer.name, safe='')[:100]}.safetensors"


def refuse_state(folder: Path) -> None:
    """Raise ConfigError if ``folder`` holds state; remove what an interrupted write left."""
    there = next(folder.glob("*.safetensors"), None)
    if there is not None:
        raise ConfigError(
            f"{KEY}: {folder} holds the state of another run: {there.name}\n"
            f"hint: {KEY}=ANOTHER, or delete the folder"
        )
    remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove files whose writing was cut off."""
    for path in folder.glob("*.safetensors.tmp"):
        path.unlink()


def write_manifest(folder: Path, optimizer: Optimizer, layers: Sequence[HostLayer]) -> None:
    """Bring all files to the disk, then say that they belong together. Raises OSError."""
    files = {}
    for layer in layers:
        path = state_path(folder, layer)
        if path.exists():
            sync(path)
            files[path.name] = checksum_of(path)
    sync(folder)
    content = {
        **_described(optimizer, layers),
        "checksums": files,
        "weights": _weight_checksums(layers),
    }
    write_text(folder / MANIFEST, json.dumps(content, indent=1))
    sync(folder)


def remove_manifest(folder: Path) -> None:
    """Say that files are about to change."""
    (folder / MANIFEST).unlink(missing_ok=True)


def read_manifest(
    folder: Path, optimizer: Optimizer, layers: Sequence[HostLayer]
) -> dict[int, Path]:
    """The files of a closed folder by layer, all of them read and found whole.

    Raises ConfigError if there is none, if it is of another model or optimizer, or damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        some = any(folder.glob("*.safetensors"))
        what = "was left in the middle of a step" if some else "holds no optimizer state"
        raise ConfigError(f"{KEY}: {folder} {what}\nhint: go on from a checkpoint")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        said = {key: manifest[key] for key in ("format", "optimizer", "layers")}
        checksums: dict[str, str] = dict(manifest["checksums"])
        weights: dict[str, str] = dict(manifest["weights"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: {path} cannot be read: {error}\nhint: go on from a checkpoint"
        ) from error
    _refuse_others(folder, said, _described(optimizer, layers))
    _refuse_other_weights(folder, weights, _weight_checksums(layers))
    paths = {layer.index: state_path(folder, layer) for layer in layers}
    found = {index: path for index, path in paths.items() if path.name in checksums}
    for state in found.values():
        _check(state, checksums[state.name])
    remove_leftovers(folder)
    return found


def _described(optimizer: Optimizer, layers: Iterable[HostLayer]) -> dict[str, Any]:
    kind = type(optimizer)
    return {
        "format": _FORMAT,
        "optimizer": f"{kind.__module__}.{kind.__qualname__}",
        "layers": [
            {
                "name": layer.name,
                "masters": {
                    name: [str(master.dtype).removeprefix("torch."), *master.shape]
                    for name, master in layer.masters.items()
                },
            }
            for layer in layers
        ],
    }


def _refuse_others(folder: Path, said: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise ConfigError, naming the first difference."""
    for key in ("format", "optimizer"):
        if said[key] != ours[key]:
            raise ConfigError(
                f"{KEY}: {folder} is of another {key}: {said[key]}, not {ours[key]}\n"
                f"hint: {KEY}=ANOTHER"
            )
    theirs, mine = (
        [(layer["name"], layer["masters"]) for layer in each["layers"]] for each in (said, ours)
    )
    if theirs == mine:
        return
    first = next((layer for layer in mine if layer not in theirs), None)
    what = f"without {first[0]}" if first is not None else f"of {len(theirs)} layers"
    raise ConfigError(f"{KEY}: {folder} is of another model, {what}\nhint: {KEY}=ANOTHER")


def _weight_checksums(layers: Iterable[HostLayer]) -> dict[str, str]:
    """Of weights that are their own masters: they are not among the files, but of their step."""
    return {
        name: f"{zlib.crc32(_bytes_of(master)):08x}"
        for layer in layers
        for name, master in layer.masters.items()
        if layer.is_alias(name)
    }


def _bytes_of(master: Tensor) -> memoryview:
    flat = master.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _refuse_other_weights(folder: Path, theirs: dict[str, str], ours: dict[str, str]) -> None:
    different = [name for name, checksum in ours.items() if theirs.get(name) != checksum]
    if different:
        raise ConfigError(
            f"{KEY}: {folder} belongs to other weights than the model has: {different[0]} "
            f"({len(different)} of {len(ours)})\n"
            "hint: load_state_dict(…) of the run that left it, then attach_optimizer"
        )


def _check(path: Path, checksum: str) -> None:
    try:
        is_same = check_state(path) == checksum
    except (OSError, DamagedError) as error:
        raise ConfigError(f"{KEY}: {error}\nhint: go on from a checkpoint") from error
    if not is_same:
        raise ConfigError(
            f"{KEY}: a state file is of another step: {path}\nhint: go on from a checkpoint"
        )
