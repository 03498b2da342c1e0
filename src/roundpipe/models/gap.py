"""What a model's own code computes between two blocks, as a layer of its own.

    [block 1] --h--> [before block 2] --h'--> [block 2] --> ...

Most models hand on the hidden state as it is. Some cut it, scale it, or mix it with what an earlier
block returned (stacks that run in loops). That code is in the middle of the model's ``forward``; it
is reached by running that from the inputs, with stand-ins that bring in what blocks before
returned, until it calls the block. Arguments of the block that it computes of these are taken too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.models import paths
from roundpipe.models.blocks import BlockReached
from roundpipe.models.packet import Packet
from roundpipe.models.recording import call_arguments
from roundpipe.models.restoring import Restoring
from roundpipe.models.shell import TreeShell

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn

    from roundpipe.models.recording import Split
    from roundpipe.models.shell import Home
    from roundpipe.models.spec import Boundary, Inputs


@dataclass(frozen=True, eq=False)
class Gap:
    """What the model's own code computes from outputs of blocks before it calls block ``index``."""

    split: Split
    index: int

    @property
    def name(self) -> str:
        """For people, e.g. ``before model.layers.3``."""
        return f"before {self.split.block_names[self.index]}"

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What it reads, by full name."""
        return {home.name: home.tensor for home in self.homes}

    @property
    def homes(self) -> list[Home]:
        """Where they hang; buffers are small, and all that are read before blocks are bound."""
        read, own = self.split.read_before, self.split.flow.between[self.index].homes
        is_bound = {home for home in read if not home.is_parameter} | own
        return [home for home in self.split.outside if home in is_bound]

    def make_shell(self, device: torch.device) -> TreeShell:
        """A shell that runs the model's forward with stand-ins up to the block."""
        run = _RunGap(self.split, self.index)
        tree = self.split.outside_copy(
            device, run.stand_ins, homes=self.homes, idle=self.split.idle_after
        )
        run.restoring = Restoring(tree, self.split.rewritten)
        return TreeShell(tree, run)


class _RunGap:
    """Runs the model's forward to a block; stand-ins bring in what blocks before returned."""

    def __init__(self, split: Split, index: int) -> None:
        self._split, self._index = split, index
        self._gap = split.flow.between[index]
        self._brought: Packet | None = None
        self._arrived: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.stand_ins = split.stand_ins(self._act)
        self.restoring: Restoring

    def _act(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._brought is not None
        form = self._split.forms[index]
        if index == self._index:
            self._arrived = args, kwargs
            raise BlockReached
        if index == self._index - 1:
            return form.pack(self._brought.hidden)
        key = self._gap.needs.get(index)
        hidden = form.hidden_of(args, kwargs) if key is None else self._brought.carried[key]
        return form.pack(hidden)

    def __call__(
        self, module: nn.Module, boundary: Boundary, inputs: Inputs, _context: Any
    ) -> Boundary:
        packet = self._brought = Packet.of(boundary)
        self.stand_ins.begin()
        try:
            with self.restoring.restored():
                module(*inputs.args, **call_arguments(module, inputs))
        except BlockReached:
            pass
        finally:
            (args, kwargs), self._arrived, self._brought = self._arrived, ((), {}), None
        gap = self._gap
        made = {key: paths.get((args, kwargs), path) for path, key in gap.args.items()}
        form = self._split.forms[self._index]
        hidden = form.hidden_of(args, kwargs) if gap.is_hidden else packet.hidden
        return packet._replace(hidden=hidden, carried={**packet.carried, **made}).boundary()
