"""A layer's segment, filled from files: as it is, or packed in 4 bits on the way."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.stored import BnbFourBit
from roundpipe.models.packable import packable
from roundpipe.models.shell import TensorNames
from roundpipe.store.packed import pack, packed_entries
from roundpipe.store.segment import Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.models.loading.recipes import Recipe
    from roundpipe.store.packed import Packed
    from roundpipe.store.segment import Entry

    Progress = Callable[[int, int], None]


@dataclass
class Wanted:
    """One parameter of a layer: what makes it, and whether it is packed."""

    name: str  # canonical
    source: str  # the name among those it hangs under that the files provide
    recipe: Recipe
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_packed: bool

    @classmethod
    def of(cls, name: str, source: str, recipe: Recipe, *, is_packed: bool) -> Wanted:
        """The parameter ``name``, which ``recipe`` makes as ``source``."""
        return cls(name, source, recipe, *recipe.targets[source], is_packed)

    @property
    def entries(self) -> Iterator[Entry]:
        """What it takes in a segment."""
        stored, count = self.recipe.only, prod(self.shape)
        if not self.is_packed:
            yield self.name, self.shape, self.dtype
        elif isinstance(stored, BnbFourBit):
            double = stored.offset is not None
            yield from packed_entries(self.name, count, double=double, block=stored.packed.block)
        else:
            yield from packed_entries(self.name, count)

    def fill(self, views: Mapping[str, Tensor]) -> Packed | None:
        """Read it into ``views`` of its entries; returns how it is packed, if it is."""
        if not self.is_packed:
            self.recipe.fill({self.source: views[self.name]})
            return None
        stored = self.recipe.only
        if isinstance(stored, BnbFourBit):
            packed, parts = stored.entries(self.name, self.dtype)
        else:
            tensor = torch.empty(self.shape, dtype=self.dtype)
            self.recipe.fill({self.source: tensor})
            packed, parts = pack(self.name, tensor)
        for entry, part in parts.items():
            views[entry].copy_(part)
        return packed


def layout_of(layer: Sequence[Wanted]) -> Layout:
    """Where the parameters of a layer lie in its segment."""
    return Layout.of(entry for wanted in layer for entry in wanted.entries)


@dataclass
class Count:
    """Bytes of the files that were read, told to who wants to know."""

    progress: Progress | None
    total: int
    done: int = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read, or need not be."""
        self.done += num_bytes
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


def packed_names(
    model: nn.Module,
    layers: Sequence[tuple[str, Sequence[str]]],
    parameters: Mapping[str, tuple[str, Recipe]],
    *,
    pack_all: bool,
) -> set[str]:
    """The parameters that will be in 4 bits: those that files hold so, or all that may be.

    Raises ConfigError for a matrix that the files hold exchanged: `Conv1D` has rows where others
    have columns, bitsandbytes does not.
    """
    names = TensorNames(model)
    for module in model.modules():
        if type(module).__name__ == "Conv1D":
            weight = names.of(module.weight)  # type: ignore[arg-type]
            if weight in parameters and isinstance(parameters[weight][1].only, BnbFourBit):
                raise ConfigError(
                    f"weights in 4 bits in rows where the model has columns: {weight}\n"
                    "hint: load the model in 16 bits; quantization=nf4 packs it while it is loaded"
                )
    modules = dict(model.named_modules())
    blocks = [(modules[name], own) for name, own in layers if name and name in modules]
    if pack_all:
        may = {names.of(parameter) for block, _ in blocks for parameter in packable(block)}
    else:
        may = set()
    are = {
        name
        for _, own in blocks
        for name in own
        if name in parameters and isinstance(parameters[name][1].only, BnbFourBit)
    }
    return are | (may & parameters.keys())


def fill_layer(layer: Sequence[Wanted], count: Count) -> tuple[Segment, dict[str, Packed]]:
    """Read a layer into a new segment; blocks on the disk.

    Holds one more tensor, and what it is packed to, while one is packed.
    """
    segment = Segment(layout_of(layer))
    packed: dict[str, Packed] = {}
    for wanted in layer:
        how = wanted.fill(segment.views)
        if how is not None:
            packed[wanted.name] = how
        count.add(wanted.recipe.num_bytes)
    return segment, packed
