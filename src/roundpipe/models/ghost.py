"""Ghost layers: layers with declared costs and next to nothing in them.

They make a chain of any size that trains anywhere: each holds one number, passes on a boundary of
one number a sample, and declares what the layer it stands for would take. Devices of an emulated
machine take the declared time and memory; on any other device ghosts are just very small layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roundpipe.plan.costs import Costs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from roundpipe.plan.costs import LayerCost


class GhostLayer(nn.Module):
    """Multiplies its input, ``[samples, 1]``, by one number, and by those it borrows."""

    def __init__(
        self, cost: LayerCost, *, is_owner: bool = True, borrowed: Iterable[nn.Parameter] = ()
    ) -> None:
        super().__init__()
        self.cost = cost
        self.weight = nn.Parameter(torch.ones(1), requires_grad=is_owner)
        self.borrowed = nn.ParameterList(borrowed)

    def forward(self, x: Tensor) -> Tensor:
        """One number a sample for one number a sample."""
        x = x * self.weight
        for factor in self.borrowed:
            x = x * factor
        return x


def ghost_chain(costs: Costs) -> nn.Sequential:
    """A chain of ghosts that declare ``costs``: frozen, trained and tied as these say."""
    layers: list[GhostLayer] = []
    for index, cost in enumerate(costs.layers):
        layers.append(
            GhostLayer(
                cost,
                is_owner=index in costs.owners,
                borrowed=[layers[owner].weight for owner in cost.borrows],
            )
        )
    return nn.Sequential(*layers)


def ghost_loss(outputs: Tensor, _: object = None) -> Tensor:
    """The mean of a microbatch's numbers."""
    return outputs.mean()


def declared_costs(module: nn.Module) -> Costs | None:
    """What a chain of ghosts declares; None for anything that holds another layer."""
    layers = list(module.children()) if isinstance(module, nn.Sequential) else [module]
    ghosts = [layer for layer in layers if isinstance(layer, GhostLayer)]
    if not ghosts or len(ghosts) < len(layers):
        return None
    return Costs(
        tuple(ghost.cost for ghost in ghosts),
        frozenset(index for index, ghost in enumerate(ghosts) if ghost.weight.requires_grad),
    )
