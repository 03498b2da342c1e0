"""Write a checkpoint: layers first, so that training can change them; then all else.

    1  layer files         from memory that training uses, each layer before its next update
    2  state               taken down before
    3  model or adapter    as Hugging Face writes it, from the files of 1, or memory if frozen
    4  the caller's files  tokenizer and the like
    5  manifest            size and SHA-256 of every file, then the folder gets its name

From 2 on nobody waits for the writer, and nothing that training does changes what it writes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roundpipe.checkpoint.layer_files import LayerFiles, write_layers
from roundpipe.checkpoint.manifest import MANIFEST, Manifest, files_in
from roundpipe.checkpoint.snapshot import STATE_FILE, STATE_TENSORS, Snapshot
from roundpipe.durable import fingerprint, sync, whole_folder, write_new
from roundpipe.errors import ConfigError
from roundpipe.models.loading.write_shards import write_shard
from roundpipe.models.saving import is_of_transformers, save
from roundpipe.store.build import NewestState
from roundpipe.store.freed import FreedMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

    from roundpipe.durable import Fingerprint

MODEL_FILE = "model.safetensors"


def write_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    about: Mapping[str, Any],
    *,
    beside: Callable[[Path], None] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Write ``snapshot`` to ``folder``, which is there whole when this returns, or not at all.

    ``beside`` may write more files into the folder that it is given. ``progress``: see
    `write_layers`. Lets all layers go, however it ends. Raises ConfigError where the disk fails,
    and what `write_layers` and ``beside`` raise.
    """
    try:
        with _told_of_disk(folder), whole_folder(folder) as place:
            files = dict(write_layers(place, snapshot.keepers, progress))
            snapshot.end()
            weights = SavedState(snapshot, LayerFiles([place / name for name in files]))
            text = json.dumps({**snapshot.document, "layer files": [*files]}, allow_nan=False)
            files[STATE_FILE] = write_new(place / STATE_FILE, text)
            bare = {name: tensor.to("meta") for name, tensor in snapshot.tensors.items()}
            files[STATE_TENSORS] = write_shard(place / STATE_TENSORS, bare, [snapshot.tensors])
            files |= write_model(place, snapshot.model, weights)
            _finish(place, files, about, beside)
    finally:
        snapshot.end()


def write_model_only(
    folder: Path,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    about: Mapping[str, Any],
    *,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint of weights alone, which nobody can go on from exactly."""
    with _told_of_disk(folder), whole_folder(folder) as place:
        _finish(place, write_model(place, model, weights), about, beside)


def write_model(
    folder: Path, model: nn.Module, weights: Mapping[str, Tensor]
) -> dict[str, Fingerprint]:
    """Write weights as stock libraries load them; of a module of nobody's by its own names."""
    if is_of_transformers(model):
        return save(folder, model, weights)
    held = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in held.items():
        if isinstance(tensor, Tensor):
            first.setdefault(id(tensor), name)
    names = list(first.values())
    bare = {name: weights[name].to("meta") for name in names}
    parts = ({name: weights[name]} for name in names)
    return {MODEL_FILE: write_shard(folder / MODEL_FILE, bare, parts)}


def _finish(
    place: Path,
    files: dict[str, Fingerprint],
    about: Mapping[str, Any],
    beside: Callable[[Path], None] | None,
) -> None:
    """The caller's files, the manifest, and everything on the disk."""
    if beside is not None:
        beside(place)
    present = set(files_in(place))
    if gone := files.keys() - present:
        raise ConfigError(f"a file of a checkpoint was removed while it was written: {min(gone)}")
    usual = (place / next(iter(files))).stat().st_mode & 0o777
    for name in sorted(present - files.keys()):
        path = place / name
        if name == MANIFEST:
            raise ConfigError(f"a checkpoint's own file was written beside it: {name}")
        path.chmod(usual)  # some libraries let only the owner read theirs
        sync(path)
        files[name] = fingerprint(path)
    for path in place.rglob("*"):
        if path.is_dir():
            sync(path)
    step = about.get("step")
    Manifest(step if isinstance(step, int) else None, about, files).write(place)


class SavedState(Mapping[str, Any]):
    """The weights of a snapshot by the model's own names: each read when it is asked for.

    What is trained comes from the layer files, cast to the working dtype as publishing does it; so
    it is of the step that was saved, whatever training does meanwhile.
    """

    def __init__(self, snapshot: Snapshot, files: LayerFiles) -> None:
        self._live = NewestState(snapshot.model, snapshot.layers)
        self._files = files
        self._names = {
            id(layer.tensors[name]): name for layer in snapshot.layers for name in layer.tensors
        }
        self._held = snapshot.model.state_dict(keep_vars=True)
        self._freed = FreedMemory()  # of what was read before, and written since

    def __getitem__(self, name: str) -> Any:
        tensor = self._held[name]
        own = self._names.get(id(tensor))
        for kind in ("master", "weight", "buffer"):
            if own is not None and f"{kind}/{own}" in self._files.tensors:
                self._freed.add(tensor.nbytes)
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._files.fill(f"{kind}/{own}", value)
                return value
        return self._live[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


@contextlib.contextmanager
def _told_of_disk(folder: Path) -> Iterator[None]:
    """Say what the disk's failure means."""
    try:
        yield
    except OSError as error:
        room = ""
        with contextlib.suppress(OSError):
            room = f" ({shutil.disk_usage(folder.parent).free >> 20} MiB free)"
        raise ConfigError(
            f"the checkpoint could not be written: {folder}{room}: {error.strerror or error}\n"
            "hint: make room and save again; what was there before is as it was"
        ) from error
