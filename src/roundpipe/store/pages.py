"""Host memory in whole pages, page-locked at exact size as far as that is wanted and possible.

A `Block` is mapped by itself: it begins with a page, ends with one, and goes back to the system at
once when its last view goes. A driver page-locks whole pages, so nothing else may lie in them, and
locking takes as much as was asked for and not the next power of two.

`HostPages` decides which blocks are locked. Who comes first is served first: weights in the order
of the layers, then gradients, then partial sums. What is needed to copy from and to memory that is
not locked (staging buffers) and what passes through (boundary activations) comes last and needs it
most, so a little is locked beforehand for it and released when it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import threading
import weakref
from typing import TYPE_CHECKING

import torch

from roundpipe.device.host_memory import host_memory, is_wsl
from roundpipe.device.numa import interleave, nodes_to_spread_over
from roundpipe.errors import DeviceError, HostMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_HUGE = 1 << 21  # a huge page: fewer of them to lock, and to look up
_LOOK_FIRST = 1 << 26  # bytes from which on a block asks whether there is room for it
_SHARE = 0.9  # of host memory; without any left for others the system stands still
_NOTHING = 1 << 62
_KEPT = 192 << 20  # bytes locked beforehand, see the module docstring


class Block:
    """``num_bytes`` of host memory in pages of its own: ``tensor`` is uint8, not initialised.

    Raises HostMemoryError. Pages become resident as they are written.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._undo: list[Callable[[], None]] = []
        if num_bytes == 0:
            self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        mapping = _mapped(self.whole_bytes)
        view = memoryview(mapping)[:num_bytes]
        # The tensor keeps the view, the view's end undoes the locking, and then the mapping goes.
        end = weakref.finalize(view, _end, self._undo, mapping)
        end.atexit = False
        self.tensor = torch.frombuffer(view, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Where it begins: a multiple of the page size, or 0 without bytes."""
        return self.tensor.data_ptr()

    @property
    def whole_bytes(self) -> int:
        """Its size in whole pages."""
        return -(-self.num_bytes // PAGE) * PAGE

    def before_end(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the last view has gone and the memory has not; in any thread."""
        self._undo.append(undo)


class HostPages:
    """Spreads blocks over memory nodes and page-locks them, for all devices of a pool.

    ``device``: one that gains from page-locked memory, None if none does. ``limit_bytes``: how much
    may be locked; None is nine tenths of the machine's. Says once, as a warning, why not all is.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        limit_bytes: int | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        self._device, self._nodes = device, tuple(nodes)
        if device is None:
            limit_bytes = 0
        self._limit = _usable() if limit_bytes is None else limit_bytes
        self._locked: dict[int, int] = {}  # address -> bytes
        self._refused = _NOTHING  # the least that was refused: no use in asking again
        self._kept: Block | None = None
        self._has_kept = self._has_said = False
        self._lock = threading.Lock()

    @classmethod
    def for_devices(cls, devices: Sequence[Device], *, limit_bytes: int | None = None) -> HostPages:
        """For what ``devices`` copy from and to; looks at how the machine is made."""
        first = next((device for device in devices if device.pins), None)
        return cls(first, limit_bytes=limit_bytes, nodes=nodes_to_spread_over())

    @property
    def locks(self) -> bool:
        """Whether anything is to be page-locked."""
        return self._device is not None and self._limit > 0

    @property
    def locked_bytes(self) -> int:
        """What is page-locked now, in whole pages."""
        return sum(tuple(self._locked.values()))

    def is_locked(self, tensor: Tensor) -> bool:
        """Whether a view of a block is page-locked."""
        return bool(self._locked) and tensor.untyped_storage().data_ptr() in self._locked

    def adopt(self, block: Block | None, *, urgent: bool = False) -> bool:
        """Spread a block over the nodes and page-lock it if there is room; whether it is locked.

        Best before it is filled. ``urgent``: it may have what was locked beforehand. Nothing is
        done for None: memory of another kind, a mapped file's.
        """
        if block is None or block.num_bytes == 0:
            return False
        interleave(block.address, block.whole_bytes, self._nodes)
        if not self.locks:
            return False
        with self._lock:
            if urgent and self._kept is not None:
                self._kept, self._refused = None, _NOTHING
            if not urgent and not self._has_kept:
                self._keep_some()
            return block.address in self._locked or self._try(block)

    def allocate(self, num_bytes: int, *, urgent: bool = False) -> Tensor:
        """A new block's tensor, see `adopt`. Raises HostMemoryError."""
        block = Block(num_bytes)
        self.adopt(block, urgent=urgent)
        return block.tensor

    def close(self) -> None:
        """Unlock everything; the memory stays. Nothing may be copying. Idempotent."""
        self._kept = None
        for address in tuple(self._locked):
            self._unlock(address)
        self._device = None

    def _keep_some(self) -> None:
        self._has_kept = True
        block = Block(min(_KEPT, self._limit // 4) // PAGE * PAGE)
        if block.num_bytes and self._try(block):
            self._kept = block

    def _try(self, block: Block) -> bool:
        """Lock a block; under the lock."""
        assert self._device is not None
        num_bytes = block.whole_bytes
        if num_bytes >= self._refused:
            return False
        if self.locked_bytes + num_bytes > self._limit:
            self._say(f"pinned_memory_limit is reached: {self._limit:,}", "raise the limit")
            return False
        try:
            self._device.register(block.address, num_bytes)
        except DeviceError as error:
            self._refused = num_bytes
            self._say(f"the driver refuses {num_bytes:,} bytes more: {error}", _way_out())
            return False
        self._locked[block.address] = num_bytes
        block.before_end(functools.partial(self._unlock, block.address))
        return True

    def _unlock(self, address: int) -> None:
        """Runs wherever a block ends, perhaps in the middle of anything: takes no lock."""
        if self._locked.pop(address, None) is not None and self._device is not None:
            try:
                self._device.unregister(address)
            except DeviceError:
                logger.exception("unlocking host memory")

    def _say(self, why: str, way_out: str) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "host memory is page-locked only in part, %s bytes so far: %s; the rest is copied "
                "through staging buffers, which is slower\nhint: %s",
                f"{self.locked_bytes:,}",
                why,
                way_out,
            )


def _end(undo: list[Callable[[], None]], mapping: mmap.mmap) -> None:
    """The last view has gone. The mapping goes when this returns."""
    for each in undo:
        each()
    del mapping


def _mapped(num_bytes: int) -> mmap.mmap:
    """Fresh pages of our own; raises HostMemoryError."""
    if num_bytes >= _LOOK_FIRST:
        memory = host_memory()
        if memory is not None and num_bytes > memory.free_bytes + memory.swap_bytes:
            raise _too_much(num_bytes)
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # not a Unix
            return mmap.mmap(-1, num_bytes)
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError) as error:
        raise _too_much(num_bytes) from error
    if num_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _too_much(num_bytes: int) -> HostMemoryError:
    memory = host_memory()
    free = "free bytes are not known" if memory is None else f"{memory.free_bytes:,} are free"
    limit = f" ({memory.limited_by})" if memory is not None and memory.limited_by else ""
    return HostMemoryError(
        f"out of host memory: {num_bytes:,} bytes are needed, {free}{limit}\n"
        "hint: optim_dtype=torch.bfloat16 halves master weights and moments, adapters (LoRA) need "
        "none for the base"
    )


def _usable() -> int:
    memory = host_memory()
    return 1 << 62 if memory is None else int(memory.usable_bytes * _SHARE)


def _way_out() -> str:
    if is_wsl():
        return "Windows limits what WSL may lock; Linux by itself does not"
    return "free host memory, or set pinned_memory_limit to what is locked now to be told no more"
