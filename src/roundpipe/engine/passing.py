"""Host memory for what passes through: boundary activations, their gradients, inputs, results.

A copy between a card and memory that is not page-locked keeps the host's thread waiting until the
card comes to it, so all that passes lies in locked blocks. They are made as large as the first
tensor that needed them and used again, step after step.

[Note: when a block is free again] A tensor in a block is handed on like any other; nobody says that
it is done with. When its last view has gone, the block comes back with the events of the copies
that were put on streams for it (`PassingBlocks.used`). It is given to someone else when these have
completed, or, if so many blocks are already waiting for that, with the events that the new owner's
stream is to wait for (order rule 5). What a step that failed leaves behind comes back the same way.

So there are never more blocks than twice those held at once and a few, and as each is used in turn,
one that was not used for long is of a size that nobody needs any more.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from roundpipe.store.pages import PAGE, Block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roundpipe.device.api import Event
    from roundpipe.store.pages import HostPages

_FEW = 4
_LONG = 8  # times that every block could have been taken


@dataclass(eq=False)
class _Berth:
    """A block and its last uses. ``taken``: which take of all it was given away in."""

    block: Block
    events: list[Event] = field(default_factory=list)
    taken: int = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing copies to or from it any more."""
        while self.events and self.events[0].is_complete():
            self.events.pop(0)
        return not self.events


class PassingBlocks:
    """See the module docstring. Used by the threads of all devices of one engine."""

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages
        self._free: list[_Berth] = []  # the longest free first
        self._held: dict[int, _Berth] = {}  # by address
        self._returned: deque[_Berth] = deque()  # appended to wherever a tensor ends: no lock
        self._most_held = self._num_taken = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, free or not."""
        with self._lock:
            self._collect()
            berths = (*self._free, *self._held.values())
            return sum(berth.block.whole_bytes for berth in berths)

    def like(self, tensor: Tensor) -> tuple[Tensor, Sequence[Event]]:
        """Memory on the host for a copy of ``tensor``, with its strides, and what to wait for.

        The events are those of copies that may still read it: whoever writes waits for them.
        """
        flat, events = self._take(tensor.numel() * tensor.element_size())
        if tensor.is_contiguous():
            return flat.view(tensor.dtype).view(tensor.shape), events
        strides = torch.empty_like(tensor, device="meta").stride()
        return flat.view(tensor.dtype).as_strided(tensor.shape, strides), events

    def used(self, tensor: Tensor, event: Event) -> bool:
        """Note that ``tensor`` is copied to or from until ``event``; False if it is none of ours.

        To be called while somebody still holds it.
        """
        berth = self._held.get(tensor.untyped_storage().data_ptr())
        if berth is None:
            return False
        berth.events.append(event)
        return True

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in one of the blocks."""
        return tensor.untyped_storage().data_ptr() in self._held

    def clear(self) -> None:
        """Give free blocks back; those that are held go when they come back."""
        with self._lock:
            self._collect()
            self._free.clear()

    def _take(self, num_bytes: int) -> tuple[Tensor, Sequence[Event]]:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), ()
        with self._lock:
            self._collect()
            self._num_taken += 1
            berth = self._fitting(num_bytes)
            if berth is None:
                berth = _Berth(Block(num_bytes))
                self._pages.adopt(berth.block, urgent=True)
            events = tuple(berth.events)
            berth.events.clear()
            berth.taken = self._num_taken
            self._held[berth.block.address] = berth
            self._most_held = max(self._most_held, len(self._held))
        view = memoryview(berth.block.tensor.numpy())[:num_bytes]  # type: ignore[arg-type]
        end = weakref.finalize(view, self._returned.append, berth)
        end.atexit = False
        return torch.frombuffer(view, dtype=torch.uint8), events

    def _collect(self) -> None:
        """Take back what has ended, and give up what was not used for long."""
        while self._returned:
            berth = self._returned.popleft()
            del self._held[berth.block.address]
            self._free.append(berth)
        num_blocks = len(self._free) + len(self._held)
        old = self._num_taken - _LONG * num_blocks - 64
        if self._free and min(berth.taken for berth in self._free) < old:
            self._free = [b for b in self._free if b.taken >= old or not b.is_done]

    def _fitting(self, num_bytes: int) -> _Berth | None:
        """The smallest free block that is large enough, and not far too large."""
        most = max(2 * num_bytes, PAGE)
        fitting = [b for b in self._free if num_bytes <= b.block.num_bytes <= most]
        fitting.sort(key=lambda berth: berth.block.num_bytes)
        best = next((berth for berth in fitting if berth.is_done), None)
        if best is None and len(fitting) >= max(_FEW, self._most_held):
            best = fitting[0]
        if best is not None:
            self._free.remove(best)
        return best
