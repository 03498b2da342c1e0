"""The code around a model's parts: a copy of the module tree in which a *seat* stands for each.

The user's tree stays as it is, so its names tell the truth. What runs is a copy, one for each
microbatch: all of them may be in the middle of their forward at once, and what a forward writes to
its modules' attributes is its own. Copies hold the user's own parameters and buffers, so gradients
of what runs here arrive in ``.grad`` as in plain PyTorch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from roundpipe.errors import ModelError
from roundpipe.models.collecting import wanted
from roundpipe.models.shell import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from roundpipe.models.parts import Loan

    Ask = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]

_KEPT = ("_parameters", "_buffers", "_modules")


class Seat(nn.Module):
    """Stands for a part: calling it asks for the part's result; all else is as the part has it."""

    def __init__(self, index: int, part: nn.Module, line: Line) -> None:
        super().__init__()
        self.__dict__.update(_index=index, _part=part, _line=line)
        self.__dict__.update({name: part.__dict__[name] for name in _KEPT})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the part makes of one microbatch's arguments.

        Raises ModelError where hooks inside the part are to collect outputs for the code outside.
        """
        if (collects := wanted()) is not None:
            flag = next(key for key in collects if not key.startswith("_"))
            raise ModelError(
                f"outputs that are collected inside parts are not supported: {flag}\n"
                f"hint: set it to False: output_{flag}=False"
            )
        return self._line.ask(self._index, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._part, name)

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: Any) -> Any:
        raise self._in_pieces()

    def __iter__(self) -> Iterator[Any]:
        raise self._in_pieces()

    def _in_pieces(self) -> ModelError:
        return ModelError(
            f"the model calls the children of a {type(self._part).__name__} one by one, which "
            "runs as one\nhint: keep them in an nn.ModuleList, or leave it out: skip_modules=[…]"
        )


class Line:
    """What the seats of one copy ask; to be set before the copy is called."""

    ask: Ask


class Outer:
    """One copy of the code around parts; call `module` after setting ``line.ask``."""

    def __init__(self, root: nn.Module, parts: Sequence[nn.Module]) -> None:
        self.line = Line()
        seats = {part: Seat(index, part, self.line) for index, part in enumerate(parts)}
        self.module, self._pairs = copied_tree(root, seats)

    def sync_mode(self) -> None:
        """Take over the ``training`` flags of the user's modules."""
        sync_mode(self._pairs)


class Borrower(nn.Module):
    """A part that is called with the tensors lent to it: (args, kwargs, tensors).

    Each lent tensor comes with a first dimension of 1 more than it has: then it is never taken for
    one that was cut along the batch.
    """

    def __init__(self, part: nn.Module, loans: Sequence[Loan]) -> None:
        super().__init__()
        self.module, self._pairs = copied_tree(part, {})
        self.places = [(loan.path, loan.local, loan.is_parameter) for loan in loans]
        self._hang([None] * len(self.places))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[Tensor]) -> Any:
        """Call the part with ``lent`` in its places."""
        self._hang([tensor.squeeze(0) for tensor in lent])
        try:
            return self.module(*args, **kwargs)
        finally:
            self._hang([None] * len(lent))

    def sync_mode(self) -> None:
        """Take over the ``training`` flags of the user's modules."""
        sync_mode(self._pairs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Borrower:
        """A copy without the way back to the user's modules: that is this one's alone."""
        other = Borrower.__new__(Borrower)
        memo[id(self)] = other
        mine = {key: value for key, value in self.__dict__.items() if key != "_pairs"}
        other.__dict__.update(copy.deepcopy(mine, memo), _pairs=[])
        return other

    def _hang(self, tensors: Sequence[Tensor | None]) -> None:
        for (path, local, is_parameter), tensor in zip(self.places, tensors, strict=True):
            owner = self.module.get_submodule(path)
            # past __setattr__, which takes nothing but an nn.Parameter in a parameter's place
            owner.__dict__["_parameters" if is_parameter else "_buffers"][local] = tensor


def copied_tree(
    root: nn.Module,
    stand_ins: Mapping[nn.Module, nn.Module],
    *,
    memo: dict[int, Any] | None = None,
) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """A copy of a module tree around the same tensors, and the pairs (copy, original).

    Raises ModelError for a tree that cannot be copied.
    """
    memo = {} if memo is None else memo
    memo.update({id(part): seat for part, seat in stand_ins.items()})
    originals = list(walk(root, stand_ins))
    for tensor in (*root.parameters(), *root.buffers()):
        memo[id(tensor)] = tensor
    for original in originals:
        for value in original.__dict__.values():
            if isinstance(value, Tensor) or type(value).__name__.lower().endswith("config"):
                memo[id(value)] = value
    try:
        copied = copy.deepcopy(root, memo)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"a module cannot be copied: {type(root).__name__}: {error}\n"
            "hint: keep what cannot be copied (locks, files, tensors with a graph) out of its "
            "attributes, or give the class a __deepcopy__"
        ) from error
    pairs = [(memo[id(original)], original) for original in originals]
    for each, _ in pairs:
        if each.__dict__.get("gradient_checkpointing"):
            each.gradient_checkpointing = False  # recomputing is the engine's
    return copied, pairs


class _Within(dict[int, Any]):
    """A memo for deepcopy that refuses tensors of the model which a part does not hold."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._names = {id(t): n for n, t in (*root.named_parameters(), *root.named_buffers())}

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and (name := self._names.get(key)) is not None:
            raise ModelError(
                f"it reaches a tensor outside it by an attribute: {name}\n"
                "hint: make it a submodule or a parameter of the module that uses it"
            )
        return super().get(key, default)


def require_closed(part: nn.Module, root: nn.Module) -> None:
    """Raise ModelError if a part would compute with a copy of what belongs to other modules."""
    copied_tree(part, {}, memo=_Within(root))


def sync_mode(pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
    """Let copies have the ``training`` flags of their originals."""
    for copied, original in pairs:
        copied.__dict__["training"] = original.training
