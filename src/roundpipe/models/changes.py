"""Notice what a user changed in a module tree after it was wrapped.

Shells are copies, so a hook or an attribute set on the user's module afterwards would silently do
nothing. A call has less than a millisecond for the whole tree, so first the identities of all
values are compared as one list; only if that differs are modules looked at one by one.
``training`` flags, buffers and the data of parameters are not changes: shells follow the first,
and the others are the store's. Nor is gradient checkpointing, which shells always run without, nor
what transformers hangs into a model that is asked for router logits: shells get their own.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FOLLOWED = (
    "training",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_output_capturing_hooks_installed",
)
_COLLECTOR = "output_capturing_hook"  # its name in transformers
_MISSING = object()


class _Seen:
    """One module as it was; holds references, so that no ``id`` is given to another object."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.attributes = dict(module.__dict__)
        self.children = dict(module._modules)
        self.parameters = dict(module._parameters)
        self.hooks = {key: _own(module.__dict__[key]) for key in _HOOKS}

    def difference(self) -> str | None:
        where = self.name or type(self.module).__name__
        for key, kind in _HOOKS.items():
            hooks = _own(self.module.__dict__[key])
            if hooks != self.hooks[key]:
                word = "added to" if len(hooks) > len(self.hooks[key]) else "changed on"
                return f"{kind} {word} {where}"
        if name := _first_other(self.module._modules, self.children):
            return f"submodule changed: {where}.{name}"
        if name := _first_other(self.module._parameters, self.parameters):
            return f"parameter replaced: {where}.{name}"
        now: dict[str, Any] = self.module.__dict__
        for key in (*now, *(key for key in self.attributes if key not in now)):
            before, after = self.attributes.get(key, _MISSING), now.get(key, _MISSING)
            if key not in _FOLLOWED and not _same(before, after):
                return f"attribute changed: {where}.{key}: {_show(before)} -> {_show(after)}"
        return None


def _own(hooks: Mapping[int, Any]) -> list[int]:
    """The keys of hooks, a new one for each registration, but of those that collect outputs."""
    return [key for key, hook in hooks.items() if getattr(hook, "__name__", "") != _COLLECTOR]


def _first_other(now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    for key in (*now, *before):
        if now.get(key, _MISSING) is not before.get(key, _MISSING):
            return key
    return None


def _same(before: object, after: object) -> bool:
    if before is after or (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    return isinstance(before, _PLAIN) and before == after


def _show(value: object) -> str:
    return "nothing" if value is _MISSING else repr(value)[:60]


class TreeWatch:
    """Remembers a module tree as it is when made."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.retake()

    def retake(self) -> None:
        """Remember the tree as it is now."""
        self._seen = [_Seen(name, module) for name, module in self._root.named_modules()]
        self._identities = self._identities_now()
        self._kept: list[dict[str, Any]] = []

    def difference(self) -> str | None:
        """Say what hooks or attributes changed since, or None; about a microsecond a module."""
        identities = self._identities_now()
        if identities == self._identities:
            return None
        for seen in self._seen:
            if (what := seen.difference()) is not None:
                return what
        # Only ``training``, say: quick again from now on. Values are kept alive as in _Seen.
        self._kept = [dict(seen.module.__dict__) for seen in self._seen]
        self._identities = identities
        return None

    def _identities_now(self) -> list[int]:
        held = [seen.module.__dict__ for seen in self._seen]
        inside = [h[key] for h in held for key in ("_modules", "_parameters")]
        hooks = [h[key] for h in held for key in _HOOKS]
        values = chain.from_iterable(map(dict.values, (*held, *inside)))
        return [*map(id, values), *chain.from_iterable(hooks)]
