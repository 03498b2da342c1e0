from roundpipe.plan.actions import Action
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


def test_chunks_are_kept_apart_by_an_activation_or_by_none_left() -> None:
    pair = Pair(Action.parse("U0#0"), "road", to_come=3)
    assert is_kept_apart(pair, {"road": 1}, {"road": 2})
    assert not is_kept_apart(pair, {"road": 1}, {"road": 1})
    assert not is_kept_apart(pair, {}, {})
    assert is_kept_apart(pair, {"road": 3}, {"road": 3})
