"""What each pass adds, and whole lowered steps as text."""

import pytest

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, forward_only, round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, chunk_layers, lower, lower_chain, outline
from roundpipe.plan.schedule import Schedule

MIB = 1 << 20
THREE = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))


def stream(schedule: Schedule, name: str) -> str:
    return " ".join(map(str, schedule.streams.get(name, ())))


def waits(schedule: Schedule, text: str) -> str:
    return " ".join(map(str, schedule.waits[Action.parse(text)]))


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_lowered_step_of_two_devices(small_chain, costs_of, golden, staleness: int) -> None:
    chain = small_chain(costs=costs_of(3, weight=12 * MIB), staleness=staleness)
    golden(f"plans/two_devices_staleness_{staleness}.txt", chain[-1].text())


def test_a_lowered_step_with_rounds_and_replicas(small_chain, golden) -> None:
    chain = small_chain(microbatches=4, rounds=2, replicas=Replicas(1, 1, 2))
    golden("plans/rounds_and_replicas.txt", chain[-1].text())


def test_a_lowered_step_of_a_tied_model_with_a_frozen_layer(small_chain, costs_of, golden) -> None:
    chain = small_chain(costs=costs_of(3, trained=[0, 2], tied=True), staleness=1)
    golden("plans/tied_and_frozen.txt", chain[-1].text())


def test_a_lowered_pass_without_gradient(costs_of, golden) -> None:
    computation = forward_only([range(2), range(2, 3)], devices=2, microbatches=3)
    chain = lower_chain(computation, Options(costs=costs_of(3)))
    check(chain)
    golden("plans/forward_only.txt", chain[-1].text())


def test_a_boundary_stays_where_its_next_user_is(costs_of) -> None:
    computation = round_robin(THREE, costs_of(3), devices=1, microbatches=1)
    schedule = lower(computation, Options(costs=costs_of(3)))
    assert schedule.resident == {(1, 0)}  # fused takes what forward made; recompute never does
    assert schedule.resident_gradient == {(2, 0), (3, 0)}
    assert stream(schedule, "0.activations_up") == "A0.0 A1.0 A2.0 A3.0"
    assert stream(schedule, "0.activations_down") == "a0.0 a1.0"  # a saved boundary and a loss
    assert schedule.sends[0, 0] == (1,)


def test_boundaries_and_gradients_move_where_devices_differ(small_chain) -> None:
    schedule = small_chain()[-1]
    assert stream(schedule, "0.activations_down") == "a0.0 a0.1 a0.2 g2.0 g2.1 g2.2"
    assert stream(schedule, "1.activations_up").startswith("A1.0 A1.1 A1.2 A3.0 G3.0 A3.1")
    assert schedule.sends[0, 0] == (1, 2)
    assert "g3.0" not in schedule.text()  # nothing below is trained


def test_nothing_goes_backward_below_a_frozen_front(small_chain, costs_of) -> None:
    costs = costs_of(3, trained=[2])
    partition = Partition((range(2),), range(2, 3), ())
    computation = round_robin(partition, costs, devices=2, microbatches=2)
    chain = lower_chain(computation, Options(costs=costs))
    check(chain)
    assert stream(chain[-1], "host") == "N2 S2"
    assert stream(chain[-1], "1.activations_down") == "a1.0 a1.1"  # losses, no gradient
    assert waits(chain[-1], "U0#0") == "-F0.1"  # frozen weights wait for no update


def test_weights_are_cut_into_as_many_chunks_as_there_are_windows(small_chain, costs_of) -> None:
    for mib, microbatches, expected in ((1, 5, 1), (8, 5, 2), (8, 9, 2), (80, 5, 4), (80, 3, 2)):
        costs = costs_of(3, weight=mib * MIB)
        schedule = small_chain(costs=costs, microbatches=microbatches)[-1]
        assert schedule.chunks[Op.UPLOAD, 3] == expected, (mib, microbatches)


def test_each_chunk_waits_for_an_activation_of_the_visit_before(small_chain, costs_of) -> None:
    schedule = small_chain(costs=costs_of(3, weight=80 * MIB), microbatches=5)[-1]
    found = [waits(schedule, f"U3#{chunk}") for chunk in range(4)]
    assert found == ["A1.0", "A1.1", "A1.2", "A1.3"]


def test_gradients_go_down_behind_the_visits_own_outputs(small_chain, costs_of) -> None:
    schedule = small_chain(costs=costs_of(3, gradient=80 * MIB), microbatches=5)[-1]
    assert waits(schedule, "O2#0") == "g2.4"
    assert waits(schedule, "O3#0") == "B3.4"  # the lowest stage gives none


def test_all_updates_follow_all_norms_front_first(small_chain) -> None:
    assert stream(small_chain()[-1], "host") == "N2 N1 N0 S0 S1 S2"
    assert waits(small_chain()[-1], "U0#1") == "-S1"


def test_at_staleness_1_a_layer_is_published_once_its_last_upload_is_over(small_chain) -> None:
    schedule = small_chain(staleness=1)[-1]
    assert stream(schedule, "host") == "P2 P1 P0 N2 N1 N0 S0 S1 S2"
    assert waits(schedule, "P1") == "U2#0"
    assert waits(schedule, "U1#0").split()[0] == "-P2"


def test_publishing_does_not_stand_behind_norms_that_come_later(small_chain) -> None:
    host = stream(small_chain(devices=1, staleness=1)[-1], "host").split()
    assert host.index("P1") < host.index("N1")
    assert host.index("P0") < host.index("N1")


def test_partial_gradients_are_added_up_round_by_round(small_chain) -> None:
    schedule = small_chain(microbatches=4, rounds=2)[-1]
    assert stream(schedule, "sums") == "M1 M2 M3 M5 M6 M7"
    assert schedule.owners[Action.parse("M2")] == schedule.owners[Action.parse("M6")] == (1,)
    assert schedule.addends[Action.parse("M6")] == (6,)
    assert schedule.owners[Action.parse("O6#0")] == ()
    assert schedule.begun_sums(Action.parse("M2")) == set()
    assert schedule.begun_sums(Action.parse("M6")) == {1}
    assert waits(schedule, "N1") == "M6"


def test_what_all_devices_bring_of_a_stage_is_added_up_at_once(small_chain) -> None:
    schedule = small_chain(microbatches=4, replicas=Replicas(1, 2, 2))[-1]
    assert stream(schedule, "sums") == "M2 M4 M6"
    assert schedule.addends[Action.parse("M4")] == (3, 4)


def test_partial_gradients_wait_until_their_place_is_free(costs_of) -> None:
    computation = round_robin(THREE, costs_of(3), devices=1, microbatches=6, rounds=3)
    schedule = outline(computation, Options(costs=costs_of(3)))[-1]
    assert stream(schedule, "sums") == "M1 M2 M3 M5 M6 M7 M9 M10 M11"
    assert "M1" in waits(schedule, "O3#0").split()  # two places on one device
    assert "M7" in waits(schedule, "O10#0").split()
    assert "-M10" in waits(schedule, "O2#0").split()
    assert "-M11" in waits(schedule, "O1#0").split()


def test_a_call_that_adds_to_earlier_ones_merges_everything(costs_of) -> None:
    computation = round_robin(THREE, costs_of(3), devices=2, microbatches=2)
    options = Options(costs=costs_of(3), accumulate=True)
    (schedule,) = lower_chain(computation, options, steps=1)
    check([schedule])
    assert stream(schedule, "sums") == "M1 M2 M3"


def test_a_tied_weight_is_trained_once_by_both_of_its_uses(small_chain, costs_of) -> None:
    schedule = small_chain(costs=costs_of(3, tied=True))[-1]
    assert schedule.owners[Action.parse("U1#0")] == (2, 0)
    assert schedule.owners[Action.parse("M1")] == (2, 0)
    assert schedule.owners[Action.parse("M3")] == (0,)
    assert schedule.addends[Action.parse("M3")] == (3,)
    assert waits(schedule, "N0") == "M3"


def test_each_step_begins_where_the_one_before_ended(small_chain) -> None:
    chain = small_chain(devices=3)
    assert [schedule.start_device for schedule in chain] == [1, 2, 0]
    assert [schedule.next_start_device for schedule in chain] == [2, 0, 1]


def test_a_chunk_names_every_layer_of_which_it_holds_bytes() -> None:
    sizes = (3, 0, 5, 4)
    layers = (LayerCost(forward_seconds=1, backward_seconds=1, weight_bytes=size) for size in sizes)
    costs = Costs(tuple(layers), frozenset())
    assert chunk_layers(costs, range(4), 1) == [(0, 1, 2, 3)]
    assert chunk_layers(costs, range(4), 2) == [(0, 1, 2), (2, 3)]
    assert chunk_layers(costs, range(4), 12)[3:9] == [(1, 2), (2,), (2,), (2,), (2,), (3,)]
    assert chunk_layers(costs, range(1, 2), 2) == [(1,), ()]


def test_lowering_and_checking_a_large_model_is_quick() -> None:
    """Tenfold the time it takes on a slow core, so that only a change of its growth fails."""
    from time import process_time

    layer = LayerCost(
        forward_seconds=1, backward_seconds=2, weight_bytes=400 * MIB, gradient_bytes=800 * MIB
    )
    costs = Costs((layer,) * 40, frozenset(range(40)))
    from roundpipe.plan.partition import partition_for

    computation = round_robin(partition_for(costs, 6), costs, devices=8, microbatches=8)
    begin = process_time()
    check(lower_chain(computation, Options(costs=costs)))
    assert process_time() - begin < 6


def test_eager_updates_wait_for_nothing_but_their_own_gradient(costs_of) -> None:
    computation = round_robin(
        THREE, costs_of(3), devices=2, microbatches=2, replicas=Replicas(1, 2, 2)
    )
    chain = lower_chain(computation, Options(costs=costs_of(3), eager=True))
    check(chain)
    schedule = chain[-1]
    assert schedule.is_eager
    assert stream(schedule, "sums") == "M2 M4 M6"
    assert stream(schedule, "host") == "S2 S1 S0"
    assert waits(schedule, "S1") == "M4"
    assert waits(schedule, "U0#0").split()[0] == "-S0"
