"""A causal LM from its files to host segments, one layer at a time, with no second copy of it.

    headers -> model on meta -> recipes -> layers -> [ fill a segment ] -> hang views in the model
    `------- nothing allocated, every mistake found -----'  per layer

A layer's segment is ordinary memory, or a file that is written once and mapped from then on: then
no more than one layer is in memory at a time, whatever the model's size.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from roundpipe.device.host_memory import host_memory
from roundpipe.errors import ConfigError
from roundpipe.models.loading import cache
from roundpipe.models.loading.fetch import choose_dtype, fetch, read_config, reason
from roundpipe.models.loading.fill import Count, Wanted, fill_layer, layout_of, packed_names
from roundpipe.models.loading.formats import as_weights
from roundpipe.models.loading.recipes import Recipe, find_recipes
from roundpipe.models.loading.shards import open_shards
from roundpipe.models.loading.skeleton import build, hang, make_buffers, split_names, tie
from roundpipe.models.shell import TensorNames, placeholder
from roundpipe.store.frozen import Base
from roundpipe.store.mapped import SegmentFile, read_segment_file, write_segment_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from roundpipe.models.loading.fill import Progress
    from roundpipe.models.loading.shards import Shards
    from roundpipe.store.packed import Packed
    from roundpipe.store.segment import Segment

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_SHARE_OF_MEMORY = 0.7  # of what is free, that weights may take before they are mapped


@dataclass
class LoadedModel:
    """A model whose parameters are views of segments, in evaluation mode.

    ``bases``: the segments, one for each layer that has parameters. For `RoundPipe`, which takes
    them out of the list: who keeps one keeps its memory. Mapped and packed parameters are frozen.
    """

    model: nn.Module
    bases: list[Base]
    folder: Path


@dataclass
class OpenedModel:
    """A model whose files were looked through; it has no weights yet, and took no memory."""

    folder: Path
    model: Any
    dtype: torch.dtype
    quantization: str | None
    _shards: Shards = field(repr=False)
    _layers: Sequence[tuple[str, Sequence[Wanted]]] = field(repr=False)
    _loose: Mapping[str, tuple[str, Recipe]] = field(repr=False)  # buffers, by canonical name

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters once they are loaded."""
        return sum(layout_of(layer).num_bytes for _, layer in self._layers)

    @property
    def num_file_bytes(self) -> int:
        """Bytes that will be read from its files."""
        return sum(recipe.num_bytes for recipe in self._recipes())

    @property
    def fits_memory(self) -> bool:
        """Whether its weights leave enough free memory beside them; True where nobody knows."""
        memory = host_memory()
        return memory is None or self.num_bytes <= _SHARE_OF_MEMORY * memory.free_bytes

    def load(self, *, progress: Progress | None = None) -> LoadedModel:
        """Read the weights into memory; blocks on the disk. To be called once.

        Takes the model's bytes, and one tensor's more where weights are packed or converted.
        ``progress(done, total)`` is called after each tensor with bytes of the files.
        """
        count = Count(progress, self.num_file_bytes)
        bases = []
        for name, layer in self._layers:
            base = self._hang(layer, *fill_layer(layer, count), is_frozen=self.is_packed)
            if name:
                bases.append(base)
        return self._finished(bases, count)

    def load_mapped(
        self, *, cache_folder: Path | None = None, progress: Progress | None = None
    ) -> LoadedModel:
        """Map the weights from segment files, which are written first where they are not there.

        Needs the memory of one layer, and disk space of ``num_bytes`` in ``cache_folder`` (by
        default below the user's home). What is there already is not written again. Blocks on the
        disk, and while another process writes the same files. Raises ConfigError where the disk
        has no room, before anything is written. All parameters are frozen.
        """
        mark = cache.fingerprint(self._shards, dtype=self.dtype, quantization=self.quantization)
        given = str(getattr(self.model, "name_or_path", "") or self.folder.name)
        folder = cache.cache_folder(cache_folder or cache.default_cache(), Path(given).name, mark)
        count = Count(progress, self.num_file_bytes)
        bases = []
        with cache.held(folder):
            self._announce(folder, mark)
            for index, (name, layer) in enumerate(self._layers):
                made_from = _made_from(mark, index, layer)
                file = _mapped(folder / _file_name(index), layer, made_from, count)
                base = self._hang(layer, file.segment, file.packed, is_frozen=True)
                if name:
                    bases.append(replace(base, let_go=file.segment.let_go))
        return self._finished(bases, count)

    @property
    def is_packed(self) -> bool:
        """Whether some of its weights will be in 4 bits."""
        return any(wanted.is_packed for _, layer in self._layers for wanted in layer)

    def _announce(self, folder: Path, mark: str) -> None:
        """Say what will be written, having looked whether the disk has room for it."""
        sizes = [layout_of(layer).num_bytes for _, layer in self._layers]
        absent = sum(size for i, size in enumerate(sizes) if not (folder / _file_name(i)).is_file())
        if not absent:
            return
        cache.require_space(folder, absent)
        content = {
            "made_from": str(self.folder),
            "fingerprint": mark,
            "dtype": str(self.dtype),
            "quantization": self.quantization,
            "layers": [
                {"file": _file_name(index), "layer": name, "bytes": sizes[index]}
                for index, (name, _) in enumerate(self._layers)
            ],
        }
        cache.write_manifest(folder, content)
        logger.info("writing %.1f GB of segment files, once, to: %s", absent / 1e9, folder)

    def _hang(
        self,
        layer: Sequence[Wanted],
        segment: Segment,
        packed: Mapping[str, Packed],
        *,
        is_frozen: bool,
    ) -> Base:
        """Hang views of a layer's segment in the model."""
        tensors: dict[str, Tensor] = {}
        for wanted in layer:
            value = segment.views[wanted.name]
            if wanted.name in packed:
                like = torch.empty(wanted.shape, dtype=wanted.dtype, device="meta")
                value = placeholder(like, _CPU, "nan")
            trains = value.is_floating_point() and not is_frozen
            tensors[wanted.name] = nn.Parameter(value, requires_grad=trains)
            tensors[wanted.name]._is_hf_initialized = True  # type: ignore[attr-defined]
        hang(self.model, tensors)
        return Base(segment, tensors, packed)

    def _finished(self, bases: list[Base], count: Count) -> LoadedModel:
        for name, (source, recipe) in self._loose.items():
            shape, dtype = recipe.targets[source]
            buffer = torch.empty(shape, dtype=dtype)
            recipe.fill({source: buffer})
            count.add(recipe.num_bytes)
            hang(self.model, {name: buffer})
        _read_generation_config(self.model, self.folder)
        return LoadedModel(self.model, bases, self.folder)

    def _recipes(self) -> Iterator[Recipe]:
        for _, layer in self._layers:
            yield from (wanted.recipe for wanted in layer)
        yield from (recipe for _, recipe in self._loose.values())


def open_causal_lm(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    quantization: Literal["nf4"] | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
) -> OpenedModel:
    """Look through a model's files, and find what will make each of its weights.

    ``name_or_path``: a folder, or an id of the model hub, whose files are fetched. ``dtype``:
    "auto" takes what the config says. ``quantization``: "nf4" packs the matrices of the blocks, in
    double-quantised blocks of 64, while they are loaded. Takes seconds and no memory to speak of.
    Raises ConfigError for everything that is wrong with the files.
    """
    if quantization not in (None, "nf4"):
        raise ConfigError(f"quantization: not one of nf4, none: {quantization}\nhint: nf4")
    folder = fetch(name_or_path, revision)
    config = read_config(folder)
    shards = open_shards(folder, getattr(config, "transformers_weights", None))
    stored = as_weights(_take_quantization(config), shards.tensors)
    chosen = choose_dtype(dtype, config, shards)
    try:
        model = build(config, chosen, attn_implementation)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the model cannot be built: {folder}: {type(error).__name__}: {reason(error)}\n"
            "hint: check its config.json; its code is never run, update transformers"
        ) from error
    recipes = find_recipes(model, stored, chosen)
    missing = tie(model, recipes)
    layers = split_names(model)
    make_buffers(model, missing)
    parameters, buffers = _by_canonical_name(model, recipes.by_target)
    packs = packed_names(model, layers, parameters, pack_all=quantization is not None)
    filled = [
        (layer, found)
        for layer, names in layers
        if (
            found := [
                Wanted.of(n, *parameters[n], is_packed=n in packs) for n in names if n in parameters
            ]
        )
    ]
    kind = quantization or ("files" if packs else None)
    return OpenedModel(folder, model, chosen, kind, shards, filled, buffers)


def _take_quantization(config: Any) -> Any:
    """Take away what the config says of the files' form: the loaded model is an ordinary one."""
    found: Any = None
    for each in {id(c): c for c in (config, config.get_text_config())}.values():
        found = each.__dict__.pop("quantization_config", None) or found
    return found.to_dict() if hasattr(found, "to_dict") else found


def _by_canonical_name(
    model: nn.Module, recipes: Mapping[str, Recipe]
) -> tuple[dict[str, tuple[str, Recipe]], dict[str, tuple[str, Recipe]]]:
    """What makes each parameter, and each buffer: the name it is made under, and the recipe."""
    names = TensorNames(model)
    parameters: dict[str, tuple[str, Recipe]] = {}
    buffers: dict[str, tuple[str, Recipe]] = {}
    for found, tensors in (
        (parameters, model.named_parameters(remove_duplicate=False)),
        (buffers, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            if name in recipes:
                found[names.of(tensor)] = (name, recipes[name])
    return parameters, buffers


def _file_name(index: int) -> str:
    return f"{index:04}.segment"


def _made_from(mark: str, index: int, layer: Sequence[Wanted]) -> str:
    told = [mark, index, [[w.name, w.shape, str(w.dtype), w.is_packed] for w in layer]]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _mapped(path: Path, layer: Sequence[Wanted], made_from: str, count: Count) -> SegmentFile:
    """Map a layer's file, written now if there is none that can be trusted."""
    file = read_segment_file(path, made_from=made_from)
    if file is not None and file.segment.layout == layout_of(layer):
        count.add(sum(wanted.recipe.num_bytes for wanted in layer))
        return file
    segment, packed = fill_layer(layer, count)
    try:
        write_segment_file(path, segment, packed, made_from=made_from)
    except OSError as error:
        raise ConfigError(
            f"a segment file cannot be written: {path}: {error}\nhint: cache_folder=FOLDER"
        ) from error
    file = read_segment_file(path, made_from=made_from)
    assert file is not None, f"a file that was just written is not sound: {path}"
    return file


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig  # noqa: PLC0415 (imports late)

    if (folder / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError, TypeError) as error:
            logger.warning("generation_config.json is not used: %s: %s", folder, error)
