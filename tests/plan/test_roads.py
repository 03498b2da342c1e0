from dataclasses import replace

import pytest

from roundpipe.errors import PlanError
from roundpipe.plan.actions import Action
from roundpipe.plan.check import check
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.roads import Pair, is_kept_apart, pairs


def test_chunks_pair_with_the_one_before_on_their_stream(small_chain, costs_of) -> None:
    schedule = small_chain(costs=costs_of(3, weight=12 << 20))[-1]
    found = pairs([schedule])
    assert {str(two): str(pair.before) for two, pair in found.items()} == {
        "U0#1": "U0#0",
        "U2#0": "U0#1",
        "U2#1": "U2#0",
        "U1#1": "U1#0",
        "U3#0": "U1#1",
        "U3#1": "U3#0",
        "O3#0": "O1#0",
    }
    assert found[Action.parse("U2#1")].to_come == 3  # the three activations of visit 0
    assert found[Action.parse("U0#1")].to_come == 0  # its own come after it anyway
    assert found[Action.parse("O3#0")].to_come == 6  # three losses and three gradients of visit 1


def test_activations_of_steps_before_count_as_still_to_come(small_chain, costs_of) -> None:
    chain = small_chain(costs=costs_of(3, weight=12 << 20))
    before = sum(len(step.streams["0.activations_up"]) for step in chain[:-1])
    assert pairs(chain)[Action.parse("U2#1")].to_come == before + 3


def test_a_chunk_of_gradients_looks_at_outputs_up_to_the_visit_after(costs_of) -> None:
    costs = costs_of(5, gradient=80 << 20)
    partition = Partition(
        (range(2), range(2, 4)), range(4, 5), tuple(range(i, i + 1) for i in (3, 2, 1, 0))
    )
    computation = round_robin(partition, costs, devices=2, microbatches=3, rounds=1)
    (schedule,) = lower_chain(computation, Options(costs=costs), steps=1)
    found = {str(two): pair.to_come for two, pair in pairs([schedule]).items()}
    # Device 0 runs visits 0, 2 (fused), 4 and 6: 3 boundaries, 3 losses, 3 gradients, 3 gradients.
    assert [found[text] for text in ("O2#1", "O2#2", "O4#0")] == [12, 12, 12]
    # Device 1 runs visits 1, 3 and 5: 3 boundaries, 3 gradients, 3 gradients.
    assert [found[text] for text in ("O3#1", "O3#2", "O5#0")] == [9, 9, 9]
    for text in ("O2#1", "O2#2", "O3#2"):
        broken = replace(schedule, waits={**schedule.waits, Action.parse(text): ()})
        with pytest.raises(PlanError, match=f"activation_waits_behind_one_chunk: {text}"):
            check([broken])


def test_chunks_are_kept_apart_by_an_activation_or_by_none_left() -> None:
    pair = Pair(Action.parse("U0#0"), "road", to_come=3)
    assert is_kept_apart(pair, {"road": 1}, {"road": 2})
    assert not is_kept_apart(pair, {"road": 1}, {"road": 1})
    assert not is_kept_apart(pair, {}, {})
    assert is_kept_apart(pair, {"road": 3}, {"road": 3})
