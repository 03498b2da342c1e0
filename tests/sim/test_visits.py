"""The search's quick player says the same as the simulator does action by action."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.partition import front
from roundpipe.plan.uneven import tapered
from roundpipe.sim.candidate import Candidate
from roundpipe.sim.score import Setting, play
from roundpipe.sim.visit_graph import Steps
from roundpipe.sim.visits import VisitPlayer

STEPS = 5


def machine_of(devices: int, *, host: float, cap: float | None = None) -> Machine:
    card = Card(name="any", memory_bytes=1 << 40, flops={}, bandwidth=1e12)
    link = Link(up=40.0, down=30.0, duplex=0.6)
    return Machine(
        cards=(card,) * devices,
        links=(link,) * devices,
        host=Host(memory_bytes=1 << 40, bandwidth=host),
        link_cap=cap,
    )


@st.composite
def some_costs(draw: st.DrawFn) -> Costs:
    layers = []
    is_tied = draw(st.booleans())
    num_layers, num_frozen = draw(st.integers(2, 7)), draw(st.integers(0, 2))
    for at in range(num_layers):
        trained = 0 if at < min(num_frozen, num_layers - 1) else draw(st.integers(1, 40))
        layers.append(
            LayerCost(
                forward_seconds=draw(st.floats(0.1, 3)),
                backward_seconds=draw(st.floats(0.1, 6)),
                weight_bytes=draw(st.integers(1, 90)),
                gradient_bytes=2 * trained,
                download_bytes=trained,
                update_bytes=14 * trained,
                publish_bytes=3 * trained,
                borrows=(0,) if is_tied and at == num_layers - 1 and not num_frozen else (),
            )
        )
    return Costs(
        tuple(layers), frozenset(at for at, cost in enumerate(layers) if cost.gradient_bytes)
    )


@settings(deadline=None, max_examples=25, phases=[Phase.generate])
@given(st.data(), some_costs())
def test_a_chain_played_by_visits_ends_when_it_ends_action_by_action(
    data: st.DataObject, costs: Costs
) -> None:
    devices, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    partitions = front(costs)
    partition = partitions[data.draw(st.integers(0, len(partitions) - 1))]
    if data.draw(st.booleans()):
        partition = tapered(partition, costs, stages=2, pieces=2)
    replicas = Replicas(*(data.draw(st.integers(1, devices)) for _ in range(3)))
    candidate = Candidate(
        partition,
        replicas,
        rounds=data.draw(st.integers(1, 2)),
        deal=data.draw(st.sampled_from(["cyclic", "earliest"])),
    )
    host = data.draw(st.sampled_from([20.0, 100.0, 1e6]))
    setting = Setting(
        costs=costs,
        devices=devices,
        microbatches=microbatches,
        machine=machine_of(devices, host=host, cap=data.draw(st.sampled_from([None, 50.0]))),
        staleness=data.draw(st.integers(0, 1)),
        eager=data.draw(st.booleans()),
        hop_seconds=data.draw(st.sampled_from([0.0, 0.3])),
        action_seconds=0.01,
    )
    visits = candidate.visits(costs, devices=devices, microbatches=microbatches)
    used = [sum(visit.device == device for visit in visits) for device in range(devices)]
    if min(used) < 2:  # then a slot waits for a stand-in: see [Note: turns]
        return

    by_action = play(setting, candidate, steps=STEPS)
    steps = Steps(
        visits=visits,
        devices=devices,
        num_steps=STEPS,
        turn=candidate.turn(visits, devices=devices),
        staleness=setting.staleness,
        eager=setting.eager,
    )
    by_visit = VisitPlayer(steps, setting.prices, setting.machine, hop_seconds=setting.hop).play()

    assert by_visit.step_ends == pytest.approx(by_action.step_ends, rel=1e-9)
