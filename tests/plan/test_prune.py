"""Any lowered step obeys every rule, for ever; and needs every one of its waits."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, forward_only, round_robin
from roundpipe.plan.partition import Partition, front
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.schedule import Schedule

MIB = 1 << 20
GATES = "activation_waits_behind_one_chunk"


@dataclass(frozen=True)
class Case:
    """A computation and how it is lowered."""

    computation: Schedule
    options: Options
    steps: int


@st.composite
def chains_of_layers(draw) -> Costs:
    """Costs of a few layers: some frozen, weights of any size, the last one perhaps tied."""
    num_layers = draw(st.integers(1, 7))
    every = range(num_layers)
    owners = draw(
        st.sampled_from([set(every), {num_layers - 1}, {num_layers // 2}, {0}])
        | st.sets(st.sampled_from(every))
        | st.integers(0, num_layers - 1).map(lambda lowest: set(range(lowest, num_layers)))
    )
    tied = draw(st.booleans()) and num_layers > 1
    layers = []
    for layer in every:
        borrows = (0,) if tied and layer == num_layers - 1 else ()
        is_trained = bool(owners.intersection((layer, *borrows)))
        layers.append(
            LayerCost(
                forward_seconds=draw(st.integers(1, 2)),
                backward_seconds=draw(st.integers(2, 4)),
                weight_bytes=draw(st.sampled_from([0, 1, 5, 12])) * MIB,
                gradient_bytes=draw(st.sampled_from([1, 5, 12])) * MIB if is_trained else 0,
                borrows=borrows,
            )
        )
    return Costs(tuple(layers), frozenset(owners))


@st.composite
def cases(draw) -> Case:
    costs = draw(chains_of_layers())
    devices, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    copies = st.sampled_from([1, 1, 2, 3])
    computation = round_robin(
        draw(st.sampled_from(front(costs))),
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=draw(st.integers(1, min(2, microbatches))),
        start_device=draw(st.integers(0, devices - 1)),
        replicas=Replicas(draw(copies), draw(copies), draw(copies)),
    )
    options = Options(costs=costs, staleness=draw(st.integers(0, 1)))
    return Case(computation, options, draw(st.sampled_from([3, 5])))


@settings(max_examples=40)
@given(cases())
def test_every_step_of_a_chain_obeys_every_rule(case: Case) -> None:
    chain = lower_chain(case.computation, case.options, steps=case.steps)
    for count in range(1, case.steps + 1):
        check(chain[:count])


@settings(max_examples=40)
@given(case=cases())
def test_a_step_may_be_repeated_for_ever(case: Case, for_ever: Callable) -> None:
    """A step is lowered once and run again and again: it must follow itself as well."""
    steps = for_ever(lower_chain(case.computation, case.options)[-1])
    for count in range(1, len(steps) + 1):
        broken = rules_broken(steps[:count])
        # The first steps have nothing to wait behind: slower perhaps, not wrong.
        assert broken <= ({GATES} if count < 3 else set())


def rules_broken(chain: list[Schedule]) -> set[str]:
    try:
        check(chain)
    except PlanError as error:
        return {line.split(":")[0] for line in str(error).splitlines()}
    return set()


def dropped(schedule: Schedule, action: Action, wait: Action) -> Schedule:
    left = tuple(other for other in schedule.waits[action] if other != wait)
    return replace(schedule, waits={**schedule.waits, action: left})


def uses_of_its_device(schedule: Schedule, action: Action) -> int:
    device = schedule.visits[action.index].device
    return sum(len(visit.microbatches) for visit in schedule.visits_on(device))


@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_any_dropped_wait_is_caught(case: Case, data: st.DataObject, for_ever: Callable) -> None:
    """In the chain it was lowered for, or at the latest when the step has followed itself.

    Only where a device runs one microbatch in a step, a wait may stand in for a use two steps back
    that something else has awaited too.
    """
    chain = lower_chain(case.computation, case.options, steps=case.steps)
    at = data.draw(st.integers(0, case.steps - 1))
    waits = [(action, wait) for action, after in chain[at].waits.items() for wait in after]
    for action, wait in data.draw(st.lists(st.sampled_from(waits), max_size=4)) if waits else ():
        mutant = dropped(chain[at], action, wait)
        if not rules_broken([*chain[:at], mutant]) and not rules_broken(for_ever(mutant)):
            assert wait.before, f"{action} without {wait}"
            assert uses_of_its_device(chain[at - 1], wait) == 1, f"{action} without {wait}"


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("more", [{}, {"rounds": 2}, {"replicas": Replicas(2, 2, 2)}])
def test_each_wait_of_a_small_step_is_needed(small_chain, staleness: int, more) -> None:
    chain = small_chain(staleness=staleness, **more)
    for action, after in chain[-1].waits.items():
        for wait in after:
            mutant = dropped(chain[-1], action, wait)
            assert rules_broken([*chain[:-1], mutant]), f"{action} without {wait}"


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_passes_without_gradient_may_follow_each_other(sizes, devices, microbatches) -> None:
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    layer = LayerCost(forward_seconds=1, backward_seconds=2, weight_bytes=9 * MIB, gradient_bytes=1)
    costs = Costs((layer,) * edges[-1], frozenset(range(edges[-1])))
    stages = [range(first, stop) for first, stop in pairwise(edges)]
    computation = forward_only(stages, devices=devices, microbatches=microbatches)
    chain = lower_chain(computation, Options(costs=costs))
    for count in range(1, 4):
        check(chain[:count])


def test_an_upload_does_not_wait_for_a_turn_that_its_weights_imply(costs_of) -> None:
    """One visit a device and step: two turns ago is two steps ago, and those updates are over."""
    costs = costs_of(3)
    partition = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))
    computation = round_robin(partition, costs, devices=4, microbatches=3)
    chain = lower_chain(computation, Options(costs=costs, staleness=1))
    upload = Action(Op.UPLOAD, 1, chunk=0)
    assert list(map(str, chain[-1].waits[upload])) == ["-P2"]


def test_a_chunk_that_starts_late_gets_a_later_gate() -> None:
    """An update may come after the activations that would have been the gates of the next chunk."""
    layer = LayerCost(
        forward_seconds=1, backward_seconds=2, weight_bytes=12 * MIB, gradient_bytes=12 * MIB
    )
    costs = Costs((*[layer] * 5, replace(layer, borrows=(0,))), frozenset(range(6)))
    for partition in front(costs):
        computation = round_robin(partition, costs, devices=4, microbatches=5, start_device=2)
        check(lower_chain(computation, Options(costs=costs, staleness=1)))


def test_a_device_whose_only_turn_hands_nothing_out_hides_no_earlier_one(costs_of) -> None:
    """Its next step looks one turn back only: what left the device before must be over by then."""
    costs = costs_of(4, trained=[1])
    partition = Partition((range(1), range(1, 3)), range(3, 4), (range(2, 3), range(1, 2)))
    computation = round_robin(
        partition, costs, devices=6, microbatches=2, rounds=2, replicas=Replicas(1, 2, 2)
    )
    check(lower_chain(computation, Options(costs=costs, staleness=1)))
