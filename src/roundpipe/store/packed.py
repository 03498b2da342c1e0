"""Frozen weights in 4 bits: how they lie in a segment, and how they become weights again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Packed:
    """How one tensor is packed.

    ``parts``: by role (``data``, ``scales``, ``scales_of_scales``, …) the entry of the segment that
    holds it. ``shape`` and ``dtype`` are those of the tensor when unpacked.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, str]
