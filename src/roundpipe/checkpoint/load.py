"""Go on from a checkpoint: look at all of it first, then change everything.

    check (SHA-256 of every file) > fits (names, shapes, dtypes, optimizer) > put back

The first two change nothing and find whatever can be found, so a checkpoint is loaded whole or not
at all. If reading fails even so in the third, the weights are of two versions, and that is said
until others are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roundpipe.checkpoint.layer_files import LayerFiles
from roundpipe.checkpoint.manifest import Manifest, check
from roundpipe.checkpoint.snapshot import (
    FORMAT,
    STATE_FILE,
    STATE_TENSORS,
    Progress,
    class_of,
    names_of,
)
from roundpipe.checkpoint.values import decode
from roundpipe.durable import clear_leftovers
from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import read_json
from roundpipe.models.loading.shards import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from roundpipe.optim.on_disk import StateOnDisk
    from roundpipe.store.layer import HostLayer

_LARGEST_STATE = 1 << 30  # bytes of state.json
_OWN = ("implementation",)  # options that stay those of the optimizer that is there


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was found whole, and what it holds but for the layers' tensors."""

    folder: Path
    manifest: Manifest
    files: LayerFiles
    progress: Progress
    random: Tensor
    document: Mapping[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """What the caller gave when it was saved."""
        state: dict[str, Any] = self.document["state"]
        return state


def open_checkpoint(folder: Path, known: Manifest | None = None) -> Opened:
    """Read and check all of a checkpoint; raises ConfigError naming the file that is not sound.

    ``known``: see `check`.
    """
    if not folder.exists() and folder.parent.is_dir():
        clear_leftovers(folder.parent)  # a process may have died while it replaced it
    manifest = check(folder, known=known)
    if STATE_FILE not in manifest.files or STATE_TENSORS not in manifest.files:
        raise ConfigError(
            f"the checkpoint holds the model alone, nothing to go on from: {folder}\n"
            "hint: RoundPipe.from_pretrained(folder) begins anew with these weights"
        )
    raw = read_json(folder / STATE_FILE, _LARGEST_STATE)
    tensors = {}
    for name, found in read_header(folder / STATE_TENSORS).items():
        tensors[name] = torch.empty(found.shape, dtype=found.dtype, device="cpu")
        found.fill(tensors[name])
    try:
        document = decode(raw, tensors)
        paths = [folder / name for name in document["layer files"] if name in manifest.files]
        progress, random = Progress(**document["progress"]), document["random"]
        is_ours = all(
            (
                document["format"] == FORMAT,
                len(paths) == len(document["layer files"]),
                isinstance(random, Tensor),
                isinstance(document["state"], dict),
                document.keys() >= {"scheduler", "scaler"},
                _is_optimizer(document["optimizer"]),
            )
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _foreign(folder, error) from error
    if not is_ours:
        raise _foreign(folder, "of another format")
    return Opened(folder, manifest, LayerFiles(paths), progress, random, document)


def _is_optimizer(said: Any) -> bool:
    return said is None or all(
        isinstance(group["parameters"], list) and isinstance(group["options"], dict)
        for group in said["groups"]
    )


def _foreign(folder: Path, why: object) -> ConfigError:
    return ConfigError(f"not a state that can be gone on from: {folder / STATE_FILE}: {why}")


# ---- whether it fits


def require_fitting(
    opened: Opened,
    layers: Sequence[HostLayer],
    optimizer: Optimizer | None,
    **others: Any,
) -> None:
    """Raise ConfigError, naming the first difference, for a checkpoint of another training.

    ``others``: scheduler and scaler, None where there is none. Nothing but weights must fit where
    there is no optimizer.
    """
    _require_layers(opened, layers)
    if optimizer is None:
        return
    for name, here in others.items():
        there = opened.document[name]
        if (there is None) != (here is None):
            what = f"it was saved with{'out' if there is None else ''} a {name}"
            raise _other(opened, what, f"{name}={'None' if there is None else '…'}")
    kind, scheduler = opened.document.get("scheduler class"), others.get("scheduler")
    if scheduler is not None and kind != class_of(scheduler):
        what = f"its scheduler is {kind}, not {class_of(scheduler)}"
        raise _other(opened, what, "make the same scheduler, and the optimizer it was made with")
    said = opened.document["optimizer"]
    if said is None:
        raise _other(opened, "it was saved without an optimizer", "optimizer=None loads weights")
    if said.get("class") != class_of(optimizer):
        what = f"its optimizer is {said.get('class')}, not {class_of(optimizer)}"
        raise _other(opened, what, "make the same optimizer, or optimizer=None loads weights")
    names = names_of(layers)
    ours = [[names.get(p, "") for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["parameters"] for group in said["groups"]]
    if ours != theirs:
        what = f"its optimizer's groups hold other parameters: {_difference(theirs, ours)}"
        raise _other(opened, what, "make the optimizer as it was made then")
    for group, saved in zip(optimizer.param_groups, said["groups"], strict=True):
        form, there = group.get("state_dtype"), saved["options"].get("state_dtype")
        if form != there:
            what = f"its optimizer's state_dtype is {there}, not {form}"
            raise _other(opened, what, f"state_dtype={there!r}")


def _require_layers(opened: Opened, layers: Sequence[HostLayer]) -> None:
    masters = {name: m for layer in layers for name, m in layer.masters.items()}
    tensors = {name: t for layer in layers for name, t in layer.tensors.items()}
    saved = set(opened.files.names("master"))
    for name in sorted(saved ^ masters.keys()):
        where = "there and not here" if name in saved else "here and not there"
        hint = "train the same parameters of the same model: requires_grad, peft config"
        raise _other(opened, f"a parameter is trained {where}: {name}", hint)
    expected: dict[str, Tensor] = {f"master/{name}": m for name, m in masters.items()}
    for kind in ("late", "weight", "buffer"):
        for name in opened.files.names(kind):
            if name not in tensors:
                raise _other(opened, f"the model has no such tensor: {name}", "the same model")
            expected[f"{kind}/{name}"] = tensors[name]
    for key, tensor in expected.items():
        found = opened.files.tensors[key]
        if found.shape != tuple(tensor.shape) or found.dtype != tensor.dtype:
            there, here = ((tuple(t.shape), str(t.dtype)[6:]) for t in (found, tensor))
            kind, _, name = key.partition("/")
            hint = "the same model, dtype and optim_dtype as then"
            raise _other(opened, f"{name} ({kind}) is {there} there, {here} here", hint)
    _require_own(opened, layers)


def _require_own(opened: Opened, layers: Sequence[HostLayer]) -> None:
    """Raise for a weight that was trained once where it lies in a file or in 4 bits now."""
    for layer in layers:
        for name in opened.files.names("weight"):
            if layer.held is not None and name in layer.held:
                hint = "from_pretrained(…, mapped=False, quantization=None)"
                raise _other(opened, f"it has a value of its own for a base weight: {name}", hint)


def _difference(theirs: list[list[str]], ours: list[list[str]]) -> str:
    if len(theirs) != len(ours):
        return f"{len(theirs)} groups there, {len(ours)} here"
    for number, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        if there != here:
            first = sorted(set(there) ^ set(here))[:1] or ["in another order"]
            return f"group {number}, {first[0]}"
    return ""


def _other(opened: Opened, what: str, hint: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint is of another training: {opened.folder}: {what}\nhint: {hint}"
    )


# ---- putting it back


@torch.no_grad()
def put_back_weights(
    opened: Opened,
    layers: Sequence[HostLayer],
    optimizer: Optimizer | None,
    on_disk: StateOnDisk | None,
) -> None:
    """Read all layers' tensors into their places; nothing may be under way.

    With ``optimizer`` its state too, and at staleness 1 what the next call is to read. Takes new
    memory for the optimizer's state alone, whose old is let go of before.
    """
    is_late = optimizer is not None and opened.progress.staleness == 1
    for layer in layers:
        layer.wait_unread()
        if on_disk is not None:
            on_disk.bring(layer.index)
        if is_late:
            layer.split_masters()
        _fill_weights(opened.files, layer)
        if optimizer is not None:
            _fill_state(opened.files, layer, optimizer)
        layer.publish()
        for name in layer.trainable if is_late else ():
            opened.files.fill(f"late/{name}", layer.weights.views[name])
        if on_disk is not None:
            on_disk.leave(layer.index, published=not is_late)


def _fill_weights(files: LayerFiles, layer: HostLayer) -> None:
    for name, master in layer.masters.items():
        if name in layer.master_store.away:  # it is made of the weight at its first update
            files.fill(f"master/{name}", layer.weights.views[name])
        else:
            files.fill(f"master/{name}", master.detach())
    layer.reload_masters(layer.master_store.away)
    for kind in ("weight", "buffer"):
        for name in files.names(kind):
            if name in layer.weights.views:
                files.fill(f"{kind}/{name}", layer.weights.views[name])


def _fill_state(files: LayerFiles, layer: HostLayer, optimizer: Optimizer) -> None:
    for name, parameter in {**layer.retired_masters, **layer.masters}.items():
        optimizer.state.pop(parameter, None)
        entry = files.entry(name)
        if entry:
            optimizer.state[parameter] = entry


def put_back_options(opened: Opened, optimizer: Optimizer) -> list[str]:
    """Give groups their hyperparameters; returns who updated then, where that is another now."""
    others = set()
    for group, saved in zip(
        optimizer.param_groups, opened.document["optimizer"]["groups"], strict=True
    ):
        own = {key: group[key] for key in _OWN if key in group}
        others |= {str(saved["options"].get(key)) for key in own} - {str(v) for v in own.values()}
        params = group["params"]
        group.clear()
        group.update({"params": params, **saved["options"], **own})
    return sorted(others)
