import pytest

from roundpipe.plan.costs import Costs, LayerCost


def test_a_borrower_reads_two_layers_and_trains_its_lender(costs_of) -> None:
    costs = costs_of(3, trained=[0], tied=True)
    assert costs.owners_read(2) == (2, 0)
    assert costs.owners_trained(2) == (0,)
    assert costs.owners_trained(1) == ()


def test_the_first_trainable_layer_is_the_lowest_that_reads_a_trained_parameter(costs_of) -> None:
    assert costs_of(4, trained=[2, 3]).first_trainable == 2
    assert costs_of(4, trained=[]).first_trainable is None
    assert costs_of(4, trained=[0], tied=True).first_trainable == 0


@pytest.mark.parametrize("name", ["forward_seconds", "weight_bytes", "gradient_bytes"])
def test_a_negative_cost_is_refused(name: str) -> None:
    given = {"forward_seconds": 1.0, "backward_seconds": 1.0, name: -1}
    with pytest.raises(ValueError, match=f"{name} must not be negative: -1"):
        LayerCost(**given)


def test_costs_count_their_layers() -> None:
    layer = LayerCost(forward_seconds=1, backward_seconds=2)
    assert Costs((layer, layer), frozenset()).num_layers == 2
