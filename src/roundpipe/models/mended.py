"""Classes of transformers that cannot be called as they are, one row each with the reason.

A row names a part of the class and a field that the class reads of that part's output and that the
output lacks. The field is put there, empty, by a hook on the part. Where a later version of
transformers fills the field by itself, the hook does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class _Row(NamedTuple):
    part: str
    field: str
    reason: str


_ROWS = {
    "Llama4ForConditionalGeneration": _Row(
        "language_model",
        "image_outputs",
        "its forward (5.24) reads image_outputs of what its text model returns, which never has it",
    ),
}


class _Filled:
    """A forward hook that gives an output a field it lacks."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, tuple) and not hasattr(output, self._field):
            setattr(output, self._field, None)


def mend(model: Any) -> None:
    """Make a model of transformers callable that is not, in place; once is enough."""
    row = _ROWS.get(type(model).__name__)
    part: nn.Module | None = getattr(model, row.part, None) if row is not None else None
    if row is None or part is None:
        return
    if not any(isinstance(hook, _Filled) for hook in part._forward_hooks.values()):
        part.register_forward_hook(_Filled(row.field))
