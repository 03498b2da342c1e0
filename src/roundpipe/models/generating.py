"""A whole causal LM on one device, to be run by its own ``generate``.

Whatever decodes (sampling, beams, stopping, caches of any kind) is the model's own: it runs a copy
of the user's module tree, in which the blocks are shells of their own. A shell is bound to its
weights apart from the others, so a block's may come just before it runs:

    copy of the tree         bound once, for as long as it generates
      embedding, norm, head
      [block 0] [block 1]    each bound when its weights are there

What is outside the blocks and was never seen to be read by text (a vision tower) is not brought to
the device; it is a placeholder that refuses to be called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.blocks import StandIn
from roundpipe.models.causal_layers import Block
from roundpipe.models.shell import TreeCopy, TreeShell, placeholder
from roundpipe.store.packed import PackedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.models.causal_lm import CausalLMSpec
    from roundpipe.models.recording import Split
    from roundpipe.models.shell import Home

    Values = Mapping[str, Tensor | PackedTensor]


class Part:
    """A piece of the tree that is bound apart from the others."""

    def __init__(self, tree: TreeCopy, homes: Sequence[Home], device: torch.device) -> None:
        self._shell = TreeShell(tree, _not_run)
        self._dtypes = tree.packed_dtypes
        self._empty = {h.name: placeholder(h.tensor, device, "nan") for h in homes}
        self._changed: dict[str, Tensor] = {}  # buffers, by what the part did to them

    @property
    def module(self) -> nn.Module:
        """The part's own module."""
        return self._shell.module

    def bind(self, values: Values) -> None:
        """See `roundpipe.models.spec.Shell`. Buffers whose changes were kept stay changed."""
        self._shell.bind(values)
        if self._changed:
            self._shell.hang(self._changed)

    def release(self) -> None:
        """Let go of what it is bound to: whoever keeps the tree must not keep the memory."""
        self._shell.bind(self._empty)

    def before_it_runs(self, act: Callable[[], None]) -> None:
        """Have ``act`` called each time the part is, before anything else."""
        self.module.register_forward_pre_hook(lambda *_: act(), prepend=True)

    def keep_its_buffers(self) -> None:
        """Have what the part does to its buffers outlive the next `bind`: tables that grow."""
        if self._shell.buffers:
            self.module.register_forward_hook(self._keep_changed)

    @torch.inference_mode(False)
    def _keep_changed(self, *_: Any) -> None:
        changed = self._shell.changed()
        held = self._shell.buffers if changed else {}
        self._changed |= {name: held[name].clone() for name in changed}

    def unpack_while_it_runs(self) -> None:
        """Have packed weights there only while the part runs."""
        self._shell.unpack_within(self.module)

    def unpacked(self, values: Values) -> dict[str, Tensor]:
        """The part's values with the packed ones unpacked, into new memory."""
        found: dict[str, Tensor] = {}
        for name in self._empty:
            value = values[name]
            if isinstance(value, PackedTensor):
                value = value.unpack(self._dtypes.get(name))
            found[name] = value
        return found


class GeneratingTree:
    """See the module docstring. ``blocks``: by the index of their layer, in order.
    ``tensors``: the user's own, of what is outside of them, by name. ``use_adapter``: False for the
    base without the adapters of ``peft``.

    Nothing is bound; it is in evaluation mode. Making it costs about a millisecond a layer.
    """

    def __init__(
        self, spec: CausalLMSpec, device: torch.device, *, use_adapter: bool = True
    ) -> None:
        split = spec.split
        self.blocks: dict[int, Part] = {}
        hung: dict[nn.Module, nn.Module] = {}
        for index, layer in enumerate(spec.layers):
            block = split.blocks[layer.index] if isinstance(layer, Block) else None
            if isinstance(layer, Block) and block is not None and block not in hung:
                tree = TreeCopy(block, split.names, device, homes=layer.homes)
                part = self.blocks[index] = Part(tree, layer.homes, device)
                hung[block] = part.module
        for block in split.uncalled:
            hung[block] = StandIn(block, _refusal(type(split.root), block))
        originals = set() if use_adapter else set(_originals(split.root))
        apart = [module for module in _never_read(split) if module not in originals]
        idle = [home for home in split.outside if home.is_parameter and home.module in apart]
        bound = [home for home in split.outside if home not in set(idle)]
        tree = TreeCopy(
            split.root,
            split.names,
            device,
            homes=bound,
            idle=[(home, "nan") for home in idle],
            stand_ins=hung,
        )
        self.outside = Part(tree, bound, device)
        self.tensors = {home.name: home.tensor for home in bound}
        for module in apart:
            tree.copy_of(module).register_forward_pre_hook(_refusal(type(split.root), module))
        tree.module.eval()
        if not use_adapter:
            _disable_adapters(tree.module)

    @property
    def module(self) -> nn.Module:
        """The whole tree's own root."""
        return self.outside.module


def _never_read(split: Split) -> Iterator[nn.Module]:
    """The modules outside the blocks that hold parameters of which, at and below, none is read.

    One that only lacks a part of its own (the bias of a head, a vector between image rows) runs.
    """
    parameters = [home for home in split.outside if home.is_parameter]
    owners = dict.fromkeys(home.module for home in parameters)
    read = {home.module for home in parameters if home in split.read_before | split.read_after}
    run = {*map(id, read), *map(id, split.blocks)}
    return (module for module in owners if run.isdisjoint(map(id, module.modules())))


def _originals(root: nn.Module) -> Iterator[nn.Module]:
    """The modules in whose place an adapter has trained whole copies: `modules_to_save`."""
    for module in root.modules():
        original = getattr(module, "original_module", None)
        if original is not None and hasattr(module, "modules_to_save"):
            yield from original.modules()


def _disable_adapters(module: Any) -> None:
    """Have a tree that is used once run without its adapters."""
    if not hasattr(module, "disable_adapter"):
        raise ConfigError(
            f"{type(module).__name__} has no adapter to leave out\nhint: leave out use_adapter"
        )
    module.base_model.disable_adapter_layers()


def _refusal(root: type, module: nn.Module) -> Callable[..., None]:
    name, kind = root.__name__, type(module).__name__

    def refuse(*_: Any) -> None:
        raise ModelError(
            f"{name} generates from text alone; this would run a part of it that stays on the "
            f"host: {kind}\nhint: give input_ids and attention_mask, and nothing else that is read"
        )

    return refuse


def _not_run(*_: Any) -> None:
    raise AssertionError("a part is run by its module")
