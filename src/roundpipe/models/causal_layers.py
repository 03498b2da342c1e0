"""The layers of a split causal LM, and the context that rebuilds what blocks are called with.

    input_ids --> [prefix] --h--> [block 0] --h--> ... --h--> [block n-1] --h--> [suffix] --> output
                                      ^                            ^
                       masks, rotary tables: rebuilt on each device by the context

Every piece runs the model's own ``forward`` over a copy of its tree in which stand-ins hang where
the blocks were. The prefix ends it at block 0; the suffix runs it from the inputs too, over
embeddings that are all zeros and take no memory, and the stand-ins bring in the hidden state of
the last block. The context does the same to see what each block is called with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.models.blocks import BlockCall, BlockReached, StandIns
from roundpipe.models.recording import call_arguments
from roundpipe.models.shell import TreeCopy, TreeShell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.recording import Split
    from roundpipe.models.shell import Home
    from roundpipe.models.spec import Boundary, Inputs

Calls = dict[int, BlockCall]  # by layer


def _tensors(homes: Sequence[Home]) -> dict[str, Tensor]:
    return {home.name: home.tensor for home in homes}


@dataclass(frozen=True, eq=False)
class Prefix:
    """Everything before block 0: the embedding and what it feeds on."""

    split: Split
    name: str = "prefix"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is read before the first block, by full name."""
        return _tensors(self._homes)

    @property
    def _homes(self) -> list[Home]:
        return [home for home in self.split.outside if home in self.split.read_before]

    def make_shell(self, device: torch.device) -> TreeShell:
        """A shell that runs the model's forward up to block 0."""
        forms = self.split.forms

        def stop(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise BlockReached(forms[index].hidden_of(args, kwargs))

        stand_ins = StandIns(self.split.blocks, stop)
        tree = self.split.outside_copy(
            device, stand_ins, homes=self._homes, idle=lambda _home: "nan"
        )

        def run(module: nn.Module, _boundary: Boundary, inputs: Inputs, _context: Any) -> Boundary:
            stand_ins.begin()
            try:
                module(*inputs.args, **call_arguments(module, inputs))
            except BlockReached as reached:
                return reached.hidden
            stand_ins.require_all_called()
            raise AssertionError("unreachable: block 0 stops the forward")

        return TreeShell(tree, run)


@dataclass(frozen=True, eq=False)
class Block:
    """One of the repeated blocks."""

    split: Split
    index: int
    homes: Sequence[Home] = field(repr=False)

    @property
    def name(self) -> str:
        """The block's full name in the user's model."""
        return self.split.block_names[self.index]

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer of the block, by full name."""
        return _tensors(self.homes)

    def make_shell(self, device: torch.device) -> TreeShell:
        """A shell that calls the block as the context says."""
        form = self.split.forms[self.index]
        layer = self.index + 1

        def run(module: nn.Module, boundary: Boundary, _inputs: Inputs, context: Any) -> Boundary:
            call = form.with_hidden(context[layer], boundary)
            return form.unpack(module(*call.args, **call.kwargs))

        block = self.split.blocks[self.index]
        return TreeShell(TreeCopy(block, self.split.names, device, homes=self.homes), run)


@dataclass(frozen=True, eq=False)
class Suffix:
    """Everything after the last block: final norm, head and loss; returns the model's output."""

    split: Split
    name: str = "suffix"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is read after the last block, by full name."""
        return _tensors(self._homes)

    @property
    def _homes(self) -> list[Home]:
        return [home for home in self.split.outside if home in self.split.read_after]

    def make_shell(self, device: torch.device) -> TreeShell:
        """A shell that runs the model's forward with the hidden state put in by the stand-ins."""
        forms = self.split.forms
        brought: list[Any] = [None]

        def bring(index: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
            return forms[index].pack(brought[0])

        stand_ins = StandIns(self.split.blocks, bring)
        tree = self.split.outside_copy(
            device, stand_ins, homes=self._homes, idle=self.split.idle_after
        )

        def run(module: nn.Module, boundary: Boundary, inputs: Inputs, _context: Any) -> Boundary:
            stand_ins.begin()
            brought[0] = boundary
            try:
                output = module(*inputs.args, **call_arguments(module, inputs))
            finally:
                brought[0] = None
            stand_ins.require_all_called()
            return output

        return TreeShell(tree, run)


class CausalLMContext:
    """Runs the forward without grad, over zeros, to see what each block is called with.

    Needs no weights; buffers (rotary tables) are copied to the device once and never cast.
    """

    def __init__(self, split: Split, device: torch.device) -> None:
        self._split = split
        self._stand_ins = StandIns(split.blocks, self._note)
        buffers = [home for home in split.outside if not home.is_parameter]
        self._tree = split.outside_copy(
            device, self._stand_ins, homes=buffers, idle=split.idle_after
        )
        self._shell = TreeShell(self._tree, self._run)
        self._shell.bind({home.name: home.tensor.to(device, copy=True) for home in buffers})
        self._calls: Calls = {}
        self._layers = range(0)
        self.sync_mode()

    def sync_mode(self) -> None:
        """Take over ``training`` flags, but not of dropout, which would draw for nothing."""
        self._shell.sync_mode()
        for module in self._shell.module.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False

    def eval(self) -> None:
        """Run in eval mode until the next `sync_mode`."""
        self._shell.module.eval()

    def __call__(self, inputs: Inputs, layers: range) -> Calls:
        """Return what the blocks among ``layers`` are called with, by layer."""
        first, last = max(layers.start, 1), min(layers.stop - 1, len(self._split.blocks))
        if first > last:
            return {}
        self._layers = range(first, last + 1)
        with torch.no_grad():
            self._shell(None, inputs, None)
        calls, self._calls = self._calls, {}
        return calls

    def _run(self, module: nn.Module, _boundary: Any, inputs: Inputs, _context: Any) -> None:
        self._calls = {}
        self._stand_ins.begin()
        try:
            module(*inputs.args, **call_arguments(module, inputs))
        except BlockReached:
            return
        self._stand_ins.require_all_called()

    def _note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = self._split.forms[index]
        layer = index + 1
        if layer in self._layers:
            self._calls[layer] = form.with_hidden(BlockCall(args, kwargs), None)
        if layer == self._layers.stop - 1:
            raise BlockReached
        return form.pack(form.hidden_of(args, kwargs))
