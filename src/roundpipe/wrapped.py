"""What a wrapper shows of the module it wraps: its names, its modes, its attributes.

Whatever would run, move or pickle the wrapped module behind the wrapper's back is refused here.

[Note: whose attribute] An attribute that the wrapper has is the wrapper's. Any other is read from,
written to and deleted from the module (or the one it was made of, `Wrapped.set_original_model`), so
a script need not know that there is a wrapper. What devices run are copies: a value written through
the wrapper reaches them at the next call; one written past it is noticed then, and refused.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from roundpipe.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


def with_masters(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` within an ``OptimizerCtx``, as whoever steps by a function expects."""
    with OptimizerCtx():
        return function(*args, **kwargs)


class _Owner:
    """Knows, weakly, what wraps the module it hangs on. A copy of that module is nobody's."""

    def __init__(self, wrapper: Wrapped) -> None:
        self.wrapper = weakref.ref(wrapper)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Wrapped(nn.Module):
    """A module that stands for ``model``."""

    _original: nn.Module | None = None
    _is_made = False  # from then on attributes that are not the wrapper's are the module's

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
        """Block until nothing is under way, and let the module have the newest weights."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Block until nothing is under way; what the next call reads stays what it is."""
        self.synchronize()

    def _refuse_changed(self) -> None:
        """Raise ModelError if the module was changed past the wrapper."""
        raise NotImplementedError

    def _retake_attributes(self) -> None:
        """Have the next call see what was written to the module's attributes."""
        raise NotImplementedError

    def set_original_model(self, original_model: nn.Module) -> None:
        """Read, write and delete attributes there that the wrapper does not have.

        For a model that was rewritten as a Sequential: ``config`` and the like are the original's.
        """
        # Past nn.Module's own: its weights are not the wrapper's.
        object.__setattr__(self, "_original", original_model)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The working weights by the model's own names."""
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers by the model's own names."""
        return self.model.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's own children by its own names."""
        return self.model.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then all within the model by its own names."""
        yield prefix, self
        for name, module in self.model.named_modules(memo, prefix, remove_duplicate):
            if module is not self.model:
                yield name, module

    def get_submodule(self, target: str) -> nn.Module:
        """The model's own submodule of that name."""
        return self.model.get_submodule(target) if target else self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Run ``fn`` on every module of the model; what it writes to weights is taken over."""
        self.model.apply(fn)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; waits for what is under way in the other."""
        if mode != self.training:
            self._settle()
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

    def __repr__(self) -> str:
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        total = sum(p.numel() for p in parameters)
        kind = type(self.model).__name__
        return f"{type(self).__name__}({kind}, {total:,} parameters, {trained:,} trained)"

    def __bool__(self) -> bool:
        return True  # whatever its length

    def __len__(self) -> int:
        return len(self._as_container("__len__"))

    def __getitem__(self, index: Any) -> Any:
        return self._as_container("__getitem__")[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_container("__iter__"))

    def _as_container(self, what: str) -> Any:
        if not hasattr(type(self.model), what):
            raise TypeError(f"the model is no container: {type(self.model).__name__} has no {what}")
        return self.model

    # ---- attributes: see [Note: whose attribute]

    @property
    def _bearer(self) -> nn.Module:
        return self.model if self._original is None else self._original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "model" not in self.__dict__.get("_modules", {}):
                raise
        if self._original is not None and not hasattr(self._original, name):
            return getattr(self.model, name)
        return getattr(self._bearer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_made or (self._is_own(name) and name != "model"):
            super().__setattr__(name, value)
            return
        self._require_plain(name, value)
        self._change(setattr, name, value)

    def __delattr__(self, name: str) -> None:
        if not self._is_made or self._is_own(name):
            super().__delattr__(name)
            return
        self._require_plain(name, None)
        self._change(delattr, name)

    def _is_own(self, name: str) -> bool:
        return name in self.__dict__ or name in self._modules or hasattr(type(self), name)

    def _require_plain(self, name: str, value: Any) -> None:
        """Refuse what would change what the layers are made of."""
        held = getattr(self._bearer, name, None)
        for each in (value, held):
            if isinstance(each, (Tensor, nn.Module)) and self._bearer is self.model:
                raise ModelError(
                    f"what a wrapped model is made of cannot be replaced: {name}\n"
                    "hint: close() the RoundPipe, change the module, wrap it again; "
                    "load_state_dict() changes values"
                )

    def _change(self, how: Callable[..., None], name: str, *value: Any) -> None:
        self._settle()
        self._refuse_changed()
        how(self._bearer, name, *value)
        self._retake_attributes()


def _close_owner(model: nn.Module) -> None:
    """Close what wraps ``model`` already: a notebook cell run twice frees the first instance."""
    owner = getattr(model, _OWNER, None)
    wrapper = owner.wrapper() if isinstance(owner, _Owner) else None
    if wrapper is not None:
        wrapper.close()
