"""Tensors within the arguments of a call, however deep: found, exchanged, compared.

Arguments hold tensors in dicts, lists, tuples and objects of any class (keys and values that blocks
share hang in a mapping of transformers' own). A *path* leads from the arguments to one of them.
Nothing here changes what it is given: what is exchanged hangs in new containers.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Step = tuple[str, Any]  # "item" and a key or an index, or "attribute" and its name
    Path = tuple[Step, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_CONTAINERS = (Tensor, nn.Module, type, Enum, torch.dtype, torch.device, *_PLAIN)


def entries(value: Any) -> dict[Step, Any] | None:
    """What hangs directly in a container; None for anything else, configs and modules too."""
    if isinstance(value, _NO_CONTAINERS) or type(value).__name__.lower().endswith("config"):
        return None
    if isinstance(value, dict):
        return {("item", key): each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {("item", index): each for index, each in enumerate(value)}
    if hasattr(value, "__dict__") and not callable(value):
        return {("attribute", name): each for name, each in vars(value).items()}
    return None


def tensors(value: Any) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor within ``value`` and its path; what contains itself is entered once."""
    pending: list[tuple[Path, Any]] = [((), value)]
    seen: set[int] = set()
    while pending:
        path, each = pending.pop()
        if isinstance(each, Tensor):
            yield path, each
            continue
        inside = entries(each)
        if inside is not None and id(each) not in seen:
            seen.add(id(each))
            pending += [((*path, step), entry) for step, entry in reversed(inside.items())]


def get(value: Any, path: Path) -> Any:
    """What ``path`` leads to."""
    for kind, key in path:
        value = value[key] if kind == "item" else getattr(value, key)
    return value


def replaced(value: Any, new: Mapping[Path, Any]) -> Any:
    """The same with other things at some paths, in new containers along the way.

    A key that a mapping has not yet is added, and the index after a list's last.
    """
    if () in new:
        return new[()]
    below: dict[Step, dict[Path, Any]] = {}
    for (first, *rest), each in new.items():
        below.setdefault(first, {})[tuple(rest)] = each
    inside = entries(value) or {}
    exchanged = {step: replaced(inside.get(step), part) for step, part in below.items()}
    if isinstance(value, tuple):
        items = [exchanged.get(step, each) for step, each in inside.items()]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    made = copy.copy(value)
    for (kind, key), each in exchanged.items():
        if kind == "attribute":
            vars(made)[key] = each  # past what a class makes of it: frozen dataclasses too
        elif isinstance(made, list) and key == len(made):
            made.append(each)
        else:
            made[key] = each
    return made


def copied(value: Any) -> Any:
    """New containers, however deep, around the same tensors and the same other things."""
    inside = entries(value)
    if not inside:
        return copy.copy(value) if inside is not None else value
    return replaced(value, {(step,): copied(each) for step, each in inside.items()})


def is_mutable(value: Any) -> bool:
    """Whether ``value`` is, or holds, a container that can be written to."""
    inside = entries(value)
    if inside is None:
        return False
    return not isinstance(value, tuple) or any(map(is_mutable, inside.values()))


def changes(before: Any, after: Any) -> dict[Path, Any]:
    """What was put into ``after`` since ``before`` was `copied` of it, by path.

    Raises ModelError for what nobody could carry: things taken out, or objects of a class of
    their own put in.
    """
    found = dict(_changes(before, after, ()))
    for path, value in found.items():
        for leaf in tree_leaves(value):
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise ModelError(
                    f"a block puts a thing that is no tensor into its arguments: "
                    f"{named(path)}: {type(leaf).__name__}"
                )
    return found


def _changes(before: Any, after: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    old, new = entries(before), entries(after)
    if old is None or new is None or type(before) is not type(after):
        if not _is_same(before, after):
            yield path, after
        return
    if isinstance(after, tuple):
        if len(old) != len(new) or any(True for s in new for _ in _changes(old[s], new[s], ())):
            yield path, after
        return
    if gone := [step for step in old if step not in new]:
        raise ModelError(f"a block takes something out of its arguments: {named((*path, gone[0]))}")
    for step, each in new.items():
        if step in old:
            yield from _changes(old[step], each, (*path, step))
        else:
            yield (*path, step), each


def _is_same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    return isinstance(left, _PLAIN) and type(left) is type(right) and bool(left == right)


def differences(left: Any, right: Any) -> Iterator[tuple[Path, Any]]:
    """Yield where two arguments differ by value and what ``left`` has there."""
    yield from _differences(left, right, ())


def _differences(left: Any, right: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if left is right:
        return
    old, new = entries(left), entries(right)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or not torch.equal(left, right):
            yield path, left
    elif old is None or new is None:
        if type(left) is not type(right) or isinstance(left, Tensor) or not bool(left == right):
            yield path, left
    elif type(left) is not type(right) or old.keys() != new.keys():
        yield path, left
    else:
        for step, each in old.items():
            yield from _differences(each, new[step], (*path, step))


def named(path: Path) -> str:
    """A path for people: ``per_layer_input`` or ``position_embeddings.0``."""
    return ".".join(str(key) for _, key in path) or "all of it"
