"""Counts a model that has no weights: from a config to a `Profile`.

The model is built on the meta device, as large as it is, in a second or so. It is split by the very
code that splits a model with weights, and its layers are run by the shells that a device runs. Only
one layer of each kind is run, at three lengths: see `roundpipe.models.estimate.amount`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.causal_layers import Block, CausalLMContext, Suffix
from roundpipe.models.causal_lm import chain_of
from roundpipe.models.chunked_loss import TRAINED_ROWS, most_whole_tokens
from roundpipe.models.estimate.adapter import apply_method
from roundpipe.models.estimate.amount import Amount
from roundpipe.models.estimate.boundaries import Boundaries
from roundpipe.models.estimate.layer_run import META, Given, make_shell, run_layer
from roundpipe.models.estimate.meter import Answering, Counts
from roundpipe.models.estimate.profile import (
    Kind,
    LayerProfile,
    Pass,
    Profile,
    Regime,
    Work,
)
from roundpipe.models.estimate.sizes import layer_sizes
from roundpipe.models.experts import most_tokens_at_once
from roundpipe.models.loading.own_class import class_for, config_of
from roundpipe.models.packable import packable
from roundpipe.models.recording import record, structure_of
from roundpipe.models.spec import Inputs
from roundpipe.models.text_only import other_parts
from roundpipe.plan.amounts import write_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from roundpipe.models.causal_lm import CausalLayer
    from roundpipe.models.estimate.layer_run import Counted
    from roundpipe.models.estimate.method import Method
    from roundpipe.models.recording import Split
    from roundpipe.models.shell import TreeShell

_LENGTHS = (512, 1024, 2048)
_DTYPES = {16: torch.bfloat16, 32: torch.float32}
_SHORT_WINDOW = 64
_WINDOWS = ("sliding_window", "attention_chunk_size")
# What torch says where a tensor without data is asked for a value, or for a size that hangs on it.
_NO_VALUES = ("meta tensor", "data-independent implementation")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
# Tokens and lengths for which the largest moments are looked for.
_GRID = [
    (batch * length, length) for length in (2**n for n in range(7, 20)) for batch in (1, 2, 8, 64)
]


def count(
    config: Any,
    method: Method,
    *,
    name: str,
    bits: int = 16,
    fuse: bool = False,
    regimes: Sequence[Regime] = (),
) -> Profile:
    """Count a causal LM from its transformers config, built in 16 or 32 ``bits``.

    ``fuse``: as if its attention were fused where transformers has none for it. ``regimes``: what
    was counted before, for another method that runs the same. Takes a second or two. Raises
    ModelError for what cannot be split exactly.
    """
    model, missing = _build(config, _DTYPES[bits])
    model.train()
    apply_method(model, method)
    with Answering():
        split = _take_apart(model)
        layers = chain_of(split)
        kinds, representatives = _kinds(layers)
        unread = _freeze_unread(model, layers)
        run = _Run(split, layers, _DTYPES[bits], config if fuse and _is_plain(model) else None)
        regimes = regimes or [
            Regime(longest, _count_kinds(run, representatives, lengths))
            for longest, lengths in _regimes(model.config)
        ]
    packed = _packed_names(layers) if method.is_packed else frozenset()
    sizes = layer_sizes([layer.tensors for layer in layers], packed=packed)
    parameters = list(model.parameters())
    own = [
        LayerProfile(layer.name, kind, size, _own_boundary(run, index, representatives[kind]))
        for index, (layer, kind, size) in enumerate(zip(layers, kinds, sizes, strict=True))
    ]
    return Profile(
        name=name,
        method=method.name,
        bits=bits,
        parameters=sum(p.numel() for p in parameters),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        layers=tuple(own),
        regimes=tuple(regimes),
        longest=getattr(_text(model.config), "max_position_embeddings", None),
        notes=_notes(model, unread, bits, missing),
        unread=unread,
    )


def _build(config: Any, dtype: torch.dtype) -> tuple[nn.Module, str]:
    """The model without weights, as the class that wrote the files; what is missing of it."""
    try:
        return _made(config, dtype), ""
    except ImportError as error:  # a vision tower from another package, which may not be there
        text = _text(config)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = lines[0].partition(". ")[0] if lines else type(error).__name__
        if text is config:
            raise ModelError(f"a package is missing: {why}\nhint: install it") from error
        return _made(text, dtype), f"counted without what reads images or sound: {why}"


def _made(config: Any, dtype: torch.dtype) -> nn.Module:
    kind = class_for(config)
    with META:
        model: nn.Module = kind._from_config(config_of(kind, config), dtype=dtype)
    return model.to(META)  # some functions that draw do not ask which device is the default


def _freeze_unread(model: nn.Module, layers: Sequence[CausalLayer]) -> int:
    """Freeze what no layer reads, as wrapping does; how many parameters that are."""
    read = {id(tensor) for layer in layers for tensor in layer.tensors.values()}
    unread = [parameter for parameter in model.parameters() if id(parameter) not in read]
    for parameter in unread:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in unread)


def _notes(model: nn.Module, unread: int, bits: int, missing: str) -> tuple[str, ...]:
    notes = [missing] if missing else []
    if unread:
        parts = ", ".join(other_parts(model)) or "what else the model has"
        notes.append(
            f"text does not reach {unread / 1e9:.2f} B parameters ({parts}): "
            f"{write_bytes(unread * bits // 8)} of the host and of what is saved, on no device"
        )
    return tuple(notes)


def _own_boundary(run: _Run, index: int, representative: int) -> Amount | None:
    """What a layer is given, if not what the layer is that its kind was counted on."""
    found = run.boundaries.amount(index)
    return None if found == run.boundaries.amount(representative) else found


def _take_apart(model: nn.Module) -> Split:
    try:
        return record(model, META).split
    except ModelError as error:
        is_of_values = any(words in str(error) for words in _NO_VALUES)
        if isinstance(error.__cause__, ModelError) or not is_of_values:
            raise
        raise ModelError(
            f"{type(model).__name__} cannot be estimated from its config: what it runs depends on "
            f"values of tensors: {error.__cause__}\n"
            "hint: it can be trained all the same, and its costs are measured then"
        ) from error


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_plain(model: Any) -> bool:
    return str(model.config._attn_implementation) == "eager"


def _regimes(config: Any) -> list[tuple[int | None, tuple[int, ...]]]:
    """Up to which length layers run in one way, and three lengths at which to count it.

    A sequence shorter than a layer's window needs no mask, so attention is the causal kernel's.
    """
    found = [getattr(_text(config), name, None) for name in _WINDOWS]
    windows = [window for window in found if isinstance(window, int) and window > 0]
    if not windows:
        return [(None, _LENGTHS)]
    window = min(windows)
    above = (None, (2 * window, 3 * window, 4 * window))
    if window < _SHORT_WINDOW:  # nobody trains on sequences that short
        return [above]
    below = _LENGTHS if window > _LENGTHS[-1] else (window // 8, window // 4, window // 2)
    return [(window - 1, below), above]


def _kinds(layers: Sequence[CausalLayer]) -> tuple[list[int], list[int]]:
    """The kind of every layer, and the first layer of every kind."""
    seen: dict[Any, int] = {}
    first: list[int] = []
    kinds = []
    for index, layer in enumerate(layers):
        key = _kind_key(layer)
        if key not in seen:
            seen[key] = len(seen)
            first.append(index)
        kinds.append(seen[key])
    return kinds, first


def _kind_key(layer: CausalLayer) -> Any:
    if not isinstance(layer, Block):
        return layer.name
    block = layer.split.blocks[layer.index]
    shapes = [(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()]
    flow = layer.split.flow.blocks[layer.index]
    return structure_of(block), tuple(shapes), len(flow.takes), len(flow.gives), len(flow.objects)


@dataclass
class _Run:
    """Runs layers of a split model at any length."""

    split: Split
    layers: Sequence[CausalLayer]
    dtype: torch.dtype
    fuse: Any
    boundaries: Boundaries = field(init=False)
    _context: CausalLMContext = field(init=False)
    _shells: dict[int, TreeShell] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._context = CausalLMContext(self.split, META)
        self.boundaries = Boundaries(self.split, self._shell, self._context)

    def at(self, length: int, wanted: Sequence[int], *, wants_logits: bool = True) -> list[Counted]:
        """Run the ``wanted`` layers on one sequence of ``length``."""
        ids = torch.zeros(1, length, dtype=torch.long, device=META)
        inputs = Inputs((), {"input_ids": ids, "labels": ids}, wants_logits=wants_logits)
        calls = self._context(inputs, range(min(wanted), max(wanted) + 1))
        counted = []
        for index in wanted:
            given = Given(
                boundary=None if index == 0 else self.boundaries.at(index, length),
                inputs=inputs,
                context={index: calls[index]} if index in calls else None,
                dtype=self.dtype,
                is_last=isinstance(self.layers[index], Suffix),
                fuse=self.fuse,
            )
            counted.append(run_layer(self.layers[index], self._shell(index), given))
        return counted

    def _shell(self, index: int) -> TreeShell:
        if index not in self._shells:
            self._shells[index] = make_shell(self.layers[index])
        return self._shells[index]


def _count_kinds(run: _Run, wanted: Sequence[int], lengths: tuple[int, ...]) -> tuple[Kind, ...]:
    counted = [run.at(length, wanted) for length in lengths]
    kinds = [_kind(lengths, each) for each in zip(*counted, strict=True)]
    for place, index in enumerate(wanted):
        if (most := _most_tokens(run, index)) is not None:
            cut = (2 * most, 3 * most, 4 * most)  # whole pieces
            pieces = _kind(cut, [run.at(length, [index])[0] for length in cut])
            kinds[place] = replace(kinds[place], beyond=(most, pieces))
    last = wanted[-1]
    if isinstance(suffix := run.layers[last], Suffix):
        kinds[-1] = replace(kinds[-1], beyond=_in_chunks(run, suffix, last))
    return tuple(kinds)


def _most_tokens(run: _Run, index: int) -> int | None:
    """How many tokens a layer's experts take at once."""
    layer = run.layers[index]
    if not isinstance(layer, Block):
        return None
    config = _text(layer.split.root.config)
    top_k = next((k for name in _TOP_K if isinstance(k := getattr(config, name, None), int)), None)
    return most_tokens_at_once(layer.split.blocks[layer.index], top_k) if top_k else None


def _in_chunks(run: _Run, suffix: Suffix, last: int) -> tuple[int, Kind] | None:
    """From how many tokens on the last layer makes its loss in chunks, and how it runs then."""
    lengths = (2 * TRAINED_ROWS, 3 * TRAINED_ROWS, 4 * TRAINED_ROWS)  # whole chunks
    counted = [run.at(length, [last], wants_logits=False)[0] for length in lengths]
    if not all(each.is_cut for each in counted):
        return None
    for each, moments in zip(counted, _in_step([c.moments for c in counted]), strict=True):
        each.moments = moments
    return most_whole_tokens(suffix.split.vocabulary), _kind(lengths, counted)


def _in_step(moments: Sequence[list[int]]) -> Sequence[list[int]]:
    """The same moments of each of three runs with two, three and four times so many chunks.

    What comes before the chunks is found where it is counted from the start, what comes after them
    where it is counted from the end, and all chunks are alike.
    """
    first, second, third = moments
    step = len(second) - len(first)
    starts = range(len(first) - 2 * step + 1 if step > 0 else 0)
    shifted = third[step:]
    start = next((s for s in starts if third[s : s + 3 * step] == shifted[s : s + 3 * step]), None)
    if start is None or len(third) - len(second) != step:
        return moments
    before = start + step
    after = len(first) - before
    return [[*each[:before], *each[len(each) - after :]] for each in moments]


def _kind(lengths: tuple[int, ...], counted: Sequence[Counted]) -> Kind:
    return Kind(
        forward=_pass(lengths, [each.forward for each in counted]),
        backward=_pass(lengths, [each.backward for each in counted]),
        kept=Amount.through(lengths, [each.kept for each in counted]),
        peaks=_peaks(lengths, [each.moments for each in counted]),
        boundary=Amount.through(lengths, [each.boundary for each in counted]),
    )


def _pass(lengths: tuple[int, ...], counts: Sequence[Counts]) -> Pass:
    works = {}
    for sort in sorted({sort for each in counts for sort in each.tallies}):
        tallies = [each.tally(sort) for each in counts]
        works[sort] = Work(
            Amount.through(lengths, [tally.flops for tally in tallies]),
            Amount.through(lengths, [tally.moved for tally in tallies]),
            tallies[-1].kernels,
        )
    return Pass(works, counts[-1].calls)


def _peaks(lengths: tuple[int, ...], moments: Sequence[list[int]]) -> tuple[Amount, ...]:
    """The moments that are the worst for some microbatch; of different numbers, the worst each."""
    if len({len(each) for each in moments}) != 1:
        moments = [[max(each, default=0)] for each in moments]
    amounts = {Amount.through(lengths, each) for each in zip(*moments, strict=True)}
    if not amounts:
        return ()
    worst = [max(amounts, key=lambda amount: amount.at(*at)) for at in _GRID]
    return tuple(dict.fromkeys(worst))


def _packed_names(layers: Sequence[CausalLayer]) -> Set[str]:
    """Frozen matrices inside blocks, those of routed experts among them: what is kept in 4 bits."""
    return {
        layer.split.names.of(parameter)
        for layer in layers
        if isinstance(layer, Block)
        for parameter in packable(layer.split.blocks[layer.index])
        if not parameter.requires_grad
    }
