"""A part of a model that is no chain: a `RoundPipe` that shares its devices with the other parts.

[Note: one part at a time] Every part has memory of its own on each device while it runs. Parts take
turns: before one runs, the one that ran before gives its memory back, in forward and in backward,
so devices never hold more than the largest part.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.microbatch import RoundPipePackedData
from roundpipe.errors import ModelError
from roundpipe.models.choose import is_causal_lm, is_of_transformers
from roundpipe.models.outer import Borrower, require_closed
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.engine.lockstep import Request
    from roundpipe.models.parts import Part
    from roundpipe.store.layer import HostLayer


class Turns:
    """Who has memory on the devices; see [Note: one part at a time]."""

    def __init__(self) -> None:
        self._last: weakref.ref[PartPipe] | None = None

    def take(self, pipe: PartPipe) -> None:
        """Let ``pipe`` run next; nothing is under way."""
        last = self._last() if self._last is not None else None
        if last is not pipe:
            if last is not None:
                last.rest()
            self._last = weakref.ref(pipe)


class PartPipe(RoundPipe):
    """See the module docstring; made by `of`."""

    _turns: Turns | None = None
    _part: Part | None = None

    @classmethod
    def of(cls, part: Part, root: nn.Module, turns: Turns, **settings: Any) -> PartPipe:
        """Wrap a part of ``root``; raises ModelError naming it for what cannot be run exactly."""
        try:
            require_closed(part.module, root)
            pipe = cls(_as_one(part), name=part.name, **settings)
        except ModelError as error:
            what, _, hint = str(error).partition("\n")
            raise ModelError(
                f"a part cannot be run: {part.name}: {what}\n{hint or 'hint: '}; or leave it out: "
                f"skip_modules=[model.get_submodule({part.name!r})]"
            ) from error
        pipe._turns, pipe._part = turns, part
        return pipe

    @property
    def host_layers(self) -> Sequence[HostLayer]:
        """Where its tensors lie."""
        return self._layers

    @property
    def num_recovered(self) -> int:
        """How many of its failures have been forgotten, and their gradients with them."""
        return self._engine.num_recovered

    @property
    def has_run(self) -> bool:
        """Whether it has run backward since the last step."""
        return bool(self._chain.making.runs)

    def look_for_failure(self) -> None:
        """Raise what failed since the last call."""
        super()._ready()

    def notice_new_weights(self) -> None:
        """Let a backward of a pass before this be refused."""
        self._chain.notice_load()

    def begin_call(self, seed: int) -> None:
        """Follow modes and take the seed of what it draws from now on."""
        self._seed = seed
        if isinstance(self.model, Borrower):
            self.model.sync_mode()

    def rest(self) -> None:
        """Give the devices' memory back until the next run; nothing is under way."""
        for model in self._engine.models:
            model.close()

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """Run for several microbatches at once; what each gets. Raises ModelError, see below.

        Refused is an object that could hold tensors: recompute would find those of forward there.
        """
        assert self._part is not None
        flat = [pytree.tree_flatten((request.args, request.kwargs)) for request in requests]
        if any(spec != flat[0][1] for _, spec in flat):  # called in different ways
            return [self.answer([request])[0] for request in requests]
        for leaf in flat[0][0]:
            _refuse_object(self._part.name, leaf)
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        packed = [RoundPipePackedData(column) for column in columns]
        args, kwargs = pytree.tree_unflatten(packed, flat[0][1])
        if self._part.loans:
            lent = [loan.tensor.unsqueeze(0) for loan in self._part.loans]
            args, kwargs = (args, kwargs, lent), {}
        count, made = len(requests), []
        config = RoundPipeRunConfig(
            num_microbatch=count,
            split_input=lambda args, kwargs, _: _unpacked(args, kwargs, count),
            merge_output=_as_they_are,
        )

        def call() -> None:
            with torch.set_grad_enabled(requests[0].has_grad):
                made.append(self(*args, roundpipe_run_config=config, **kwargs))

        requests[0].caller.run(call)
        answers: list[Any] = made[0]
        return answers

    def _ready(self) -> None:
        super()._ready()
        if self._turns is not None:
            self._turns.take(self)


def _as_one(part: Part) -> nn.Module:
    if part.loans:
        return Borrower(part.module, part.loans)
    if is_of_transformers(part.module) and not is_causal_lm(part.module):
        return nn.Sequential(part.module)  # as one layer, whatever else it could be
    return part.module


def _unpacked(
    args: Any, kwargs: Any, count: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """The arguments of each microbatch; what is not packed goes to all of them."""

    def at(number: int, tree: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf[number] if isinstance(leaf, RoundPipePackedData) else leaf, tree
        )

    return [at(i, args) for i in range(count)], [at(i, kwargs) for i in range(count)]


def _as_they_are(outputs: list[Any]) -> list[Any]:
    return outputs


def _refuse_object(part: str, leaf: Any) -> None:
    held = getattr(leaf, "__dict__", None)
    if isinstance(leaf, (torch.Tensor, nn.Module)) or not held or callable(leaf):
        return
    kind = type(leaf).__name__
    if "Cache" in kind or any(isinstance(value, torch.Tensor) for value in held.values()):
        raise ModelError(
            f"a part is called with an object that holds tensors: {part}: {kind}\n"
            "hint: use_cache=False"
        )
