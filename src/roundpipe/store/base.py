"""A layer's frozen weights that lie in a segment of their own: mapped from a file, or packed.

Frozen weights are only ever read, so they may stay where loading put them: in a file that is mapped
into memory (the kernel brings pages in as they are uploaded and drops them again), or in 4 bits.
The layer's own segment then holds what is left: what is trained, and buffers.

    own weights segment     base segment (read-only)            borrowed
    +-----------------+   +-------------------------------+   +----------+
    | adapters        |   | frozen weights, packed or not |   | tied     |      slot_layout
    +-----------------+   +-------------------------------+   +----------+
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roundpipe.store.packed import Packed
    from roundpipe.store.segment import Segment


@dataclass(frozen=True, eq=False)
class Base:
    """Frozen tensors in a segment.

    ``tensors``: the user's tensor objects by the name of their first entry in ``segment.layout``. A
    tensor that is not in ``packed`` is a view of its entry; a packed one is a stand-in without
    memory, of the shape and dtype it has when unpacked. ``let_go(low, high)``: says that bytes of
    the segment were read and need not stay in memory.
    """

    segment: Segment
    tensors: Mapping[str, Tensor]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    let_go: Callable[[int, int], None] | None = None
