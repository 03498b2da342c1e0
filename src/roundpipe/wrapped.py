"""What a wrapper shows of the module it wraps: its names, its modes, its attributes.

Whatever would run, move or pickle the wrapped module behind the wrapper's back is refused here.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


_in_optimizer: ContextVar[bool] = ContextVar("in_optimizer", default=False)
_OWNER = "_roundpipe_owner"  # on the user's module: what wraps it


class OptimizerCtx:
    """Within it, ``parameters()`` and ``named_parameters()`` of a RoundPipe are the masters.

    For code that makes optimizers of ``model.parameters()``. May be entered again and nested.
    """

    def __init__(self) -> None:
        self._tokens: list[Any] = []

    def __enter__(self) -> Self:
        self._tokens.append(_in_optimizer.set(True))
        return self

    def __exit__(self, *_: object) -> None:
        _in_optimizer.reset(self._tokens.pop())


def wants_masters() -> bool:
    """Whether the caller is inside an ``OptimizerCtx``."""
    return _in_optimizer.get()


class _Owner:
    """Knows, weakly, what wraps the module it hangs on. A copy of that module is nobody's."""

    def __init__(self, wrapper: Wrapped) -> None:
        self.wrapper = weakref.ref(wrapper)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Wrapped(nn.Module):
    """A module that stands for ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        _close_owner(model)
        object.__setattr__(model, _OWNER, _Owner(self))
        self.model = model
        self.training = model.training

    def close(self) -> None:
        """End the wrapper; the module stays usable."""
        raise NotImplementedError

    def disown(self) -> None:
        """Let the module be wrapped anew without closing this wrapper first."""
        if self.model.__dict__.get(_OWNER) is not None:
            object.__delattr__(self.model, _OWNER)

    def synchronize(self) -> None:
        """Block until nothing is under way."""
        raise NotImplementedError

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The working weights by the model's own names."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers by the model's own names."""
        return self.model.named_buffers(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; waits for what is under way in the other."""
        if mode != self.training:
            self.synchronize()
        self.training = mode
        self.model.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise ConfigError(
            "the weights stay where RoundPipe keeps them: .to(), .cuda(), .half() and the like "
            "would move or cast them behind its back\nhint: cast the model before wrapping it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a RoundPipe cannot be pickled\nhint: save state_dict() instead")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "model" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.model, name)


def _close_owner(model: nn.Module) -> None:
    """Close what wraps ``model`` already: a notebook cell run twice frees the first instance."""
    owner = getattr(model, _OWNER, None)
    wrapper = owner.wrapper() if isinstance(owner, _Owner) else None
    if wrapper is not None:
        wrapper.close()
