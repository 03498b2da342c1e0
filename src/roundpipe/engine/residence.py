"""A whole model's weights on one device, for as long as it generates.

    outside    embedding, head, rotary tables: one buffer, brought up once
    kept       as many blocks as there is room for, brought up once
    streamed   the other blocks, in turn, through two slots:

        slot 0   | block 5 |           | block 7 | ...
        slot 1             | block 6 |           | block 5 of the next token
                 '-- computes while block 6 is on its way

A streamed block is asked for when the model calls it, in whatever order; only the guess of what is
called next (the block after it, and after the last the first) is about order, and a wrong one costs
time alone. While room allows, packed weights of kept blocks are unpacked once, else at each use.

[Note: who waits] The model runs in the caller's thread. On a CPU device that thread computes, so it
waits for uploads itself, and whatever it has called before has been computed. Elsewhere it only
issues: it runs under the compute stream, which waits for uploads, as they do for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch

from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.uploads import Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device, Event
    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.models.generating import GeneratingTree, Values

COMPUTE, _WEIGHTS = "compute", "weights"


def run_on(device: Device, work: Callable[[], Any], *, reads: Sequence[str] = ()) -> Any:
    """Run ``work`` on the compute stream, from this thread; returns and raises what it does.

    See [Note: who waits].
    """
    if isinstance(device, CpuDevice):
        return work()
    results: list[Any] = []
    errors: list[BaseException] = []
    device.launch(
        COMPUTE,
        lambda: results.append(work()),
        reads=reads,
        label="generation",
        on_error=errors.append,
    )
    if errors:
        raise errors[0]
    return results[0]


@dataclass(eq=False)
class _Slot:
    """Device memory for one streamed block at a time. ``key`` names it to a device that checks."""

    buffer: Tensor
    key: str
    layer: int | None = None
    arrived: Event | None = None
    views: dict[int, Values] = field(default_factory=dict)  # by layer


class Residence:
    """See the module docstring. A context manager; used by one thread, on an idle engine.

    ``room``: bytes for weights, None without limit; the outside and two blocks are taken at least.
    ``newest``: weights are what masters say, where that is not published yet. Raises
    torch.OutOfMemoryError.
    """

    def __init__(
        self, model: DeviceModel, tree: GeneratingTree, *, room: int | None, newest: bool
    ) -> None:
        self._model, self._device, self._tree = model, model.device, tree
        self._newest = newest
        self._uploads = {i: Upload.of_layer(model.layers[i]) for i in tree.blocks}
        self._buffers: list[Tensor] = []
        self._errors: list[BaseException] = []
        self._last: Event | None = None
        self._slots: list[_Slot] = []
        self._current: _Slot | None = None
        self._after: dict[int, int] = {}  # streamed layer -> the one that is called after it
        try:
            with torch.inference_mode(False):  # memory made inside one could not be written later
                self._move_in(room)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def streamed(self) -> Sequence[int]:
        """The layers whose weights come up at each use, in order."""
        return tuple(self._after)

    def close(self) -> None:
        """Give the device's memory back, once nothing writes to it. Idempotent."""
        try:
            if self._last is not None:
                self._last.wait()
        finally:
            for part in (self._tree.outside, *self._tree.blocks.values()):
                part.release()
            self._slots.clear()
            self._current = None
            while self._buffers:
                self._device.free(self._buffers.pop())

    # ---- moving in

    def _move_in(self, room: int | None) -> None:
        outside = Upload.of_tensors("outside the blocks", self._tree.tensors, self._model.layers)
        self._tree.outside.bind(self._bring(outside))
        left = None if room is None else room - outside.num_bytes
        kept = most_kept({i: upload.num_bytes for i, upload in self._uploads.items()}, left)
        taken = sum(self._uploads[i].num_bytes + self._uploads[i].unpacked_bytes for i in kept)
        for index in kept:
            self._keep(index, unpack=left is None or taken <= left)
        self._stream([index for index in self._uploads if index not in kept])
        self._wait(self._last)

    def _bring(self, upload: Upload) -> Values:
        """Begin to bring up what is to stay."""
        buffer = self._allocate(upload.num_bytes)
        self._launch(upload, buffer)
        return upload.views(buffer)

    def _keep(self, index: int, *, unpack: bool) -> None:
        part, upload = self._tree.blocks[index], self._uploads[index]
        values = self._bring(upload)
        if upload.packed and unpack:
            self._wait(self._last)
            values = run_on(self._device, functools.partial(part.unpacked, values))
        part.bind(values)
        if upload.packed and not unpack:
            part.unpack_while_it_runs()

    def _stream(self, streamed: Sequence[int]) -> None:
        if not streamed:
            return
        size = max(self._uploads[index].num_bytes for index in streamed)
        self._slots = [_Slot(self._allocate(size), f"slot {turn}") for turn in (0, 1)]
        self._after = dict(zip(streamed, [*streamed[1:], streamed[0]], strict=True))
        for index in streamed:
            part = self._tree.blocks[index]
            part.before_it_runs(functools.partial(self._enter, index))
            part.keep_its_buffers()
            if self._uploads[index].packed:
                part.unpack_while_it_runs()
        self._upload(self._slots[0], streamed[0])

    def _allocate(self, num_bytes: int) -> Tensor:
        buffer = self._device.allocate(num_bytes)
        self._buffers.append(buffer)
        return buffer

    # ---- a streamed block is called

    @torch.inference_mode(False)
    def _enter(self, index: int) -> None:
        """Have a block's weights there, and the next one's on their way."""
        here = next((slot for slot in self._slots if slot.layer == index), None)
        if here is None:
            here = next(slot for slot in self._slots if slot is not self._current)
            self._upload(here, index)
        self._wait(here.arrived)
        self._current = here
        bind = functools.partial(self._tree.blocks[index].bind, self._views(here, index))
        run_on(self._device, bind, reads=(here.key,))
        there = next(slot for slot in self._slots if slot is not here)
        following = self._after[index]
        if following not in (index, there.layer):
            self._upload(there, following)

    def _views(self, slot: _Slot, index: int) -> Values:
        if index not in slot.views:
            slot.views[index] = self._uploads[index].views(slot.buffer)
        return slot.views[index]

    def _upload(self, slot: _Slot, index: int) -> None:
        """Bring a layer into a slot, once what was issued so far has computed."""
        self._device.wait(_WEIGHTS, self._device.record(COMPUTE))
        slot.layer, slot.arrived = index, self._launch(self._uploads[index], slot.buffer, slot.key)

    def _launch(self, upload: Upload, buffer: Tensor, key: str = "") -> Event:
        work = functools.partial(upload.fill, self._model, buffer, newest=self._newest)
        writes = (key,) if key else ()
        self._device.launch(
            _WEIGHTS, work, writes=writes, label=upload.label, on_error=self._errors.append
        )
        self._last = self._device.record(_WEIGHTS)
        return self._last

    def _wait(self, event: Event | None) -> None:
        """Have an upload there for what is called next. See [Note: who waits]."""
        if event is not None:
            if isinstance(self._device, CpuDevice):
                event.wait()
            else:
                self._device.wait(COMPUTE, event)
        if self._errors:
            raise self._errors[0]


def most_kept(sizes: Mapping[int, int], room: int | None) -> list[int]:
    """As many layers as stay in ``room`` bytes, the first ones, beside two slots for the others."""
    if room is None or sum(sizes.values()) <= room:
        return list(sizes)
    left = room - 2 * max(sizes.values())
    kept = []
    for index, size in sizes.items():
        left -= size
        if left < 0:
            break
        kept.append(index)
    return kept
