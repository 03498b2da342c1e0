from __future__ import annotations

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, deal_visits
from roundpipe.plan.host_bytes import host_bytes
from roundpipe.plan.partition import Partition

LAYER = LayerCost(
    forward_seconds=1.0,
    backward_seconds=2.0,
    weight_bytes=200,
    gradient_bytes=400,
    download_bytes=200,
    boundary_bytes=10,
    pinned_bytes=400,
    pageable_bytes=1200,
)
COSTS = Costs((LAYER,) * 4, frozenset(range(4)))
CUT = Partition((range(3),), range(3, 4), (range(2, 3), range(2)))


def visits(**more):
    return deal_visits(CUT, COSTS, devices=2, **{"microbatches": 4, **more})


def test_a_plain_step_keeps_what_layers_keep_and_the_inputs_of_backward_stages() -> None:
    need = host_bytes(COSTS, visits())
    assert (need.weights, need.state, need.partial_sums) == (1600, 4800, 0)
    # Inputs of the fused stage and of the one below it; the bottom reads what the caller gave.
    assert need.saved_inputs == 2 * 4 * 10 + 4 * 10
    assert need.total == need.pinned + need.pageable == 1600 + 4800 + 120


def test_rounds_bound_saved_inputs_and_bring_gradients_down_in_parts() -> None:
    need = host_bytes(COSTS, visits(rounds=2))
    assert need.saved_inputs == 60
    # Four places for six visits, and a sum in fp32 where one in 16 bits would do.
    assert need.partial_sums == (400 + 800 + 800 + 400) + 4 * 200


def test_more_rounds_take_no_more_places() -> None:
    two, four = (host_bytes(COSTS, visits(rounds=rounds)).partial_sums for rounds in (2, 4))
    assert four <= two + 400 + 400  # each place is as large as the largest visit, at most


def test_each_replica_of_a_backward_stage_brings_a_part_down() -> None:
    only_fused = host_bytes(COSTS, visits(replicas=Replicas(forward=2, fused=2)))
    assert only_fused.partial_sums == 2 * 400 + 200
    assert only_fused.saved_inputs == host_bytes(COSTS, visits()).saved_inputs


def test_a_shared_weight_counts_one_part_as_its_layers_do() -> None:
    tied = LayerCost(
        forward_seconds=1.0,
        backward_seconds=2.0,
        gradient_bytes=400,
        boundary_bytes=10,
        pinned_bytes=900,
        borrows=(0,),
    )
    costs = Costs((*COSTS.layers[:3], tied), frozenset(range(3)))
    assert host_bytes(costs, visits()).partial_sums == 0
    twice = host_bytes(costs, visits(replicas=Replicas(fused=2)))
    assert twice.partial_sums == 400


def test_frozen_layers_bring_nothing_down() -> None:
    frozen = LayerCost(forward_seconds=1.0, backward_seconds=2.0, boundary_bytes=10)
    costs = Costs((frozen, *COSTS.layers[1:]), frozenset({1, 2, 3}))
    need = host_bytes(costs, deal_visits(CUT, costs, devices=2, microbatches=4, rounds=2))
    assert need.partial_sums == 4 * 400 + 3 * 200
