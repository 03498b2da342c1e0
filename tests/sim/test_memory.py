"""What devices and host hold while a step runs, on a step small enough to do by hand."""

import pytest

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, outline
from roundpipe.plan.timeline import Timeline
from roundpipe.sim.memory import memory_over_time, peaks
from roundpipe.sim.simulate import simulate_machine
from roundpipe.sim.work import Prices

LAYER = LayerCost(
    forward_seconds=1,
    backward_seconds=2,
    weight_bytes=100,
    gradient_bytes=40,
    boundary_bytes=10,
    activation_bytes=7,
    peak_bytes=3,
)
COSTS = Costs((LAYER,) * 2, frozenset({0, 1}))


@pytest.fixture
def series():
    partition = Partition((range(1),), range(1, 2), (range(1),))
    computation = round_robin(partition, COSTS, devices=1, microbatches=2)
    chain = outline(computation, Options(costs=COSTS), steps=1)
    spans = simulate_machine(chain, Prices(costs=COSTS), None).spans
    timeline = Timeline.of(chain, spans, devices=["one"], layers=["a", "b"])
    return memory_over_time(timeline.steps, COSTS, host_bytes=1000)


def test_a_device_holds_the_slots_that_overlap_and_one_microbatch(series):
    # The fused visit comes up while the forward computes, the backward while the fused one does.
    forward, trained = 100, 140
    kept = 3 * 2 * 10 + 7 + 3  # boundaries in use and on their way, activations, the worst moment
    assert peaks(series)["0.memory"] == trained + trained + kept
    boundaries = 2 * 2 * 10 + 3
    assert series["0.memory"][0] == (0.0, forward + boundaries + trained)
    assert series["0.memory"][-1][1] == 0


def test_the_host_keeps_an_input_until_the_stage_above_has_read_it(series):
    assert peaks(series)["host.memory"] == 1000 + 2 * 10
    assert series["host.memory"][-1][1] == 1000


def test_nothing_is_held_before_and_after(series):
    assert all(size >= 0 for each in series.values() for _, size in each)
