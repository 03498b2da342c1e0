"""Rates of transfers that share links and host memory, against sums done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.sim.flows import Flows
from roundpipe.sim.sharing import ON_HOST, Road, Sharing


def sharing(*, host=1000.0, cap=None, update=None, duplex=0.5) -> Sharing:
    card = Card(name="any", memory_bytes=1, flops={}, bandwidth=1)
    link = Link(up=20.0, down=10.0, duplex=duplex)
    memory = Host(memory_bytes=1, bandwidth=host, update_bandwidth=update)
    return Sharing(Machine(cards=(card,) * 3, links=(link,) * 3, host=memory, link_cap=cap))


def test_a_link_gives_less_each_way_while_both_run():
    assert sharing().rates([Road(0)]) == [20.0]
    assert sharing().rates([Road(0), Road(0, up=False)]) == [10.0, 5.0]
    assert sharing().rates([Road(0), Road(1, up=False)]) == [20.0, 10.0]


def test_the_cap_of_all_links_is_shared_each_way():
    rates = sharing(cap=30.0).rates([Road(0), Road(1), Road(2), Road(1, up=False)])
    assert rates == pytest.approx([10.0, 10.0, 10.0, 5.0])
    assert sharing(cap=45.0).rates([Road(0), Road(1), Road(2), Road(1, up=False)])[:3] == (
        pytest.approx([17.5, 10.0, 17.5])  # one is slower by itself and leaves the rest
    )


def test_an_update_takes_as_much_of_scarce_host_memory_as_eight_transfers():
    assert sharing(host=90.0).rates([Road(0), ON_HOST]) == pytest.approx([10.0, 80.0])
    assert sharing(host=90.0, update=60.0).rates([Road(0), ON_HOST]) == pytest.approx([20.0, 60.0])


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=1, max_size=8),
    st.floats(1, 200),
    st.one_of(st.none(), st.floats(1, 60)),
)
def test_no_resource_gives_more_than_it_has_and_none_starves(roads, host, cap):
    roads = [Road(device, up or device < 0) for device, up in roads]
    rates = sharing(host=host, cap=cap).rates(roads)
    assert min(rates) > 0
    assert sum(rates) <= host * (1 + 1e-9)
    for up in (True, False):
        those = [
            rate
            for road, rate in zip(roads, rates, strict=True)
            if not road.is_host and road.up is up
        ]
        assert sum(those) <= (cap or 1e9) * (1 + 1e-9)


def test_a_transfer_slows_down_while_another_shares_its_link():
    flows = Flows(sharing())
    flows.start(0, 100.0, Road(0), 0.0)
    assert flows.first() == (5.0, 0)
    flows.start(1, 10.0, Road(0, up=False), 2.0)  # 60 bytes are left, at half the rate
    assert flows.first() == (4.0, 1)
    flows.end(1, 4.0)
    assert flows.first() == (6.0, 0)


def test_what_comes_to_a_busy_copy_engine_stands_in_line():
    flows = Flows(sharing())
    flows.start(0, 100.0, Road(0), 0.0)
    flows.start(1, 20.0, Road(0), 1.0)
    assert flows.first() == (5.0, 0)
    flows.end(0, 5.0)
    assert flows.first() == (6.0, 1)
    flows.end(1, 6.0)
    assert flows.first()[1] == -1
