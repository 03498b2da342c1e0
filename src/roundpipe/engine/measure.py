"""What each layer costs: from its sizes first, then as measured while training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.costs import Costs, LayerCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.engine.run import Run
    from roundpipe.models.spec import ModelSpec
    from roundpipe.store.layer import HostLayer

_SECONDS_PER_WEIGHT = 1e-9  # only ratios matter before anything is measured
_LEAST_SECONDS = 1e-6


def costs_from_sizes(spec: ModelSpec, layers: Sequence[HostLayer]) -> Costs:
    """Take a layer's time as proportional to its matrices, except the first's, which may look up.

    An embedding in front has a large matrix and nothing to compute with it, so a first layer that
    owns the widest matrix of the model counts as nothing. Measured times replace all this.
    """
    matrices = [_matrix_elements(spec, index) for index in range(len(layers))]
    if len(matrices) > 2 and matrices[0] >= max(matrices[1:-1]):
        matrices[0] = 0
    costs = []
    for layer, elements in zip(layers, matrices, strict=True):
        forward = elements * _SECONDS_PER_WEIGHT + _LEAST_SECONDS
        costs.append(
            LayerCost(
                forward_seconds=forward,
                backward_seconds=2 * forward,
                weight_bytes=layer.slot_layout.num_bytes,
                gradient_bytes=layer.slot_gradient_layout.num_bytes,
                borrows=tuple(owner.index for owner in layer.owners),
            )
        )
    owners = frozenset(layer.index for layer in layers if layer.trainable)
    return Costs(tuple(costs), owners)


def _matrix_elements(spec: ModelSpec, layer: int) -> int:
    return sum(t.numel() for t in spec.layers[layer].tensors.values() if t.dim() >= 2)


def measured(costs: Costs, run: Run) -> Costs:
    """``costs`` with the seconds that ``run`` took, as far as it tells.

    Forward is measured layer by layer, recompute counted in; medians, because whatever comes
    between makes a layer longer. A backward's time goes to its layers in proportion to their
    forward. Only for devices that compute where they issue: elsewhere the host cannot see it.
    """
    forward = {
        layer: max(
            _median(run.layer_seconds.get(layer), otherwise=cost.forward_seconds), _LEAST_SECONDS
        )
        for layer, cost in enumerate(costs.layers)
    }
    backward: dict[int, list[float]] = {}
    for span in run.timings.spans():
        if span.action.op not in COMPUTE:
            continue
        visit = run.program.schedule.visits[span.action.index]
        total = sum(forward[layer] for layer in visit.layers)
        seconds = span.end - span.start
        if span.action.op is Op.FUSED:
            seconds -= total
        elif span.action.op is not Op.BACKWARD:
            continue
        for layer in visit.layers:
            backward.setdefault(layer, []).append(max(seconds, 0.0) * forward[layer] / total)
    return Costs(
        tuple(
            replace(
                cost,
                forward_seconds=forward[layer],
                backward_seconds=_median(backward.get(layer), otherwise=cost.backward_seconds),
            )
            for layer, cost in enumerate(costs.layers)
        ),
        costs.owners,
    )


def _median(values: list[float] | None, *, otherwise: float) -> float:
    return max(sorted(values)[len(values) // 2], _LEAST_SECONDS) if values else otherwise
