from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from roundpipe.engine.caller import CallerState
from roundpipe.engine.program import Program
from roundpipe.engine.run import Boundaries, Call, Run
from roundpipe.errors import StallError, StepError
from roundpipe.plan.actions import Action
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.footprint import Footprints, Turns
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower


def act(text):
    return Action.parse(text)


class Done:
    """An event that is complete."""

    def is_complete(self):
        return True


@pytest.fixture(scope="module")
def program():
    layer = LayerCost(
        forward_seconds=1.0, backward_seconds=2.0, weight_bytes=256, gradient_bytes=256
    )
    costs = Costs((layer,) * 3, frozenset(range(3)))
    partition = Partition((range(2),), range(2, 3), (range(2),))
    computation = round_robin(partition, costs, devices=2, microbatches=2)
    return Program(lower(computation, Options(costs=costs)))


def run_of(program, previous=None, step=7):
    call = Call(microbatches=(), caller=CallerState.capture(), seed=0, step=step)
    return Run(program, call, Footprints(program.schedule, Turns()), previous)


def test_what_was_issued_is_received_by_name(program):
    run, event = run_of(program), Done()
    run.publish(act("F0.0"), event)
    assert run.receive(act("F0.0")) is run.event(act("F0.0")) is event
    with pytest.raises(AssertionError, match=r"F0\.1 is not issued"):
        run.event(act("F0.1"))


def test_an_action_of_the_step_before_is_received_from_that_run(program):
    first = run_of(program)
    second, alone = run_of(program, previous=first), run_of(program)
    event = Done()
    first.publish(act("S0"), event)
    assert second.receive(act("-S0")) is event
    assert alone.receive(act("-S0")) is None
    assert second.receive(act("-S99")) is None  # nothing that the run before does


def test_the_first_failure_counts_and_wakes_whoever_waits(program):
    run, told = run_of(program), []

    def wait():
        try:
            run.receive(act("B2.0"))
        except StepError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    event, error = Done(), OSError("first")
    run.publish(act("F0.0"), event)
    run.fail(error, act("F0.1"))
    run.fail(ValueError("second"), act("F0.0"))
    waiting.join(10)
    assert [str(each) for each in told] == ["the step was given up"]
    assert (run.failure, run.failed_at) == (error, act("F0.1"))
    assert run.ready.is_set()
    assert run.receive(act("F0.0")) is event  # what is issued will end by itself


def test_a_run_is_over_when_the_last_action_of_every_stream_is(program):
    run = run_of(program)
    assert not run.is_over()
    for action in program.schedule.order[:-1]:
        run.publish(action, Done())
    assert not run.is_over()
    run.publish(program.schedule.order[-1], Done())
    assert run.is_over()


SPEC = SimpleNamespace(layers=[SimpleNamespace(name=name) for name in ("embed", "block", "head")])


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("F0.1", "F0.1 (forward, stage 0, layers embed to block, microbatch 1) on device 0 (gpu)"),
        (
            "R2.1",
            "R2.1 (recompute, stage 2, layers embed to block, microbatch 1) on device 0 (gpu)",
        ),
        ("U2#0", "U2#0 (upload of weights, stage 2, layers embed to block) on device 0 (gpu)"),
        ("S1", "S1 (optimizer update of layer block) on host"),
    ],
)
def test_an_action_is_described_by_what_where_and_which(program, action, text):
    assert run_of(program).describe(act(action), SPEC, ["gpu", "cpu"]) == text


def test_a_failure_becomes_an_error_that_says_step_place_and_reason(program):
    run = run_of(program)
    run.fail(OSError("copy broke"), act("S1"))
    error = run.as_step_error(SPEC, ["gpu", "cpu"], "\nhint: wait")
    assert str(error) == (
        "step 7: S1 (optimizer update of layer block) on host failed: OSError: copy broke\n"
        "hint: wait"
    )
    stalled, stall = run_of(program), StallError("nothing finished")
    stalled.fail(stall)
    assert stalled.as_step_error(SPEC, [], "") is stall
    given_up = run_of(program)
    given_up.fail(OSError("before anything"))
    assert "step 7: the call failed: OSError" in str(given_up.as_step_error(SPEC, [], ""))


# ---- boundaries


def test_a_boundary_is_let_go_by_its_last_reader():
    boundaries = Boundaries({(2, 0): 2})
    boundaries.put(2, 0, "x")
    boundaries.put(2, 1, "y")  # read by one, if nothing is said
    assert boundaries.take(2, 0) == "x"
    assert boundaries.held == {(2, 0): "x", (2, 1): "y"}
    assert (boundaries.take(2, 0), boundaries.take(2, 1)) == ("x", "y")
    assert boundaries.held == {}


def test_several_streams_may_take_at_once():
    readers = 8
    boundaries = Boundaries({(0, 0): readers})
    boundaries.put(0, 0, "x")
    got, met = [], threading.Barrier(readers, timeout=10)

    def take():
        met.wait()
        got.append(boundaries.take(0, 0))

    threads = [threading.Thread(target=take) for _ in range(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["x"] * readers
    assert boundaries.held == {}
