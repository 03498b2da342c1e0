"""Which submodules become parts."""

from __future__ import annotations

from torch import nn

from roundpipe.models.parts import Rules, find_parts, num_bytes

NONE = Rules(lower_bytes=1 << 40, upper_bytes=-1)


def names(model, rules=NONE):
    return [part.name for part in find_parts(model, rules)]


class Has(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        return x


def test_sequentials_elements_of_lists_and_what_holds_no_others_are_parts():
    model = Has(
        seq=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        blocks=nn.ModuleList([Has(a=nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 2)])]),
        named=nn.ModuleDict({"x": Has(inner=nn.Linear(2, 2))}),
        leaf=nn.Linear(2, 2),
        act=nn.ReLU(),
    )
    assert names(model) == ["seq", "blocks.0", "blocks.1.0", "named.x.inner", "leaf"]


def test_sizes_decide_about_the_rest():
    inner = Has(a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 4, bias=False))
    model = Has(small=inner)
    assert num_bytes(inner) == 128
    assert names(model) == ["small.a", "small.b"]
    assert names(model, Rules(1 << 40, 128)) == ["small"]
    inner.own = nn.Parameter(inner.a.weight.detach().clone())
    assert names(model, Rules(64, -1)) == ["small"]
    assert names(model, Rules(65, -1)) == ["small.a", "small.b"]


def test_nothing_that_holds_a_skipped_module_is_a_part():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    model = Has(seq=nn.Sequential(a, b), c=nn.Linear(2, 2))
    assert names(model, Rules(0, 1 << 40, [a])) == ["seq.1", "c"]


def test_a_module_in_two_places_is_one_part_and_lends_nothing():
    shared = nn.Linear(2, 2)
    (part,) = find_parts(Has(a=shared, b=shared), NONE)
    assert part.name == "a"
    assert not part.loans


def test_a_tensor_of_several_parts_is_lent_and_an_embedding_with_it_only_looks_up():
    table, head = nn.Embedding(5, 2), nn.Linear(2, 5)
    head.weight = table.weight
    (part,) = find_parts(Has(table=table, head=head), NONE)
    assert part.name == "head"
    assert [(loan.path, loan.local) for loan in part.loans] == [("", "weight")]


def test_a_tensor_in_two_places_of_one_part_is_not_lent():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    (part,) = find_parts(Has(seq=nn.Sequential(a, b)), NONE)
    assert not part.loans
