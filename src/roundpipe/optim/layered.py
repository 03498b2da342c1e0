"""What an optimizer must offer so that layers can be updated one by one: one parameter at a time.

`HostOptimizer` updates layers front first with any optimizer that has these two functions; all
others are stepped as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


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
