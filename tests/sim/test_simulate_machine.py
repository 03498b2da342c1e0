"""What the simulator says of links, updates and Python, on steps small enough to do by hand."""

import pytest

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain, outline
from roundpipe.sim.simulate import simulate_machine
from roundpipe.sim.work import Prices

PARTITION = Partition((range(1),), range(1, 2), (range(1),))


def costs_of(**sizes) -> Costs:
    layer = LayerCost(forward_seconds=1, backward_seconds=2, gradient_bytes=20, **sizes)
    return Costs((layer,) * 2, frozenset({0, 1}))


def machine_of(*, devices=1, host=1e9) -> Machine:
    card = Card(name="any", memory_bytes=1 << 40, flops={}, bandwidth=1)
    link = Link(up=10.0, down=10.0)
    memory = Host(memory_bytes=1 << 40, bandwidth=host)
    return Machine(cards=(card,) * devices, links=(link,) * devices, host=memory)


def chain_of(costs, *, devices=1, microbatches=2, steps=2, **options):
    computation = round_robin(PARTITION, costs, devices=devices, microbatches=microbatches)
    return outline(computation, Options(costs=costs, **options), steps=steps)


def test_without_transfers_a_step_is_its_work():
    done = simulate_machine(chain_of(costs_of()), Prices(costs=costs_of()), None)
    assert done.step_ends == (14.0, 28.0)  # forward 1, fused 3, recompute and backward 3, twice
    assert done.busy == {"0.compute": 1.0}
    assert done.idle.transfer == done.idle.optimizer == 0.0


def test_the_first_upload_is_exposed_and_the_next_ones_hide():
    costs = costs_of(weight_bytes=10)
    done = simulate_machine(chain_of(costs, steps=1), Prices(costs=costs), machine_of())
    assert done.step_ends == (15.0,)  # 10 bytes at 10 bytes per second before anything
    assert done.idle.transfer == 1.0
    assert [str(span.action) for span in done.critical_path()][:2] == ["U0#0", "F0.0"]


def test_an_update_that_the_next_forward_waits_for_is_exposed():
    costs = costs_of(update_bytes=40)
    prices = Prices(costs=costs, norm_traffic=0.0)
    done = simulate_machine(chain_of(costs), prices, machine_of(host=20.0))
    # The last gradient is down 2 seconds after the last backward, the first layer's update takes 2.
    assert done.step_ends[1] - done.step_ends[0] == pytest.approx(14 + 2 + 2)
    assert done.idle.optimizer == pytest.approx(2.0)
    assert done.idle.transfer == pytest.approx(2.0)


def test_at_staleness_1_the_update_hides_beside_the_next_step():
    costs = costs_of(update_bytes=40, publish_bytes=6)
    prices = Prices(costs=costs, norm_traffic=0.0)
    chain = chain_of(costs, steps=4, staleness=1)
    done = simulate_machine(chain, prices, machine_of(host=20.0))
    assert done.step_seconds(1, 3) == pytest.approx(14.0)


def test_python_is_one_for_all_devices():
    costs = costs_of(host_forward_seconds=2.0, host_backward_seconds=4.0)
    chain = chain_of(costs, devices=2, steps=1)
    alone = simulate_machine(chain, Prices(costs=costs_of()), None)
    done = simulate_machine(chain, Prices(costs=costs), None)
    assert alone.makespan < 14
    assert done.makespan >= 2 * (2 + 6 + 2 + 4)  # forward, fused, recompute, backward: one by one
    assert done.idle.python > 0


def test_a_device_twice_as_fast_takes_half_the_time():
    prices = Prices(costs=costs_of(), speeds=(2.0,))
    assert simulate_machine(chain_of(costs_of()), prices, None).step_ends == (7.0, 14.0)


def test_a_lowered_step_moves_its_boundaries_over_the_links():
    costs = costs_of(boundary_bytes=5)
    computation = round_robin(PARTITION, costs, devices=2, microbatches=2)
    chain = lower_chain(computation, Options(costs=costs), steps=1)
    done = simulate_machine(chain, Prices(costs=costs), machine_of(devices=2))
    starts = {str(span.action): span for span in done.spans}
    out, into = starts["a0.0"], starts["A1.0"]
    assert out.end - out.start == pytest.approx(0.5)
    assert into.start >= out.end
    assert into.end - into.start == pytest.approx(0.5)
    assert done.idle.transfer > 0
