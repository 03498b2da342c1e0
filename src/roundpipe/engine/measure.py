"""What each layer costs: from its sizes first, then as measured while training.

Where the host computes, a layer's forward is timed by itself. A card's streams are timed by visits,
whose time goes to their layers in proportion to what they cost so far: since forward and backward
stages are cut differently, a few passes over all visits tell the layers apart. There the time that
the host takes for a layer is what Python needs to issue it.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.store.four_bit import unpacked_form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from roundpipe.engine.run import Run, Timings
    from roundpipe.engine.weigh import Sizes
    from roundpipe.models.spec import ModelSpec
    from roundpipe.store.layer import HostLayer

SECONDS_PER_WEIGHT = 1e-9  # only ratios matter before anything is measured
_LEAST_SECONDS = 1e-6
_UPDATE_BYTES, _PUBLISH_BYTES = 28, 6  # of host memory for a parameter, see docs/design
_PASSES = 4  # over all visits, to tell their layers apart


def costs_from_sizes(
    spec: ModelSpec,
    layers: Sequence[HostLayer],
    *,
    seconds_per_weight: float = SECONDS_PER_WEIGHT,
) -> Costs:
    """Take a layer's time as proportional to its matrices, except the first's, which may look up.

    An embedding in front has a large matrix and nothing to compute with it, so a first layer that
    owns the widest matrix of the model counts as nothing. Measured times replace all this.
    """
    matrices = [_matrix_elements(spec, index) for index in range(len(layers))]
    if len(matrices) > 2 and matrices[0] >= max(matrices[1:-1]):
        matrices[0] = 0
    costs = []
    for layer, elements in zip(layers, matrices, strict=True):
        forward = elements * seconds_per_weight + _LEAST_SECONDS
        trained = layer.trainable_layout
        count = sum(layer.tensors[name].numel() for name in layer.trainable)
        sums = layer.slot_gradient_layout
        costs.append(
            LayerCost(
                forward_seconds=forward,
                backward_seconds=2 * forward,
                weight_bytes=layer.slot_layout.num_bytes,
                gradient_bytes=sums.num_bytes,
                download_bytes=sums.num_bytes if layer.shares_parameters else trained.num_bytes,
                # Autograd makes a parameter's gradient before it is copied into its place. A
                # forward has all packed weights unpacked, a backward one at a time.
                peak_bytes=max((place.num_bytes for place in sums.slices), default=0)
                + sum(packed.num_bytes for packed in layer.packed.values()),
                update_bytes=_UPDATE_BYTES * count,
                publish_bytes=_PUBLISH_BYTES * count,
                borrows=tuple(owner.index for owner in layer.owners),
            )
        )
    owners = frozenset(layer.index for layer in layers if layer.trainable)
    return Costs(tuple(costs), owners)


def _matrix_elements(spec: ModelSpec, layer: int) -> int:
    shapes = [unpacked_form(tensor)[0] for tensor in spec.layers[layer].tensors.values()]
    return sum(prod(shape) for shape in shapes if len(shape) >= 2)


def weighed(costs: Costs, sizes: Sizes) -> Costs:
    """``costs`` with the bytes that were weighed.

    At a layer's worst moment two tensors as large as the largest that it keeps are there beside
    what it keeps: a gradient and the one that is made from it; or what the layer itself says.
    """
    return Costs(
        tuple(
            replace(
                cost,
                boundary_bytes=sizes.boundary.get(layer, cost.boundary_bytes),
                activation_bytes=sizes.kept.get(layer, cost.activation_bytes),
                peak_bytes=cost.peak_bytes
                + max(2 * sizes.largest.get(layer, 0), sizes.work.get(layer, 0)),
            )
            for layer, cost in enumerate(costs.layers)
        ),
        costs.owners,
    )


def measured(costs: Costs, run: Run) -> Costs:
    """``costs`` with the seconds that ``run`` took, as far as it tells; on the CPU.

    Forward is measured layer by layer, recompute counted in; medians, because whatever comes
    between makes a layer longer. A backward's time goes to its layers in proportion to their
    forward.
    """
    forward = _forward(run, [cost.forward_seconds for cost in costs.layers])
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


def measured_by_visits(costs: Costs, run: Run) -> Costs:
    """``costs`` with the seconds of visits on cards, and of the host threads that issued them."""
    visits = run.program.schedule.visits
    seconds = visit_seconds(run.timings)
    forward = [cost.forward_seconds for cost in costs.layers]
    backward = [cost.backward_seconds for cost in costs.layers]
    ops: dict[Op, tuple[list[float], ...]] = {
        Op.FORWARD: (forward,),
        Op.RECOMPUTE: (forward,),
        Op.BACKWARD: (backward,),
        Op.FUSED: (forward, backward),
    }
    for _ in range(_PASSES):
        for (number, op), took in seconds.items():
            _fit(visits[number].layers, ops[op], took)
    issue = _forward(run, [cost.host_forward_seconds for cost in costs.layers], least=0.0)
    issue_backward = [cost.host_backward_seconds for cost in costs.layers]
    for number, times in run.backward_seconds.items():
        held = visits[number].layers
        total = sum(issue[layer] for layer in held) or 1.0
        for layer in held:
            issue_backward[layer] = _median(times, otherwise=0.0) * issue[layer] / total
    return Costs(
        tuple(
            replace(
                cost,
                forward_seconds=forward[layer],
                backward_seconds=backward[layer],
                host_forward_seconds=issue[layer],
                host_backward_seconds=issue_backward[layer],
            )
            for layer, cost in enumerate(costs.layers)
        ),
        costs.owners,
    )


def visit_seconds(timings: Timings) -> dict[tuple[int, Op], float]:
    """What each visit took of one microbatch, by what it did; medians of those that are over."""
    found: dict[tuple[int, Op], list[float]] = {}
    for span in timings.spans():
        if span.action.op in COMPUTE:
            key = (span.action.index, span.action.op)
            found.setdefault(key, []).append(span.end - span.start)
    return {key: _median(times, otherwise=0.0) for key, times in found.items()}


def drift(before: Mapping[tuple[int, Op], float], now: Mapping[tuple[int, Op], float]) -> float:
    """How far visits' shares of the time have moved: what would have to go from some to others.

    Between 0 and 1. That all has become slower together is no drift: another plan would be no help.
    """
    whole, others = sum(before.values()), sum(now.values())
    if not whole or not others:
        return 0.0
    keys = before.keys() | now.keys()
    return sum(abs(before.get(k, 0.0) / whole - now.get(k, 0.0) / others) for k in keys) / 2


def _fit(layers: range, times: Iterable[list[float]], took: float) -> None:
    """Scale the layers' times so that they add up to what was taken of them together."""
    total = sum(each[layer] for each in times for layer in layers)
    for each in times:
        for layer in layers:
            share = each[layer] / total if total else 1.0 / len(layers)
            each[layer] = max(took * share, _LEAST_SECONDS)


def _forward(
    run: Run, otherwise: Sequence[float], *, least: float = _LEAST_SECONDS
) -> Mapping[int, float]:
    """Seconds of the host thread for each layer's forward."""
    return {
        layer: max(_median(run.layer_seconds.get(layer), otherwise=known), least)
        for layer, known in enumerate(otherwise)
    }


def _median(values: list[float] | None, *, otherwise: float) -> float:
    return max(sorted(values)[len(values) // 2], _LEAST_SECONDS) if values else otherwise
