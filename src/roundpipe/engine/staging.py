"""How tensors travel between the host and one device, whatever memory they lie in on the host.

A copy to or from page-locked memory runs beside everything, at the speed of the link. One to or
from other memory (beyond the limit, a mapped file, what the caller gave) would keep the thread that
issues for the device waiting until the card comes to it. So it goes through locked memory:

    up     memory --thread--> block --stream--> device     free again when the stream has copied
    down   device --stream--> block --reader--> memory     free again when it has landed

What comes down *lands*: whoever waits for the action on the host copies it from the block to where
it belongs, at the latest the thread that needs the block again. The device waits for the stream's
part alone. Where nothing can be locked, or the device's memory is the host's, tensors are copied as
they are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device, Event
    from roundpipe.engine.passing import PassingBlocks
    from roundpipe.store.pages import HostPages

    # (tensor, where to, gets what the stream copies to or from) -> the copy
    _CopyOne = Callable[[Tensor, torch.device, list[Tensor]], Tensor]

NUM_BLOCKS = 3  # one is filled, one is on its way, one becomes free
BLOCK_BYTES = 8 << 20
_UP, _DOWN = "activations_up", "activations_down"
_WEIGHTS, _GRADIENTS = "weights", "gradients"


class _Use(Protocol):
    """Something that is over some time."""

    def wait(self) -> None:
        """Block until it is over."""
        ...


class Ring:
    """A few blocks used in turn: there are never more copies under way than blocks."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks = list(blocks)
        self._uses: list[_Use | None] = [None] * len(self._blocks)
        self._turn = 0
        self.block_bytes = min(block.numel() for block in self._blocks)

    def take(self) -> Tensor:
        """The next block; blocks until its last use is over."""
        use = self._uses[self._turn]
        if use is not None:
            use.wait()
        return self._blocks[self._turn]

    def give(self, until: _Use) -> None:
        """Say when the block taken last is free again."""
        self._uses[self._turn] = until
        self._turn = (self._turn + 1) % len(self._blocks)


class Landing:
    """What lies in a block once ``copied`` is complete, and where it is to go. Lands once."""

    def __init__(self, copied: Event, block: Tensor, target: Tensor) -> None:
        self._copied, self._block = copied, block
        self._target: Tensor | None = target
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether it has landed."""
        return self._target is None

    def wait(self) -> None:
        """Block until it has landed; by this thread if no other has begun."""
        self._copied.wait()
        with self._lock:
            if self._target is not None:
                self._target.copy_(self._block)
                self._target = None


class Landed:
    """The event of an action whose copies land on the host; ``copied`` is the stream's part."""

    def __init__(self, copied: Event, landings: Sequence[Landing]) -> None:
        self.copied, self._landings = copied, landings

    def is_complete(self) -> bool:
        """See Event."""
        return self.copied.is_complete() and all(landing.is_over for landing in self._landings)

    def wait(self) -> None:
        """See Event. The calling thread copies what has not landed."""
        for landing in self._landings:
            landing.wait()
        self.copied.wait()


def wait_for(device: Device, stream: str, event: Event, *, on_host: bool) -> None:
    """Make a stream wait for an action; only the host waits until it has landed."""
    if isinstance(event, Landed):
        device.wait(stream, event.copied)
        if not on_host:
            return
    device.wait(stream, event)


class Staging:
    """See the module docstring. Used by the thread that issues for ``device``.

    ``passing``: where tensors lie that pass through the host.
    """

    def __init__(self, device: Device, pages: HostPages, passing: PassingBlocks) -> None:
        self._device, self._pages, self._passing = device, pages, passing
        self._stages = device.pins and pages.locks
        self._rings: dict[str, Ring | None] = {}
        self._open: list[Landing] = []  # what has not landed yet, in order

    # ---- weights and gradients: flat, to and from where they stay

    def up(self, target: Tensor, source: Tensor) -> None:
        """Copy bytes of the host to the device. ``source`` is either locked or read on return."""
        ring = self._ring_for(_WEIGHTS, source)
        if ring is None:
            target.copy_(source, non_blocking=True)
            return
        for low, high in _pieces(source, ring.block_bytes):
            block = ring.take().narrow(0, 0, high - low)
            block.copy_(source[low:high])
            target[low:high].copy_(block, non_blocking=True)
            ring.give(self._device.record(_WEIGHTS))

    def down(self, target: Tensor, source: Tensor) -> None:
        """Copy one dimension of the device to the host, cast on the device if dtypes differ.

        The action's event, as `landed` makes it, says when ``target`` is written.
        """
        ring = self._ring_for(_GRADIENTS, target)
        if ring is None:
            target.copy_(source, non_blocking=True)
            return
        for low, high in _pieces(target, ring.block_bytes):
            num_bytes = (high - low) * target.element_size()
            block = ring.take().narrow(0, 0, num_bytes).view(target.dtype)
            block.copy_(source[low:high], non_blocking=True)
            landing = Landing(self._device.record(_GRADIENTS), block, target[low:high])
            ring.give(landing)
            self._open.append(landing)

    def landed(self, stream: str, event: Event) -> Event:
        """What ``stream`` recorded, as an event that is over when all before it has landed too."""
        if stream != _GRADIENTS or not self._open:
            return event
        self._open = [landing for landing in self._open if not landing.is_over]
        return Landed(event, tuple(self._open))

    def land(self) -> None:
        """Bring everything down to where it belongs; blocks until it is there."""
        for landing in self._open:
            landing.wait()
        self._open.clear()

    def close(self) -> None:
        """Give the blocks back; nothing is under way."""
        self._rings.clear()
        self._open.clear()
        self._passing.clear()

    # ---- activations: trees of any tensors, to memory that is theirs while they pass

    def bring_up(self, tree: Any, sizes: list[int]) -> Any:
        """A copy of a tree's tensors on the device; ``sizes`` gets the bytes of each."""
        copy = self._up_one if self._stages else _copy
        return self._bring(tree, sizes, copy, self._device.torch_device, _UP)

    def bring_down(self, tree: Any, sizes: list[int]) -> Any:
        """A copy of a tree's tensors on the host; ``sizes`` gets the bytes of each."""
        copy = self._down_one if self._stages else _copy
        return self._bring(tree, sizes, copy, torch.device("cpu"), _DOWN)

    def _bring(
        self, tree: Any, sizes: list[int], copy: _CopyOne, to: torch.device, stream: str
    ) -> Any:
        used: list[Tensor] = []

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            sizes.append(leaf.nbytes)
            return copy(leaf, to, used)

        try:
            return pytree.tree_map(one, tree)
        finally:
            if used:  # their memory is free when the stream has done what it has now
                event = self._device.record(stream)
                for tensor in used:
                    self._passing.used(tensor, event)

    def _up_one(self, leaf: Tensor, to: torch.device, used: list[Tensor]) -> Tensor:
        if leaf.device.type != "cpu" or not leaf.numel() or leaf.requires_grad:
            return _copy(leaf, to, used)
        if not self._passing.has(leaf):
            memory, events = self._passing.like(leaf)
            for event in events:
                event.wait()
            leaf = memory.copy_(leaf)
        used.append(leaf)
        return _copy(leaf, to, used)

    def _down_one(self, leaf: Tensor, to: torch.device, used: list[Tensor]) -> Tensor:
        if leaf.device != self._device.torch_device or not leaf.numel():
            return _copy(leaf, to, used)
        memory, events = self._passing.like(leaf)
        for event in events:
            self._device.wait(_DOWN, event)
        used.append(memory)
        return memory.copy_(leaf, non_blocking=True)

    def _ring_for(self, stream: str, memory: Tensor) -> Ring | None:
        """What to copy through to or from ``memory``; None: straight."""
        if not self._stages or self._pages.is_locked(memory):
            return None
        if stream not in self._rings:
            blocks = [self._pages.allocate(BLOCK_BYTES, urgent=True) for _ in range(NUM_BLOCKS)]
            locked = all(self._pages.is_locked(block) for block in blocks)
            self._rings[stream] = Ring(blocks) if locked else None
        return self._rings[stream]


def _copy(leaf: Tensor, to: torch.device, _: list[Tensor]) -> Tensor:
    return torch.empty_like(leaf, device=to).copy_(leaf, non_blocking=True)


def _pieces(tensor: Tensor, num_bytes: int) -> list[tuple[int, int]]:
    """Ranges of elements, each of at most so many bytes."""
    count, step = tensor.numel(), max(num_bytes // tensor.element_size(), 1)
    return [(low, min(low + step, count)) for low in range(0, count, step)]
