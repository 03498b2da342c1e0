"""The gradients of one layer on the host, from their arrival until the optimizer has read them.

Two policies. A layer with one backward visit per step downloads its finished gradient in the
working dtype. A layer with several (rounds, calls, a replicated stage, a parameter that two layers
read) gets *partial sums* in fp32 and adds them here, in fp32: 256 tiny bf16 contributions added in
bf16 would vanish. A name that is not in `received` has no gradient this step; what its bytes hold
then means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import torch

from roundpipe.store.pages import HostPages
from roundpipe.store.segment import ALIGNMENT, Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


_PIECE = 1 << 16  # elements: a piece of the sum and of one addend stay in a core's cache


class GradientState(Enum):
    """Where a layer's gradients are in their step. Clearing leads back from any state."""

    EMPTY = "nothing has arrived in this step"
    FILLING = "some parameters have a gradient, more may arrive"
    TAKEN = "the optimizer reads them: nothing may arrive before they are cleared"


def partial_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a ``dtype`` parameter add up: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def widened(layout: Layout) -> Layout:
    """The layout of partial sums, with the same gaps in proportion.

    So what lies between two tensors of one dtype is cast with them: see `runs`. Ends are aligned
    from byte 0 on, so a dtype must begin where its own alignment does.
    """
    wide = Layout.of(())
    for dtype, group in groupby(layout.entries, key=itemgetter(2)):
        sums = partial_sum_dtype(dtype)
        alignment = ALIGNMENT * sums.itemsize // dtype.itemsize
        begun = replace(wide, num_bytes=-(-wide.num_bytes // alignment) * alignment)
        wide = begun.followed_by(
            ((name, shape, sums) for name, shape, _ in group), alignment=alignment
        )
    return wide


@dataclass(frozen=True)
class Run:
    """Tensors of one dtype in two layouts that differ in dtype only: one cast moves them all."""

    start: int  # byte in the wide layout
    num_bytes: int  # there
    narrow_start: int
    wide: torch.dtype
    narrow: torch.dtype

    def cut(self, wide: Tensor, narrow: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
        """What lies in bytes ``low`` to ``high`` of the wide buffer, in both, typed."""
        a, b = (min(max(at - self.start, 0), self.num_bytes) for at in (low, high))
        step, size = self.wide.itemsize, self.narrow.itemsize
        first, count = a // step, (b - a) // step
        from_wide = wide.narrow(0, self.start + a, count * step)
        to_narrow = narrow.narrow(0, self.narrow_start + first * size, count * size)
        return from_wide.view(self.wide), to_narrow.view(self.narrow)


def runs(layout: Layout) -> list[Run]:
    """How a layout of gradients lies in that of its partial sums, a run for each dtype."""
    wide, found = widened(layout), []
    for dtype, group in groupby(layout.slices, key=attrgetter("dtype")):
        places = list(group)
        first = wide.by_name[places[0].name]
        end = places[-1].offset + places[-1].num_bytes
        count = (end - places[0].offset) // dtype.itemsize
        size = count * first.dtype.itemsize
        found.append(Run(first.offset, size, places[0].offset, first.dtype, dtype))
    return found


class Gradients:
    """A segment over a layer's trainable parameters, allocated when first needed.

    Calls for one layer are ordered by the schedule; adding in visit order gives the same bits
    every time. ``pages``: page-locks the segment.
    """

    def __init__(self, trainable: Layout, pages: HostPages | None = None) -> None:
        self.state = GradientState.EMPTY
        self.received: set[str] = set()
        self.segment: Segment | None = None
        self._pages = pages or HostPages()
        self._layouts = {False: trainable, True: widened(trainable)}
        self.runs = runs(trainable)

    def layout(self, *, partial_sums: bool) -> Layout:
        """Where gradients lie: in fp32 if they arrive as partial sums, else in working dtype."""
        return self._layouts[partial_sums]

    def allocate(self, *, partial_sums: bool) -> Segment:
        """The segment to download into, made or made anew if the policy changed.

        Gradients already received are kept: widened to fp32 where partial sums now follow; never
        narrowed (the segment then keeps the partial sums' layout: look at ``segment.layout``).
        """
        old, layout = self.segment, self._layouts[partial_sums]
        if old is not None and (old.layout == layout or (self.received and not partial_sums)):
            return old
        self.segment = Segment(layout)
        self._pages.adopt(self.segment.block)
        for name in self.received:
            assert old is not None, f"received without a segment: {name}"
            self.segment.views[name].copy_(old.views[name])
        return self.segment

    def mark_received(self, names: Iterable[str]) -> None:
        """Note that the gradients of ``names`` have been downloaded straight into the segment."""
        self._assert_open()
        self.received.update(names)
        if self.received:
            self.state = GradientState.FILLING

    def add_(self, name: str, partials: Sequence[Tensor]) -> None:
        """Add visits' fp32 partial sums one by one; the first of a step is taken as it is.

        Piece by piece, so that a piece of the sum stays in the cache: each partial sum is read
        once and the sum written once.
        """
        self._assert_open()
        total = self.allocate(partial_sums=True).views[name].view(-1)
        flat = [partial.reshape(-1) for partial in partials]
        if name in self.received:
            flat.insert(0, total)
        for start in range(0, total.numel(), _PIECE):
            pieces = [each[start : start + _PIECE] for each in flat]
            target = total[start : start + _PIECE]
            if len(pieces) == 1:
                target.copy_(pieces[0])
                continue
            torch.add(pieces[0], pieces[1], out=target)
            for piece in pieces[2:]:
                target.add_(piece)
        self.mark_received((name,))

    def take(self) -> dict[str, Tensor]:
        """Views of what arrived, in layout order; from now on nothing may arrive."""
        self.state = GradientState.TAKEN
        if self.segment is None:
            return {}
        return {n: view for n, view in self.segment.views.items() if n in self.received}

    def clear(self) -> None:
        """Forget this step's gradients; the memory is kept for the next."""
        self.received.clear()
        self.state = GradientState.EMPTY

    def relaid(self, trainable: Layout) -> Gradients:
        """These gradients over a changed set of parameters; what arrived for others is dropped."""
        fresh = Gradients(trainable, self._pages)
        kept = [name for name in trainable.names if name in self.received]
        if self.segment is None or not kept:
            return fresh
        wide = self.segment.layout == self._layouts[True]
        segment = fresh.allocate(partial_sums=wide)
        for name in kept:
            segment.views[name].copy_(self.segment.views[name])
        fresh.mark_received(kept)
        fresh.state = self.state
        return fresh

    def _assert_open(self) -> None:
        """Order rule 4: step k+1's gradients are not written before step k's were taken."""
        assert self.state is not GradientState.TAKEN, f"gradients are taken: {self.received}"
