"""Which tensors of the files make which tensors of the model.

Files name and cut weights in other ways than the model: transformers renames them, stacks experts,
splits fused matrices. Its own mapping is asked, name by name, in its own order, so the result is
that of ``from_pretrained``. Conversions are tried on tensors without data first: what does not fit
is known before anything is allocated.

Most recipes need no second copy of anything: a tensor that is only renamed, and experts that are
only stacked, are read straight into their place. What needs arithmetic is made by transformers'
own conversion, of one tensor at a time.
"""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roundpipe.models.loading.stored import Stored

    Shape = tuple[int, ...]

logger = logging.getLogger(__name__)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # older files hold them


@dataclass(frozen=True)
class Source:
    """A tensor of the files and the pattern under which a conversion expects it."""

    pattern: str
    stored: Stored


class Recipe(Protocol):
    """How some tensors of the model are made of tensors of the files."""

    @property
    def targets(self) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """Shape and dtype of what it makes, by name in the model's state dict."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes that it reads from files."""
        ...

    def fill(self, views: Mapping[str, Tensor]) -> None:
        """Make those of its targets that ``views`` has a place for; blocks on the disk."""
        ...

    @property
    def only(self) -> Stored | None:
        """What its one target is a plain copy of, if it is."""
        ...


@dataclass(frozen=True)
class Placed:
    """One target, each part of which is read straight into its place."""

    name: str
    shape: Shape
    dtype: torch.dtype
    parts: Sequence[tuple[Stored, tuple[Any, ...]]]  # the place as an index

    @property
    def targets(self) -> Mapping[str, tuple[Shape, torch.dtype]]:
        """The one target."""
        return {self.name: (self.shape, self.dtype)}

    @property
    def num_bytes(self) -> int:
        """Bytes of its parts in the files."""
        return sum(stored.num_bytes for stored, _ in self.parts)

    @property
    def only(self) -> Stored | None:
        """Its part, if there is but one that is all of it."""
        return self.parts[0][0] if len(self.parts) == 1 and not self.parts[0][1] else None

    def fill(self, views: Mapping[str, Tensor]) -> None:
        """Read every part into its place."""
        if self.name in views:
            for stored, place in self.parts:
                stored.fill(views[self.name][place])


@dataclass(frozen=True)
class Converted:
    """Targets that transformers makes."""

    model: Any
    first: str  # the target that the conversion is named after
    converter: Any
    sources: Sequence[Source]
    dtype: torch.dtype  # in which it takes its sources
    targets: Mapping[str, tuple[Shape, torch.dtype]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its sources in the files."""
        return sum(source.stored.num_bytes for source in self.sources)

    @property
    def only(self) -> Stored | None:
        """Nothing: it is no copy."""
        return None

    def fill(self, views: Mapping[str, Tensor]) -> None:
        """Make all of it, take what is wanted; holds the sources and the results meanwhile."""
        if not views.keys() & self.targets.keys():
            return
        for name, tensor in self.make(self._read).items():
            if name in views:
                views[name].copy_(tensor)

    def make(self, read: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
        """Convert what ``read`` returns for the sources."""
        converter = deepcopy(self.converter)
        for source in self.sources:
            converter.add_tensor(
                self.first,
                source.stored.name,
                source.pattern,
                lambda stored=source.stored: read(stored),
            )
        with torch.no_grad():
            made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def _read(self, stored: Stored) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=self.dtype)
        stored.fill(tensor)
        return tensor


@dataclass(frozen=True)
class Recipes:
    """What makes each tensor of the model's state dict."""

    by_target: dict[str, Recipe]
    unused: Sequence[str]  # names in the files that the model does not know


def find_recipes(model: Any, stored: Mapping[str, Stored], dtype: torch.dtype) -> Recipes:
    """Find what makes the tensors of a transformers model on the meta device.

    ``dtype``: the model's; parts of it that must stay in fp32 do. Remembers in the model which
    conversions were used, as saving reverts them. Raises ConfigError, naming the tensor, for what
    cannot be converted or does not have the model's shape.
    """
    expected: dict[str, Tensor] = model.state_dict()
    dtypes = _dtypes(model, expected, dtype)
    by_target: dict[str, Recipe] = {}
    sources, unused = _matched(model, stored, expected)
    for name, (converter, found) in sources.items():
        if dtypes[name].is_floating_point:
            _require_floats(found)
        recipe = _recipe(model, name, converter, found, dtypes[name])
        for target, (shape, _) in recipe.targets.items():
            if target not in expected:
                unused.append(target)
                continue
            if shape != tuple(expected[target].shape):
                raise ConfigError(
                    f"a weight is not of the model's shape: {target}: {list(shape)} in the files, "
                    f"{list(expected[target].shape)} in {type(model).__name__}\n"
                    "hint: the config and the weights are of different models"
                )
            by_target[target] = recipe
    _tell_unused(model, unused)
    return Recipes(by_target, unused)


def _require_floats(sources: Sequence[Source]) -> None:
    """Raise ConfigError for numbers that stand for weights in a way that nothing tells of."""
    for stored in (source.stored for source in sources):
        dtype = getattr(stored, "dtype", None)  # none where it was told: see `as_weights`
        if dtype is not None and dtype not in _FLOATS:
            raise ConfigError(
                f"weights in fewer bits, and the config does not say how: {stored.name}: {dtype}\n"
                "hint: fetch config.json again, or load the model in 16 bits, as its authors "
                "published it"
            )


def _tell_unused(model: Any, unused: Sequence[str]) -> None:
    """Warn of weights that the model has no place for, but for what it computes by itself."""
    known = [*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]
    buffers = {name for name, _ in model.named_buffers()}
    left = [name for name in unused if name not in buffers]
    odd = [name for name in left if not any(re.search(each, name) for each in known)]
    if odd:
        logger.warning("%d weights of the files are not used: %s", len(odd), ", ".join(odd[:3]))


def _matched(
    model: Any, stored: Mapping[str, Stored], expected: dict[str, Tensor]
) -> tuple[dict[str, tuple[Any, list[Source]]], list[str]]:
    """Group stored tensors by the first target that they make; also those that make none."""
    from transformers.conversion_mapping import (  # noqa: PLC0415 (imports late)
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import (  # noqa: PLC0415
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix: str = model.base_model_prefix
    groups: dict[str, tuple[Any, list[Source]]] = {}
    unused = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            unused.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        known, sources = groups.setdefault(name, (converter, []))
        if sources and (known is None or converter is None):
            raise ConfigError(
                f"two weights of the files are one in the model: {name}: {key} and "
                f"{sources[0].stored.name}\nhint: keep the files of one model only"
            )
        sources.append(Source(pattern or key, stored[key]))
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return groups, unused


def _dtypes(
    model: Any, expected: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The dtype in which each tensor is loaded: the model's own, but where fp32 is to be kept."""
    from transformers.core_model_loading import (  # noqa: PLC0415 (imports late)
        build_glob_alternation,
    )

    dtypes = {name: tensor.dtype for name, tensor in expected.items()}
    kept = model._get_dtype_plan(dtype)
    if kept:
        pattern, names, _ = build_glob_alternation(list(kept))
        for name in dtypes:
            if (match := pattern.search(name)) is not None:
                dtypes[name] = kept[names[match.lastgroup or ""]]
    return dtypes


def _recipe(
    model: Any, name: str, converter: Any, sources: Sequence[Source], dtype: torch.dtype
) -> Recipe:
    if converter is None:
        stored = sources[0].stored
        return Placed(name, stored.shape, dtype, [(stored, ())])
    recipe = Converted(model, name, converter, sources, dtype, {})
    try:
        made = recipe.make(lambda s: torch.empty(s.shape, dtype=dtype, device="meta"))
    except Exception as error:  # whatever an operation raises for tensors that do not fit it
        raise ConfigError(
            f"weights cannot be converted: {sources[0].stored.name} and {len(sources) - 1} more, "
            f"to {name}: {type(error).__name__}: {error}\n"
            "hint: the config and the weights are of different models, or one is incomplete"
        ) from error
    targets = {target: (tuple(t.shape), t.dtype) for target, t in made.items()}
    parts = list(_places(converter, sources))
    if parts and list(targets) == [name] and _fills(targets[name][0], parts):
        return Placed(name, *targets[name], parts)
    return Converted(model, name, converter, sources, dtype, targets)


def _places(converter: Any, sources: Sequence[Source]) -> Iterator[tuple[Stored, tuple[Any, ...]]]:
    """Where each source goes in the one target, for conversions that only put parts together.

    ``experts.*.gate`` and ``experts.*.up``, each stacked along a new first dimension, then one
    behind the other along the second: expert 3's ``up`` is ``target[3, rows of gate:]``.
    """
    from transformers.core_model_loading import (  # noqa: PLC0415 (imports late)
        Concatenate,
        MergeModulelist,
    )

    operations = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    stacked = operations[0] == (MergeModulelist, 0)
    joined = operations[-1] in ((Concatenate, 1), (Concatenate, 0))
    known = operations in (
        [(MergeModulelist, 0)],
        [(MergeModulelist, 0), (Concatenate, 1)],
        [(Concatenate, 0)],
    )
    if not known or getattr(converter, "force_cpu", False):
        return
    order = converter.source_patterns
    ordered = sorted(sources, key=lambda source: order.index(source.pattern))
    low = 0
    for _, group in groupby(ordered, key=lambda source: source.pattern):
        members = list(group)
        rows = members[0].stored.shape[0] if members[0].stored.shape else 0
        for index, source in enumerate(members):
            place = (index,) if stacked else ()
            if joined:
                start = low if stacked else low + index * rows
                place = (*place, slice(start, start + rows))
            yield source.stored, place
        low += rows if stacked else rows * len(members)


def _fills(shape: Shape, parts: Sequence[tuple[Stored, tuple[Any, ...]]]) -> bool:
    """Whether the parts have the shapes of their places and cover the target, each place once."""
    whole = torch.empty(shape, device="meta")
    covered = 0
    for stored, place in parts:
        if len(place) > len(shape):
            return False
        view = whole[place]
        if tuple(view.shape) != tuple(stored.shape) or not view.is_contiguous():
            return False
        covered += view.numel()
    return covered == whole.numel()
