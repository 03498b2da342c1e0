"""Updates one parameter at a time with optimizers of ``torch.optim`` that treat each on its own.

Most of torch's optimizers compute a parameter's update from that parameter's gradient and state
alone, element by element or matrix by matrix; that they take all parameters in one ``step`` is a
convenience. So a *twin* (`roundpipe.optim.twin`) whose only group holds one parameter does to it
what the whole step would do, bit for bit, and the layers that the next step needs first are done
first. One gradient at a time is cast to the master's dtype, never the whole model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import StepError
from roundpipe.optim.twin import Twin, frozen_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

EACH_ALONE = (
    # what the update of one parameter reads besides itself, its gradient and its state: nothing
    ("Adadelta", "elementwise"),
    ("Adafactor", "by matrix: row and column means, and the norms, of one parameter"),
    ("Adagrad", "elementwise"),
    ("Adam", "elementwise"),
    ("AdamW", "elementwise"),
    ("Adamax", "elementwise"),
    ("ASGD", "elementwise"),
    ("Muon", "by matrix: the products are of one parameter with itself"),
    ("NAdam", "elementwise; the product of its momenta is kept for each parameter"),
    ("RAdam", "elementwise"),
    ("RMSprop", "elementwise"),
    ("Rprop", "elementwise"),
    ("SGD", "elementwise"),
)
"""Classes of ``torch.optim``, as far as the installed torch has them, and why they may be here.

Not here: LBFGS (one direction over all parameters), SparseAdam (gradients are dense here).
"""


def is_each_alone(optimizer: Optimizer) -> bool:
    """Whether stepping parameter by parameter is the same as one ``step`` of the whole.

    Only for the very classes listed: what a subclass does is unknown.
    """
    kinds = {getattr(torch.optim, name, None) for name, _ in EACH_ALONE}
    return type(optimizer) in kinds


class _Frozen:
    """A parameter's group as it was at the call of ``step``; to be used once."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self.is_begun = False


class ByParameter:
    """A ``torch.optim`` optimizer as `roundpipe.optim.layered.Layered`."""

    def __init__(self, optimizer: Optimizer) -> None:
        assert is_each_alone(optimizer), f"it may mix parameters: {type(optimizer)}"
        self.optimizer = optimizer

    def hyperparameters(self) -> Mapping[Tensor, _Frozen]:
        """See Layered."""
        # Schedulers look at this to warn that they run before the optimizer's step.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return {p: _Frozen(group) for group in frozen_groups(self.optimizer)
                for p in group["params"]}  # fmt: skip

    @torch.no_grad()
    def update_(
        self,
        parameter: Tensor,
        grad: Tensor,
        snapshot: Mapping[Tensor, _Frozen],
        *,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """See Layered. Takes memory for one gradient in the parameter's dtype, unless it has it.

        Raises StepError in a second call for a parameter whose first call failed in the optimizer:
        nobody knows how far it came.
        """
        frozen = snapshot[parameter]
        kind = type(self.optimizer).__name__
        if frozen.is_begun:
            raise StepError(f"torch.optim.{kind} failed in the middle of a parameter's step")
        cast = grad.to(parameter.dtype)
        if grad_scale is not None:
            cast = cast * grad_scale if cast is grad else cast.mul_(grad_scale)
        twin = Twin(self.optimizer, [{**frozen.group, "params": [parameter]}])
        frozen.is_begun = True
        parameter.grad = cast
        try:
            twin.step()
        finally:
            parameter.grad = None
        if out is not None:
            out.copy_(parameter)
