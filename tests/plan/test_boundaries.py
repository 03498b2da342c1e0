"""What forward keeps for recompute comes down with its boundaries, and is awaited."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action
from roundpipe.plan.check import check
from roundpipe.plan.generators import backward_only, forward_only, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain

# Backward stage 1-2 lies in both forward stages; of 3 no stage begins inside the second of them.
CUT = Partition((range(2), range(2, 4)), range(4, 5), (range(3, 4), range(1, 3), range(1)))
# One forward stage hands nothing out beside its end, which stays where there is one device.
COARSE = Partition((range(2), range(2, 3)), range(3, 4), (range(3),))


def lowered(costs_of, cut, *, devices):
    costs = costs_of(cut.fused.stop)
    computation = round_robin(cut, costs, devices=devices, microbatches=3)
    return lower_chain(computation, Options(costs=costs))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_forward_that_is_recomputed_always_sends_down_what_it_keeps(costs_of, devices):
    chain = lowered(costs_of, COARSE, devices=devices)
    check(chain)
    downs = {str(action) for _, action in chain[-1].actions() if action.op.value == "a"}
    assert {f"a{visit}.{microbatch}" for visit in (0, 1) for microbatch in range(3)} <= downs


@pytest.mark.parametrize("devices", [2, 3])
def test_an_arrival_comes_after_all_that_keep_something_for_it(costs_of, devices):
    chain = lowered(costs_of, CUT, devices=devices)
    schedule = chain[-1]
    assert schedule.kept_for[4, 0] == (0, 1)
    assert schedule.kept_for[3, 0] == (1,)
    check(chain)


def test_an_arrival_that_does_not_wait_for_it_is_found(costs_of):
    found = 0
    for devices in (1, 2, 3, 4):
        *before, schedule = lowered(costs_of, CUT, devices=devices)
        for key, makers in schedule.kept_for.items():
            arrival = Action.parse(f"A{key[0]}.{key[1]}")
            downs = {Action.parse(f"a{maker}.{key[1]}") for maker in makers}
            left = tuple(wait for wait in schedule.waits[arrival] if wait not in downs)
            if left != schedule.waits[arrival]:
                found += 1
                broken = replace(schedule, waits={**schedule.waits, arrival: left})
                with pytest.raises(PlanError, match=rf"{arrival}"):
                    check([*before, broken])
    assert found


def test_a_pass_keeps_what_the_backward_that_continues_it_recomputes():
    stages = [range(2), range(2, 3), range(3, 5)]
    assert forward_only(stages, devices=2, microbatches=2).keeps == {}
    kept = forward_only(stages, devices=2, microbatches=2, recomputed=1).keeps
    assert kept == {0: range(1, 2), 1: range(2, 3), 2: range(3, 5)}
    assert forward_only(stages, devices=2, microbatches=2, recomputed=4).keeps == {2: range(4, 5)}
    backward = backward_only(stages[::-1], devices=2, microbatches=2)
    assert backward.keeps == {}
    assert set(backward.kept_for.values()) == {()}
