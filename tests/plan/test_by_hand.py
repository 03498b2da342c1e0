from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.config import ModelExecutePlan
from roundpipe.errors import ConfigError, PlanError
from roundpipe.plan.by_hand import balanced, forward_of, partition_in, partition_of
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import forward_only, replicated
from roundpipe.plan.memory import slot_bytes
from roundpipe.plan.partition import partition_for
from roundpipe.plan.schedule import Phase


def chain(*seconds: tuple[float, float], weight: int = 10, lowest: int = 0) -> Costs:
    layers = tuple(
        LayerCost(
            forward_seconds=forward,
            backward_seconds=backward,
            weight_bytes=weight,
            gradient_bytes=2 * weight if at >= lowest else 0,
        )
        for at, (forward, backward) in enumerate(seconds)
    )
    return Costs(layers, frozenset(range(lowest, len(layers))))


SIX = chain(*[(1, 2)] * 6)


def test_a_plan_by_hand_needs_no_backward_below_what_is_trained() -> None:
    costs = chain(*[(1, 2)] * 6, lowest=2)
    found = partition_of(ModelExecutePlan([range(5)], [range(5, 6), range(1, 5), range(1)]), costs)
    assert found.backward == (range(2, 5),)


@pytest.mark.parametrize(
    ("forward", "backward", "error", "message"),
    [
        ([range(6)], [], ConfigError, "no backward stage\nhint: bwd_plan begins with the fused"),
        ([range(4)], [range(4, 5), range(4)], PlanError, "must end with the last of 6 layers"),
        ([range(5)], [range(5, 6), range(2, 5)], PlanError, "down to the lowest trained layer, 0"),
        ([range(3)], [range(5, 6), range(5)], PlanError, "forward stages must cover layers 0 to 5"),
    ],
)
def test_a_plan_by_hand_that_misses_a_layer_is_refused(forward, backward, error, message) -> None:
    with pytest.raises(error, match=message):
        partition_of(ModelExecutePlan(forward, backward), SIX)


def test_a_pass_without_gradient_takes_the_fused_stage_too_where_forward_ends_below_it() -> None:
    fused = ModelExecutePlan([range(2), range(2, 4)], [range(4, 6), range(4)])
    assert forward_of(fused, SIX) == (range(2), range(2, 4), range(4, 6))
    train = ModelExecutePlan([range(3), range(3, 6)], [range(3, 6), range(3)])
    assert forward_of(train, SIX) == (range(3), range(3, 6))
    with pytest.raises(PlanError, match="each once"):
        forward_of(ModelExecutePlan([range(2)], [range(3, 6)]), SIX)


def test_the_stages_of_a_schedule_are_those_of_its_first_microbatch() -> None:
    partition = partition_for(SIX, 3)
    made = replicated(partition, SIX, devices=2, microbatches=4, rounds=2)
    assert partition_in(made) == partition
    with pytest.raises(PlanError, match="fuses the last layers, once a microbatch: none"):
        partition_in(forward_only([range(6)], devices=1, microbatches=2))


def test_each_kind_of_run_has_its_stages() -> None:
    assert balanced([SIX], "infer", min_stages=1, upper_threshold=3) == [
        ([range(3), range(3, 6)], [])
    ]
    assert balanced([SIX], "train", min_stages=1) == [
        ([range(3), range(3, 6)], [range(at, at + 1) for at in range(5, -1, -1)])
    ]
    assert balanced([SIX], "fused", min_stages=1, upper_threshold=2) == [
        ([range(4)], [range(4, 6), range(2, 4), range(2)])
    ]


any_times = st.tuples(st.integers(1, 9), st.integers(1, 9))
any_chain = st.lists(any_times, min_size=1, max_size=7).map(lambda times: chain(*times))


@settings(max_examples=60)
@given(
    st.lists(any_chain, min_size=1, max_size=3),
    st.sampled_from(["infer", "train", "fused"]),
    st.integers(1, 12),
    st.floats(1, 4),
    st.sampled_from([None, 30, 60, 90]),
)
def test_balanced_stages_keep_their_limits(chains, run_type, least, threshold, size) -> None:
    found = balanced(
        chains, run_type, min_stages=least, upper_threshold=threshold, stage_bytes=size
    )

    def seconds(costs: Costs, stage: range, phase: Phase) -> float:
        held = [costs.layers[layer] for layer in stage]
        backward = 0 if phase is Phase.FORWARD else sum(c.backward_seconds for c in held)
        return sum(c.forward_seconds for c in held) + backward

    phase = Phase.FORWARD if run_type == "infer" else Phase.BACKWARD
    slowest = max(
        seconds(costs, range(at, at + 1), phase)
        for costs in chains
        for at in range(costs.num_layers)
    )
    count = 0
    for costs, (forward, backward) in zip(chains, found, strict=True):
        top = backward[0].start if run_type == "fused" else costs.num_layers
        assert [layer for stage in forward for layer in stage] == list(range(top))
        whole = [] if run_type == "infer" else list(range(costs.num_layers))
        assert [layer for stage in backward[::-1] for layer in stage] == whole
        for phase_, stages in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
            for stage in stages:
                assert seconds(costs, stage, phase_) <= threshold * slowest * (1 + 1e-6)
                fits = size is None or slot_bytes(costs, stage, phase_) <= size
                assert fits or len(stage) == 1
        count += len(forward) + len(backward)
    more = balanced(
        chains, run_type, min_stages=count + 1, upper_threshold=threshold, stage_bytes=size
    )
    finer = sum(len(forward) + len(backward) for forward, backward in more)
    assert finer >= count
    assert count >= least or finer == count  # as many as there can be
