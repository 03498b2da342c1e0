"""What an optimizer must offer so that layers can be updated one by one: one parameter at a time.

`HostOptimizer` updates layers front first with any optimizer that has these two functions, and with
those of ``torch.optim`` that treat each parameter on its own; all others are stepped as a whole.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from roundpipe.optim.by_parameter import ByParameter, is_each_alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer


@runtime_checkable
class Layered(Protocol):
    """A ``torch.optim.Optimizer`` that can update one parameter, in any thread."""

    def hyperparameters(self) -> Mapping[Tensor, Any]:
        """What every parameter is to be updated with, frozen as of now; counts as a step."""
        ...

    def update_(
        self,
        parameter: Tensor,
        grad: Tensor,
        snapshot: Mapping[Tensor, Any],
        *,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Update ``parameter`` and its state in place from ``grad`` times ``grad_scale`` (0-d).

        ``out``: working weights of any floating dtype, get a cast of the new parameter; None where
        the parameter is the working weight itself.
        """
        ...


def as_layered(optimizer: Optimizer) -> Layered | str:
    """How to update one parameter at a time with ``optimizer``; else why it steps as a whole."""
    kind = type(optimizer)
    if _has_step_hooks(optimizer):
        return "hooks wait for its step"
    if isinstance(optimizer, Layered):
        if _is_later(kind, "step", "update_"):
            return f"{kind.__name__} changes step and not update_"
        return optimizer
    if is_each_alone(optimizer):
        return ByParameter(optimizer)
    return f"{kind.__name__} may mix parameters"


def _has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether someone counts on one call of ``step`` for all parameters."""
    module = sys.modules[torch.optim.Optimizer.__module__]
    places = ((module, "_global_optimizer_{}_hooks"), (optimizer, "_optimizer_step_{}_hooks"))
    return any(
        getattr(place, name.format(when), None)
        for place, name in places
        for when in ("pre", "post")
    )


def _is_later(kind: type, one: str, other: str) -> bool:
    """Whether ``one`` is defined by a class that derives from the one that defines ``other``."""
    owners = [_definer(kind, name) for name in (one, other)]
    return owners[0] is not owners[1] and issubclass(owners[0], owners[1])


def _definer(kind: type, name: str) -> type:
    """The class that defines ``name``: not one that torch gave a wrapper of what it inherits."""
    function = inspect.unwrap(getattr(kind, name))
    same = (
        k for k in kind.__mro__ if name in vars(k) and inspect.unwrap(vars(k)[name]) is function
    )
    return list(same)[-1]
