"""The repeated blocks of a causal LM, and stand-ins that hang where they were.

A model's ``forward`` is the only one who knows what comes before, between and after its blocks, so
it is never taken apart: it runs with stand-ins in place of the blocks. What a stand-in does when
it is called differs by purpose: stop there and hand out the hidden state (the prefix), note what
the block is called with (the context), or bring in a hidden state computed elsewhere (the suffix).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Act = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class BlockCall:
    """What a block is called with; ``None`` stands where the hidden state goes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class BlockForm:
    """How a block takes the hidden state and how it gives it back."""

    hidden: int | str  # position or keyword
    num_outputs: int | None  # length of the tuple it returns, or None for a bare tensor
    is_list: bool = False  # it returns a list

    def hidden_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The hidden state among a call's arguments."""
        return args[self.hidden] if isinstance(self.hidden, int) else kwargs[self.hidden]

    def with_hidden(self, call: BlockCall, hidden: Any) -> BlockCall:
        """The same call with another hidden state."""
        if isinstance(self.hidden, int):
            before, after = call.args[: self.hidden], call.args[self.hidden + 1 :]
            return BlockCall((*before, hidden, *after), call.kwargs)
        return BlockCall(call.args, {**call.kwargs, self.hidden: hidden})

    def pack(self, hidden: Tensor) -> Any:
        """What the block returns, with nothing but the hidden state in it."""
        if self.num_outputs is None:
            return hidden
        outputs = [hidden, *[None] * (self.num_outputs - 1)]
        return outputs if self.is_list else tuple(outputs)

    def unpack(self, output: Any) -> Tensor:
        """The hidden state in what the block returned."""
        hidden = output if self.num_outputs is None else output[0]
        assert isinstance(hidden, Tensor), type(hidden)
        return hidden


class BlockReached(BaseException):
    """Ends a model's forward at a block; no `Exception`, so no ``except`` on the way keeps it."""


class StandIns:
    """One stand-in for each block; they call ``act`` with the index of the block.

    They check that the blocks are called in order, each once; ``uncalled`` ones never.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], act: Act, uncalled: Sequence[nn.Module] = ()
    ) -> None:
        self.modules: dict[nn.Module, nn.Module] = {
            block: StandIn(block, self._called) for block in (*blocks, *uncalled)
        }
        self._blocks = blocks
        self._act = act
        self._num_called = 0

    def begin(self) -> None:
        """Expect block 0 next."""
        self._num_called = 0

    def require_all_called(self) -> None:
        """Raise ModelError if the forward that just ended left out a block."""
        if self._num_called != len(self._blocks):
            raise _out_of_order(self._num_called)

    def _called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._num_called
        if index == len(self._blocks) or self._blocks[index] is not block:
            raise _out_of_order(index)
        self._num_called += 1
        return self._act(index, args, kwargs)


def _out_of_order(index: int) -> ModelError:
    return ModelError(
        f"the blocks are not called in order, each once: block {index}\n"
        "hint: turn off layer drop and early exit, or wrap nn.Sequential(model) to run it as one "
        "layer"
    )


class _Likeness(nn.Module):
    """Shows the plain attributes of a module it stands for, never its tensors."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_original"], name)
        if isinstance(value, Tensor):
            raise ModelError(
                f"a tensor of a block is read from outside the block: {name}\n"
                "hint: wrap nn.Sequential(model) to run it as one layer"
            )
        return _Likeness(value) if isinstance(value, nn.Module) else value

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuse: raises ModelError."""
        raise ModelError(
            f"a part of a block is called from outside the block: {type(self._original).__name__}\n"
            "hint: wrap nn.Sequential(model) to run it as one layer"
        )


class StandIn(_Likeness):
    """Hangs where a block was and hands its calls on to ``called``."""

    def __init__(
        self,
        original: nn.Module,
        called: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        super().__init__(original)
        self.__dict__["_called"] = called

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``called`` makes of the call."""
        return self._called(self._original, args, kwargs)
