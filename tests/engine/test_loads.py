"""What actions take on an emulated machine: bytes as in the simulator, memory in balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.device.emulated_links import Load, Way
from roundpipe.engine.program import Program
from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.work import Prices

COSTS = Costs(
    tuple(
        LayerCost(
            forward_seconds=1.0 + layer,
            backward_seconds=2.0 + layer,
            weight_bytes=1000 * (layer + 1),
            gradient_bytes=2000 * (layer + 1),
            download_bytes=1000 * (layer + 1),
            boundary_bytes=100 + layer if layer else 0,
            activation_bytes=500 + layer,
            peak_bytes=50 + layer,
            update_bytes=28_000 + layer,
            publish_bytes=6_000 + layer,
        )
        for layer in range(6)
    ),
    frozenset(range(6)),
)
TIED = Costs(
    (*COSTS.layers[:5], replace(COSTS.layers[5], borrows=(0,), update_bytes=0)), frozenset(range(5))
)
PARTITION = Partition(
    (range(2), range(2, 5)), range(5, 6), (range(4, 5), range(2, 4), range(1, 2), range(1))
)


def step(costs=COSTS, *, devices=2, microbatches=3, rounds=1, replicas=Replicas(), **options):  # noqa: B008
    computation = round_robin(
        PARTITION,
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=rounds,
        replicas=replicas,
    )
    options = {"min_chunk_bytes": 1024, **options}
    return lower_chain(computation, Options(costs=costs, **options))[-1]


def loads_of(schedule, costs=COSTS, **how):
    program = Program(schedule, costs)
    return {action: program.loads.of(action, **how) for _, action in schedule.actions()}


@settings(max_examples=15, deadline=None)
@given(
    costs=st.sampled_from([COSTS, TIED]),
    devices=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    two_rounds=st.booleans(),
    degrees=st.tuples(*[st.integers(1, 4)] * 3),
    staleness=st.integers(0, 1),
)
def test_time_and_bytes_are_those_of_the_simulator(
    costs, devices, microbatches, two_rounds, degrees, staleness
):
    schedule = step(
        costs,
        devices=devices,
        microbatches=microbatches,
        rounds=1 + (two_rounds and microbatches > 1),
        replicas=Replicas(*degrees),
        staleness=staleness,
    )
    work = Prices(costs=costs).work(schedule)
    moved: dict[tuple[Op, int], list[float]] = {}
    for action, load in loads_of(schedule, costs).items():
        theirs = work(action)
        assert load.seconds == pytest.approx(theirs.seconds), str(action)
        if action.op in (Op.UPLOAD, Op.DOWNLOAD):  # they cut evenly, not at multiples of 256
            both = moved.setdefault((action.op, action.index), [0.0, 0.0])
            both[0] += load.num_bytes
            both[1] += theirs.num_bytes
        else:
            assert load.num_bytes == theirs.num_bytes, str(action)
        if load.num_bytes:
            is_host = load.way is Way.HOST
            assert (is_host, load.way is not Way.DOWN) == (theirs.road.is_host, theirs.road.up)
    assert all(ours == pytest.approx(theirs) for ours, theirs in moved.values())


@settings(max_examples=15, deadline=None)
@given(
    devices=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    degrees=st.tuples(*[st.integers(1, 4)] * 3),
    by_layer=st.booleans(),
)
def test_what_a_step_takes_on_a_device_it_gives_back(devices, microbatches, degrees, by_layer):
    schedule = step(devices=devices, microbatches=microbatches, replicas=Replicas(*degrees))
    balance = dict.fromkeys(range(devices), 0)
    for action, load in loads_of(schedule, by_layer=by_layer).items():
        if load.takes or load.gives:
            balance[schedule.visits[action.index].device] += load.takes - load.gives
    assert balance == dict.fromkeys(range(devices), 0)


def test_a_forward_holds_what_it_was_given_and_what_leaves():
    loads = loads_of(step())
    assert loads[Action.parse("A1.0")] == Load(num_bytes=102, way=Way.UP, takes=102)
    # Boundaries 4 (a backward stage begins there) and 5.
    assert loads[Action.parse("F1.0")] == Load(3 + 4 + 5, takes=104 + 105, needs=54, gives=102)
    assert loads[Action.parse("a1.0")] == Load(num_bytes=209, way=Way.DOWN, gives=209)


def test_a_backward_holds_activations_from_recompute_to_its_end():
    loads = loads_of(step())
    assert loads[Action.parse("R4.0")] == Load(3 + 4, takes=502 + 503, needs=53)
    assert loads[Action.parse("B4.0")] == Load(
        4 + 5, takes=102, needs=53, gives=502 + 503 + 102 + 104
    )
    assert loads[Action.parse("g4.0")] == Load(num_bytes=102, way=Way.DOWN, gives=102)


def test_recompute_by_layer_takes_longer_and_holds_boundaries():
    loads = loads_of(step(), by_layer=True)
    assert loads[Action.parse("R4.0")] == Load(3, takes=103, needs=53)
    assert loads[Action.parse("B4.0")] == Load(
        3 + 4 + 4 + 5, takes=102, needs=503 + 53, gives=103 + 102 + 104
    )


def test_chunks_are_cut_where_the_engine_cuts():
    schedule = step()
    loads = loads_of(schedule)
    chunks = [load.num_bytes for action, load in loads.items() if (action.op, action.index) ==
              (Op.UPLOAD, 1)]  # fmt: skip
    assert len(chunks) > 1
    assert sum(chunks) == 3000 + 4000 + 5000
    assert all(size % 256 == 0 for size in chunks[:-1])


def test_a_slower_device_takes_longer():
    schedule = step()
    program = Program(schedule, COSTS, speeds=(1.0, 0.5))
    for visit in schedule.visits:
        for action in visit.compute(0):
            alone = Program(schedule, COSTS).loads.of(action).seconds
            assert program.loads.of(action).seconds == alone * (1 + visit.device)


def test_without_costs_there_are_no_loads():
    assert Program(step()).loads is None


def test_every_compute_action_takes_time():
    loads = loads_of(step())
    assert all(load.seconds > 0 for action, load in loads.items() if action.op in COMPUTE)
