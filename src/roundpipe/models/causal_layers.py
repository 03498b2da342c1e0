"""The layers of a split causal LM, and the context that rebuilds what blocks are called with.

    input_ids --> [prefix] --h--> [block 0] --h--> ... --h--> [block n-1] --h--> [suffix] --> output
                                      ^                            ^
                       masks, rotary tables: rebuilt on each device by the context

Every piece runs the model's own ``forward`` over a copy of its tree in which stand-ins hang where
the blocks were. The prefix ends it at block 0; the suffix runs it from the inputs too, over
embeddings that are all zeros and take no memory, and the stand-ins bring in the hidden state of
the last block. The context does the same to see what each block is called with. What travels beside
the hidden state is `roundpipe.models.packet`'s matter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.models import paths
from roundpipe.models.blocks import BlockCall, BlockReached
from roundpipe.models.chunked_loss import most_whole_tokens
from roundpipe.models.collecting import (
    Hooks,
    asked,
    collecting,
    hand_over,
    require_collected,
    wanted,
)
from roundpipe.models.lazy_logits import ChunkedHead, LazyLogits, NotInChunks
from roundpipe.models.packet import Between, Packet
from roundpipe.models.recording import call_arguments
from roundpipe.models.restoring import Restoring
from roundpipe.models.shell import TreeCopy, TreeShell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.recording import Split
    from roundpipe.models.shell import Home
    from roundpipe.models.spec import Boundary, Inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuilt(BlockCall):
    """A call that a context rebuilt, and what hooks are to collect while the block runs."""

    collects: Mapping[str, Any] | None = None


Calls = dict[int, Rebuilt]  # by layer


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
        return _tensors(self.homes)

    @property
    def homes(self) -> list[Home]:
        """Where they hang."""
        return [home for home in self.split.outside if home in self.split.read_before]

    def make_shell(self, device: torch.device) -> TreeShell:
        """A shell that runs the model's forward up to the last block that needs it to."""
        run = _RunPrefix(self.split)
        tree = self.split.outside_copy(
            device, run.stand_ins, homes=self.homes, idle=lambda _home: "nan"
        )
        run.restoring = Restoring(tree, self.split.rewritten)
        return TreeShell(tree, run)


class _RunPrefix:
    """Runs the model's forward to block 0, and on as far as arguments of blocks are computed."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._brings = split.flow.from_prefix()
        self._last = max(self._brings, default=0)
        self._hidden: Any = None
        self._carried: dict[str, Tensor] = {}
        self.stand_ins = split.stand_ins(self._note)
        self.restoring: Restoring

    def _note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = self._split.forms[index]
        hidden = form.hidden_of(args, kwargs)
        if index == 0:
            self._hidden = hidden
        for path, key in self._brings.get(index, {}).items():
            self._carried[key] = paths.get((args, kwargs), path)
        if index == self._last:
            raise BlockReached
        return form.pack(hidden)

    def __call__(
        self, module: nn.Module, _boundary: Boundary, inputs: Inputs, _context: Any
    ) -> Boundary:
        self.stand_ins.begin()
        try:
            with self.restoring.restored():
                module(*inputs.args, **call_arguments(module, inputs))
        except BlockReached:
            return Packet(self._hidden, self._carried).boundary()
        finally:
            self._hidden, self._carried = None, {}
        self.stand_ins.require_all_called()
        raise AssertionError("unreachable: a block stops the forward")


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
        block = self.split.blocks[self.index]
        hooks = Hooks(self.split.root, self.name)
        tree = TreeCopy(block, self.split.names, device, homes=self.homes)
        return TreeShell(tree, _RunBlock(self.split, self.index, hooks))


class _RunBlock:
    """Calls a block as the context says, with what came along from elsewhere."""

    def __init__(self, split: Split, index: int, hooks: Hooks) -> None:
        self._form, self._flow, self._index = split.forms[index], split.flow, index
        self._layer = split.flow.layer_of(index)
        self._hooks = hooks

    def __call__(
        self, module: nn.Module, boundary: Boundary, _inputs: Inputs, context: Any
    ) -> Boundary:
        index, flow = self._index, self._flow
        packet = Packet.of(boundary)
        rebuilt: Rebuilt = context[self._layer]
        call = flow.call(index, self._form.with_hidden(rebuilt, packet.hidden), packet)
        before = flow.snapshot(index, call)
        if rebuilt.collects is not None:
            self._hooks.install(module)
        with collecting(rebuilt.collects, packet) as collected:
            output = module(*call.args, **call.kwargs)
        written = flow.written(index, before, call)
        packet = flow.after(index, packet, (self._form, output), written)
        return packet._replace(collected=collected).boundary()


@dataclass(frozen=True, eq=False)
class Suffix:
    """Everything after the last block: final norm, head and loss; returns the model's output.

    ``in_chunks``: whether many tokens' loss may be made without all their logits, if nobody asks
    for these; its output then has none.
    """

    split: Split
    name: str = "suffix"
    in_chunks: bool = True

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What is read after the last block, by full name."""
        return _tensors(self.homes)

    @property
    def homes(self) -> list[Home]:
        """Where they hang."""
        return [home for home in self.split.outside if home in self.split.read_after]

    def make_shell(self, device: torch.device, *, rows: int | None = None) -> TreeShell:
        """A shell that runs the model's forward with the hidden state put in by the stand-ins.

        ``rows``: make every loss in chunks of so many tokens.
        """
        run = _RunSuffix(self.split)
        tree = self.split.outside_copy(
            device, run.stand_ins, homes=self.homes, idle=self.split.idle_after
        )
        run.restoring = Restoring(tree, self.split.rewritten)
        head = head_of(self.split.root)
        if self.in_chunks and head is not None and ChunkedHead.can_be(tree.copy_of(head)):
            run.head = ChunkedHead(tree.copy_of(head), rows)
        elif rows is not None:
            run.refuse("its head is not known, or has hooks")
        return TreeShell(tree, run)


def head_of(root: Any) -> nn.Module | None:
    """The module that makes the logits, by the model's own word; None if it has none."""
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    head = getattr(base, "get_output_embeddings", lambda: None)()
    is_inside = isinstance(head, nn.Module) and any(head is module for module in root.modules())
    return head if is_inside else None


class _RunSuffix:
    """Runs the model's forward from the last block on; of one shell."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._needs = split.flow.between.get(len(split.blocks), Between()).needs
        self._brought: Packet | None = None
        self._flags: Sequence[str] = ()
        self._is_refused = False  # and said so
        self.stand_ins = split.stand_ins(self._bring)
        self.restoring: Restoring
        self.head: ChunkedHead | None = None
        self.work_bytes = 0  # of a chunk of the last loss

    def _bring(self, index: int, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        assert self._brought is not None
        require_collected(self._flags)
        hand_over(self._brought, index)
        key = self._needs.get(index)
        hidden = self._brought.hidden if key is None else self._brought.carried[key]
        return self._split.forms[index].pack(hidden)

    def __call__(
        self, module: nn.Module, boundary: Boundary, inputs: Inputs, _context: Any
    ) -> Boundary:
        self.work_bytes = 0
        if self.head is None or not self._is_in_chunks(self.head, boundary, inputs):
            return self._whole(module, boundary, inputs)
        try:
            with self.head:
                output = _without_logits(self._whole(module, boundary, inputs))
        except NotInChunks as refused:
            self.refuse(str(refused))
            return self._whole(module, boundary, inputs)
        self.work_bytes = self.head.work_bytes
        return output

    def refuse(self, what: str) -> None:
        """Say once that the loss of this model is not made in chunks."""
        if not self._is_refused:
            logger.warning(
                "the loss of %s is made with all logits at once, which takes much memory in long "
                "sequences: it cannot be cut by tokens: %s",
                type(self._split.root).__name__,
                what,
            )
        self._is_refused = True

    def _is_in_chunks(self, head: ChunkedHead, boundary: Boundary, inputs: Inputs) -> bool:
        has_labels = (inputs.kwargs or {}).get("labels") is not None
        if inputs.wants_logits or not has_labels or self._is_refused:
            return False
        tokens = Packet.of(boundary).hidden.shape[:-1].numel()
        return head.rows is not None or tokens > most_whole_tokens(self._split.vocabulary)

    def _whole(self, module: nn.Module, boundary: Boundary, inputs: Inputs) -> Boundary:
        self.stand_ins.begin()
        self._brought = Packet.of(boundary)
        kwargs = call_arguments(module, inputs)
        self._flags = asked(module, kwargs)
        try:
            with self.restoring.restored():
                output = module(*inputs.args, **kwargs)
        finally:
            self._brought = None
        self.stand_ins.require_all_called()
        return output


def _without_logits(output: Any) -> Any:
    """The output as it is handed on; its loss must be there, and must have been made in chunks."""
    lazy = [key for key, value in output.items() if isinstance(value, LazyLogits)]
    if not lazy or not isinstance(output.get("loss"), Tensor) or "loss" in lazy:
        raise NotInChunks("no loss, or none that was made of the head's logits")
    for key in lazy:
        output[key] = None
    return output


class CausalLMContext:
    """Runs the forward without grad, over zeros, to see what each block is called with.

    Needs no weights; buffers (rotary tables) are copied to the device once and never cast.
    """

    def __init__(self, split: Split, device: torch.device) -> None:
        self._split = split
        self._stand_ins = split.stand_ins(self._note)
        buffers = [home for home in split.outside if not home.is_parameter]
        self._tree = split.outside_copy(
            device, self._stand_ins, homes=buffers, idle=split.idle_after
        )
        self._shell = TreeShell(self._tree, self._run)
        self._shell.bind({home.name: home.tensor.to(device, copy=True) for home in buffers})
        self._restoring = Restoring(self._tree, split.rewritten)
        self._calls: Calls = {}
        self._flags: Sequence[str] = ()
        flow = split.flow
        self._of_blocks = [flow.layer_of(index) for index in range(len(split.blocks))]
        self._last, self._wanted = 0, set[int]()
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

    def train(self) -> None:
        """Run in training mode until then, dropout too."""
        self._shell.module.train()

    def __call__(self, inputs: Inputs, layers: range) -> Calls:
        """Return what the blocks among ``layers`` are called with, by layer."""
        wanted = [index for index, layer in enumerate(self._of_blocks) if layer in layers]
        if not wanted:
            return {}
        self._last, self._wanted = wanted[-1], set(wanted)
        with torch.no_grad():
            self._shell(None, inputs, None)
        calls, self._calls = self._calls, {}
        return calls

    def _run(self, module: nn.Module, _boundary: Any, inputs: Inputs, _context: Any) -> None:
        self._calls = {}
        self._stand_ins.begin()
        kwargs = call_arguments(module, inputs)
        self._flags = asked(module, kwargs)
        try:
            with self._restoring.restored():
                module(*inputs.args, **kwargs)
        except BlockReached:
            return
        self._stand_ins.require_all_called()

    def _note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = self._split.forms[index]
        if index in self._wanted:
            require_collected(self._flags)
            call = form.with_hidden(BlockCall(args, kwargs), None)
            self._calls[self._of_blocks[index]] = Rebuilt(call.args, call.kwargs, wanted())
        if index == self._last:
            raise BlockReached
        return form.pack(form.hidden_of(args, kwargs))
