"""Every rule is seen to fail on a schedule that breaks it."""

from dataclasses import replace

import pytest

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action, Op
from roundpipe.plan.check import ORDER, STRUCTURE, check
from roundpipe.plan.generators import Replicas, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.schedule import Phase


def parse(text: str) -> Action:
    return Action.parse(text)


def with_waits(schedule, action, *after):
    return replace(schedule, waits={**schedule.waits, parse(action): tuple(map(parse, after))})


def without(schedule, *texts):
    """The schedule with some actions taken off their streams and out of the order of issue."""
    gone = set(map(parse, texts))
    return replace(
        schedule,
        streams={n: tuple(a for a in q if a not in gone) for n, q in schedule.streams.items()},
        order=tuple(action for action in schedule.order if action not in gone),
        waits={
            action: tuple(other for other in after if other not in gone)
            for action, after in schedule.waits.items()
            if action not in gone
        },
    )


def with_stream(schedule, name, text):
    """The schedule with one stream in another order, issued so."""
    queue = tuple(map(parse, text.split()))
    places = iter(queue)
    order = tuple(next(places) if a in set(queue) else a for a in schedule.order)
    return replace(schedule, streams={**schedule.streams, name: queue}, order=order)


def broken_rules(chain, last) -> set[str]:
    with pytest.raises(PlanError) as caught:
        check([*chain[:-1], last])
    return {line.split(":")[0] for line in str(caught.value).splitlines() if ": " in line}


@pytest.fixture(params=[0, 1], ids=["exact", "stale"])
def chain(request, small_chain):
    return small_chain(staleness=request.param)


def test_what_passes_make_is_whole(chain) -> None:
    for count in range(1, len(chain) + 1):
        check(chain[:count])


def test_an_action_that_stands_twice(chain) -> None:
    last = chain[-1]
    twice = (*last.streams["host"], parse("S0"))
    broken = replace(last, streams={**last.streams, "host": twice})
    assert "each_action_once" in broken_rules(chain, broken)


def test_an_action_that_is_never_issued(chain) -> None:
    assert "each_action_once" in broken_rules(chain, replace(chain[-1], order=chain[-1].order[:-1]))


def test_a_wait_for_what_nothing_runs(chain) -> None:
    for text in ("S9", "-S9"):
        broken = with_waits(chain[-1], "N0", "O3#0", text)
        assert "waits_are_scheduled" in broken_rules(chain, broken)


def test_a_circle_of_waits(chain) -> None:
    broken = with_waits(chain[-1], "U1#0", "N2")
    assert "issue_order_respects_waits" in broken_rules(chain, broken)


def test_an_order_of_issue_that_is_not_the_streams_order(chain) -> None:
    last = chain[-1]
    order = list(last.order)
    one, two = order.index(parse("S1")), order.index(parse("S2"))
    order[one], order[two] = order[two], order[one]
    assert "issue_order_respects_waits" in broken_rules(chain, replace(last, order=tuple(order)))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_microbatch_that_misses_a_visit(chain, number: int) -> None:
    visits = list(chain[-1].visits)
    visits[number] = replace(visits[number], microbatches=(0, 1))
    broken = replace(chain[-1], visits=tuple(visits))
    assert "every_microbatch_goes_through_every_layer" in broken_rules(chain, broken)


def test_a_layer_that_runs_twice(chain) -> None:
    visits = list(chain[-1].visits)
    visits[2] = replace(visits[2], phase=Phase.FORWARD)
    broken = replace(chain[-1], visits=tuple(visits))
    assert "every_microbatch_goes_through_every_layer" in broken_rules(chain, broken)


@pytest.mark.parametrize("text", ["F0.1", "R2.2", "U3#0", "O2#0"])
def test_a_visit_that_does_not_run_whole(chain, text: str) -> None:
    assert "visits_run_whole" in broken_rules(chain, without(chain[-1], text))


def test_a_visit_that_computes_on_another_device(chain) -> None:
    visits = list(chain[-1].visits)
    visits[1] = replace(visits[1], device=0)
    assert "visits_run_whole" in broken_rules(chain, replace(chain[-1], visits=tuple(visits)))


@pytest.mark.parametrize("text", ["N1", "S0"])
def test_a_gradient_that_is_not_used(chain, text: str) -> None:
    assert "every_gradient_is_used" in broken_rules(chain, without(chain[-1], text))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("more", [{}, {"rounds": 2}, {"replicas": Replicas(2, 2, 2)}], ids=str)
def test_eager_steps_need_no_norms_but_every_update(costs_of, staleness, more) -> None:
    partition = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))
    computation = round_robin(partition, costs_of(3), devices=2, microbatches=4, **more)
    chain = lower_chain(computation, Options(costs=costs_of(3), staleness=staleness, eager=True))
    check(chain)
    assert "every_gradient_is_used" in broken_rules(chain, without(chain[-1], "S1"))


def test_partial_sums_written_over_before_they_are_added_up(small_chain) -> None:
    chain = small_chain(devices=1, microbatches=4, rounds=2)
    assert str(parse("M1")) in map(str, chain[-1].waits[parse("O3#0")])
    broken = broken_rules(chain, with_waits(chain[-1], "O3#0", "B3.1"))
    assert {"accesses_are_ordered"} <= broken


def test_an_update_before_all_norms_are_known(chain) -> None:
    host = [str(action) for action in chain[-1].streams["host"]]
    host.remove("S0")
    host.insert(host.index("N0"), "S0")
    broken = with_stream(chain[-1], "host", " ".join(host))
    assert broken_rules(chain, broken) == {"updates_follow_every_norm"}


def test_partial_gradients_that_are_added_out_of_order(small_chain) -> None:
    chain = small_chain(rounds=2)
    sums = chain[-1].streams["sums"]
    broken = with_stream(chain[-1], "sums", " ".join(str(merge) for merge in reversed(sums)))
    assert "gradients_add_in_visit_order" in broken_rules(chain, broken)


def test_a_device_that_computes_two_visits_in_turn(chain) -> None:
    queue = [str(action) for action in chain[-1].streams["0.compute"]]
    queue[2], queue[3] = queue[3], queue[2]
    broken = with_stream(chain[-1], "0.compute", " ".join(queue))
    assert "compute_is_grouped_by_visit" in broken_rules(chain, broken)


@pytest.mark.parametrize("text", ["A1.0", "a0.1", "G2.1", "g1.0"])
def test_a_result_that_nothing_brings(chain, text: str) -> None:
    assert "results_are_awaited" in broken_rules(chain, without(chain[-1], text))


def test_a_place_on_the_device_that_holds_another_microbatch(chain) -> None:
    queue = [str(action) for action in chain[-1].streams["1.activations_up"]]
    assert queue[:2] == ["A1.0", "A1.1"]
    broken = with_stream(chain[-1], "1.activations_up", " ".join(["A1.1", "A1.0", *queue[2:]]))
    assert broken_rules(chain, broken) & {"results_are_awaited", "issue_order_respects_waits"}


@pytest.mark.parametrize(
    ("action", "wait"),
    [
        ("F0.0", "U0#1"),  # weights that are not there yet
        ("X1.1", "A1.1"),  # an activation that is not there yet
        ("a1.0", "X1.0"),  # an output that is not there yet
        ("B2.0", "G2.0"),  # a gradient that is not there yet
        ("N0", "O3#0"),  # a norm of half a gradient
        ("A1.2", "X1.0"),  # a place that is still in use
        ("X1.2", "g1.0"),  # a place whose content has not left
        ("U2#0", "-B2.2"),  # a slot that is still in use
        ("X1.0", "-O1#0"),  # sums that have not left
    ],
)
def test_an_access_that_is_not_awaited(small_chain, action: str, wait: str) -> None:
    chain = small_chain(staleness=1)
    assert parse(wait) in chain[-1].waits[parse(action)]
    after = [str(other) for other in chain[-1].waits[parse(action)] if str(other) != wait]
    broken = with_waits(chain[-1], action, *after)
    assert "accesses_are_ordered" in broken_rules(chain, broken)


def test_a_layer_that_is_published_after_its_next_update(small_chain) -> None:
    chain = small_chain(staleness=1)
    host = [str(action) for action in chain[-1].streams["host"] if action.op is not Op.PUBLISH]
    published = [*host, "P2", "P1", "P0"]
    late = []
    for (
        schedule
    ) in chain:  # the host's actions are issued last: nothing of this step waits for them
        moved = with_stream(schedule, "host", " ".join(published))
        first = [action for action in schedule.order if action not in moved.streams["host"]]
        late.append(replace(moved, order=(*first, *moved.streams["host"])))
    assert "uploads_read_the_right_version" in broken_rules(late, late[-1])


@pytest.mark.parametrize("staleness", [0, 1])
def test_two_chunks_with_no_activation_between(small_chain, costs_of, staleness: int) -> None:
    chain = small_chain(costs=costs_of(3, weight=12 << 20), staleness=staleness)
    assert chain[-1].waits[parse("U3#1")] == (parse("A1.1"),)
    broken = with_waits(chain[-1], "U3#1")
    assert broken_rules(chain, broken) == {"activation_waits_behind_one_chunk"}


def test_every_rule_has_a_docstring_of_a_sentence() -> None:
    for rule in (*STRUCTURE, *ORDER):
        assert rule.__doc__ is not None
        assert rule.__doc__.split("\n\n")[0].rstrip().endswith(".")


def test_an_error_names_rule_action_and_what_is_missing(small_chain) -> None:
    chain = small_chain()
    broken = with_waits(chain[-1], "N0")
    with pytest.raises(PlanError) as caught:
        check([*chain[:-1], broken])
    message = "accesses_are_ordered: N0 on host touches ('gradient', 0) without waiting for O3#0"
    assert message in str(caught.value)


def test_an_error_shows_the_schedule_with_an_arrow(small_chain) -> None:
    chain = small_chain()
    with pytest.raises(PlanError) as caught:
        check([*chain[:-1], with_waits(chain[-1], "X1.1")])
    (drawn,) = caught.value.__notes__
    lines = drawn.splitlines()
    assert lines[1].startswith("1.compute")
    assert lines[2].strip() == "^ X1.1"
    assert lines[1][lines[2].index("^") :].startswith("X1.1")


def test_an_error_in_a_circle_still_comes(small_chain) -> None:
    chain = small_chain()
    with pytest.raises(PlanError, match="issue_order_respects_waits"):
        check([*chain[:-1], with_waits(chain[-1], "U0#0", "S0")])
