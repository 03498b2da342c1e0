"""Optimizer state and master weights in files, for machines that are short of memory.

A layer's state is in memory while the layer is updated, and in a file between updates:

    layer 4   bring (wait for its file) > update > leave   >  write behind the front
    layer 5                               bring > update > ...
    layer 6   read ahead of the front

One thread reads, one writes; at most ``ahead`` layers are read early and two are being written, so
memory holds the state of ``ahead + 3`` layers. Which layer comes next is learnt from the step
before. Masters leave only where the update has published them: at staleness 1 they stay in memory
and moments alone leave. Weights that are their own masters (fp32) stay, and a folder is resumed
from only with the very weights it was closed with.

[Note: what a folder is worth] A file is whole or refused (`roundpipe.optim.state_file`), but files
of different layers may be of different steps: a process that dies in the middle of a step leaves
such a folder. So the folder has a manifest only while it is *closed*: `close` writes it, the first
file written afterwards removes it. Only a closed folder is ever resumed from; a crash is what
checkpoints are for.
"""

from __future__ import annotations

import contextlib
import shutil
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.optim.manifest import (
    KEY,
    read_manifest,
    refuse_state,
    remove_manifest,
    state_path,
    write_manifest,
)
from roundpipe.optim.state_file import Content, DamagedError, read_state, write_state
from roundpipe.store.folder_lock import lock_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from roundpipe.store.layer import HostLayer

_MASTER = "master"
_MOST_WRITES = 2  # layers that wait to be written
_PLAIN = (bool, int, float, str, type(None))


@dataclass(eq=False)
class _Away:
    """A layer's state that left the optimizer. In memory as well until it is written."""

    path: Path
    content: Content | None = None
    written: Future[None] | None = None
    coming: Future[Content] | None = None


class StateOnDisk:
    """The state of one optimizer over ``layers``, in ``folder``, which is this object's alone.

    ``resume``: take over what an earlier object left in the folder when it was closed: state and
    masters, from which the working weights are written. Without it the folder must hold no state.
    Raises ConfigError for a folder that a live process uses, that holds state although ``resume``
    is False, that holds none or that of another model although it is True, or that was not closed
    or is damaged: nothing has changed then.
    """

    def __init__(
        self,
        folder: Path,
        optimizer: Optimizer,
        layers: Sequence[HostLayer],
        *,
        resume: bool = False,
        ahead: int = 2,
    ) -> None:
        self.folder = folder
        self._optimizer = optimizer
        self._layers = {layer.index: layer for layer in layers}
        self._ahead = ahead
        self._away: dict[int, _Away] = {}
        self._writing: deque[tuple[int, _Away]] = deque()
        self._next: dict[int, int] = {}  # the layer after each, as in the step before
        self._last: int | None = None
        self._lent: list[Tensor] = []
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            undo.enter_context(lock_folder(folder, key=KEY))
            if resume:
                self._take_over(read_manifest(folder, optimizer, layers))
            else:
                refuse_state(folder)
            self._reader = ThreadPoolExecutor(1, "roundpipe state reader")
            self._writer = ThreadPoolExecutor(1, "roundpipe state writer")
            for threads in (self._reader, self._writer):  # not waited for: see the finalizer
                undo.callback(threads.shutdown, wait=False)
            # It may run in any thread, the writer's own too.
            self._finalizer = weakref.finalize(self, undo.pop_all().close)
        self._finalizer.atexit = False  # executors end by themselves
        for index in self._layers:  # masters that are in memory now follow their first update
            self.leave(index, published=False)
        optimizer.register_state_dict_pre_hook(self._lend)
        optimizer.register_state_dict_post_hook(self._take_back)
        optimizer.register_load_state_dict_post_hook(self._take_loaded)

    def __repr__(self) -> str:
        return f"StateOnDisk({str(self.folder)!r}, {len(self._away)} layers away)"

    # ---- around a layer's update

    def bring(self, index: int) -> None:
        """Have a layer's state and masters in memory; blocks until they are read.

        Raises RoundPipeError, naming the file, if it is not what was written.
        """
        away = self._away.get(index)
        content = Content()
        if away is not None:
            coming, away.coming = away.coming, None
            content = _fetch(away) if coming is None else coming.result()
        self._put_back(index, content)
        self._away.pop(index, None)
        self._read_ahead(index)

    def leave(self, index: int, *, published: bool) -> None:
        """Send a layer's state away, and its masters if they are ``published``.

        Blocks while two other layers wait to be written. Raises ConfigError if one of them could
        not be: its state is in memory then and nothing is lost.
        """
        if index in self._away:
            return
        content = self._take_out(index, published=published)
        if not content.tensors and not content.plain:
            return
        remove_manifest(self.folder)
        away = _Away(state_path(self.folder, self._layers[index]), content)
        away.written = self._writer.submit(_write, away)
        self._away[index] = away
        self._writing.append((index, away))
        self._settle(_MOST_WRITES)

    # ---- all of it

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        """A layer's state by ``parameter name.key``, key ``master`` for masters that are away.

        Reads it if it is away, and keeps nothing of it. The layer must not be being updated.
        """
        return self.content(index).tensors

    def content(self, index: int) -> Content:
        """The same, and what is not a tensor beside it."""
        away = self._away.get(index)
        here = Content(*self._state_of(self._layers[index]))
        if away is None:
            return here
        there = _fetch(away)
        return Content({**there.tensors, **here.tensors}, {**there.plain, **here.plain})

    def close(self, *, is_whole: bool = True) -> None:
        """Write what is in memory, wait for it, and leave a folder that can be resumed from.

        No update may be under way. Idempotent. Afterwards ``optimizer.state_dict()`` still reads
        the files; updates are not possible. ``is_whole=False``: layers are not of one step, or one
        is being updated and will never be done; nothing is written and nobody can resume.
        """
        if not self._finalizer.alive:
            return
        try:
            if not is_whole:
                remove_manifest(self.folder)
                return
            for index, layer in self._layers.items():
                layer.publish()
                if self._is_partly_here(layer):
                    self.bring(index)
                self.leave(index, published=True)
            self._settle(0)
            write_manifest(self.folder, self._optimizer, tuple(self._layers.values()))
        finally:
            self._finalizer()

    # ---- inside

    def _take_out(self, index: int, *, published: bool) -> Content:
        layer = self._layers[index]
        tensors, plain = self._state_of(layer)
        for parameter in _parameters(layer).values():
            self._optimizer.state.pop(parameter, None)
        if published:
            taken = layer.master_store.take_away()
            tensors |= {f"{name}.{_MASTER}": value for name, value in taken.items()}
        return Content(tensors, plain)

    def _state_of(self, layer: HostLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors of a layer's state, and whatever else is in it."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        for name, parameter in _parameters(layer).items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                assert key != _MASTER, f"a key of ours: {key}"
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}.{key}"] = value
                elif isinstance(value, _PLAIN):
                    plain[f"{name}.{key}"] = value
                else:
                    raise ConfigError(
                        f"{KEY}: state that is neither a tensor nor a number: {key} of "
                        f"{type(self._optimizer).__name__}\nhint: {KEY}=None"
                    )
        return tensors, plain

    def _is_partly_here(self, layer: HostLayer) -> bool:
        """Whether masters are in memory (staleness 1) or state (just loaded) that files lack."""
        store = layer.master_store
        if any(not store.is_alias(name) for name in store.parameters.keys() - store.away):
            return True
        return any(self._state_of(layer))

    def _put_back(self, index: int, content: Content) -> None:
        layer = self._layers[index]
        layer.master_store.bring_back(_masters_in(content))
        self._give(layer, content)

    def _give(self, layer: HostLayer, content: Content) -> list[Tensor]:
        """Put state into the optimizer; return the parameters that got some."""
        parameters = _parameters(layer)
        given: dict[Tensor, None] = {}
        for full, value in (*content.tensors.items(), *content.plain.items()):
            name, _, key = full.rpartition(".")
            if key != _MASTER:
                self._optimizer.state[parameters[name]][key] = value
                given[parameters[name]] = None
        return list(given)

    def _read_ahead(self, index: int) -> None:
        """Begin to read the layers that come after ``index``, as far as the step before tells."""
        if self._last is not None and self._last != index:
            self._next[self._last] = index
        self._last = following = index
        for _ in range(self._ahead):
            if following not in self._next:
                return
            following = self._next[following]
            away = self._away.get(following)
            are_read = sum(each.coming is not None for each in self._away.values())
            if away is not None and away.coming is None and are_read < self._ahead:
                away.coming = self._reader.submit(_fetch, away)

    def _settle(self, most: int) -> None:
        """Wait until at most ``most`` layers are unwritten; raise what failed, once."""
        while len(self._writing) > most:
            index, away = self._writing.popleft()
            assert away.written is not None
            error = away.written.exception()
            if error is None:
                continue
            if self._away.get(index) is away:
                self._put_back(index, _fetch(away))
                del self._away[index]
            if not isinstance(error, OSError):
                raise error
            free = shutil.disk_usage(self.folder).free
            raise ConfigError(
                f"{KEY}: {away.path.name} could not be written to {self.folder} "
                f"({free >> 20} MiB free): {error}\nhint: {KEY}=ANOTHER"
            ) from error

    @torch.no_grad()
    def _take_over(self, files: Mapping[int, Path]) -> None:
        """Begin with the files of an earlier run; working weights are written from its masters."""
        for index, path in files.items():
            layer, content = self._layers[index], read_state(path)
            masters = _masters_in(content)
            layer.master_store.bring_back(masters)
            for name, value in masters.items():
                layer.masters[name].copy_(value)
            layer.publish()
            if masters.keys() == {n for n in layer.masters if not layer.is_alias(n)}:
                layer.master_store.take_away()
            self._away[index] = _Away(path)

    # ---- state_dict of the optimizer

    def _lend(self, optimizer: Optimizer) -> None:
        """Before ``state_dict``: all state in memory, which may be more than there is."""
        for index, away in self._away.items():
            self._lent += self._give(self._layers[index], _fetch(away))

    def _take_back(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for parameter in self._lent:
            optimizer.state.pop(parameter, None)
        self._lent.clear()

    def _take_loaded(self, optimizer: Optimizer) -> None:
        """After ``load_state_dict``: state in files is that of before."""
        loaded = {key: optimizer.state.pop(key) for key in list(optimizer.state)}
        for index, layer in self._layers.items():
            are_away = bool(layer.master_store.away)
            self.bring(index)
            for parameter in _parameters(layer).values():
                optimizer.state.pop(parameter, None)
                if parameter in loaded:
                    optimizer.state[parameter] = loaded.pop(parameter)
            self.leave(index, published=are_away)
        optimizer.state.update(loaded)


def _parameters(layer: HostLayer) -> dict[str, nn.Parameter]:
    """The masters whose state may be held, frozen ones too: they may be trained again."""
    return {**layer.retired_masters, **layer.masters}


def _masters_in(content: Content) -> dict[str, Tensor]:
    end = f".{_MASTER}"
    return {n.removesuffix(end): t for n, t in content.tensors.items() if n.endswith(end)}


def _write(away: _Away) -> None:
    assert away.content is not None
    write_state(away.path, away.content)
    away.content = None


def _fetch(away: _Away) -> Content:
    """A layer's state, from memory if it could not be written."""
    if away.written is not None and away.written.exception() is not None:
        assert away.content is not None
        return away.content
    try:
        return read_state(away.path)
    except DamagedError as error:
        raise RoundPipeError(f"{error}\nhint: go on from the last checkpoint") from error
