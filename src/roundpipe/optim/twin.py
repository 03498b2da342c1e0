"""Steps an optimizer with other parameter groups than it has now.

An update runs later and in another thread than the call of ``step`` that it belongs to, yet must
see the learning rate of that call. A *twin* is an object of the same class that shares state and
everything else with the optimizer, except that its groups are the ones given. What a step changes
in groups or attributes (some optimizers count there) is carried back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

Group = dict[str, Any]


class Twin:
    """``optimizer`` with ``groups`` of its own; to be stepped once."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[Group]) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._twin: Optimizer = object.__new__(type(optimizer))
        vars(self._twin).update(vars(optimizer))
        vars(self._twin).pop("step", None)  # a scheduler's wrapper, bound to the original
        self._twin.param_groups = [dict(group) for group in groups]
        self._shared = dict(vars(self._twin))

    def step(self) -> list[Group]:
        """Step once; return what the step changed in each group."""
        self._twin.step()
        changes = _changes(self._shared, vars(self._twin))
        vars(self._optimizer).update(changes)
        return [
            _changes(was, now)
            for was, now in zip(self._groups, self._twin.param_groups, strict=False)
        ]


def frozen_groups(optimizer: Optimizer) -> list[Group]:
    """Copies of the parameter groups with values of their own (a learning rate may be a tensor)."""
    groups = []
    for group in optimizer.param_groups:
        frozen = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        frozen["params"] = list(group["params"])
        groups.append(frozen)
    return groups


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Group:
    return {k: v for k, v in now.items() if k not in was or v is not was[k]}
