"""What the search chooses: by name, within memory, the same every time, and what it is worth."""

from dataclasses import replace

import pytest

from roundpipe.errors import ConfigError, PlanError
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.sim.search import Setting, choose, require_plan

GB = 10**9


def costs_of(num_layers=8, **changes) -> Costs:
    block = LayerCost(
        forward_seconds=0.010,
        backward_seconds=0.020,
        weight_bytes=200_000_000,
        gradient_bytes=400_000_000,
        download_bytes=200_000_000,
        update_bytes=2_800_000_000,
        boundary_bytes=20_000_000,
        activation_bytes=500_000_000,
    )
    block = replace(block, **changes)
    head = replace(block, forward_seconds=0.02, backward_seconds=0.04)
    layers = (*[block] * num_layers, head)
    return Costs(layers, frozenset(range(num_layers + 1)))


def machine_of(devices=4, *, memory=24 * GB, host=150e9, link=25e9) -> Machine:
    card = Card(name="card", memory_bytes=memory, flops={}, bandwidth=1e12)
    links = (Link(up=link, down=link, duplex=0.52),) * devices
    memory_of_host = Host(memory_bytes=1000 * GB, bandwidth=host)
    return Machine(cards=(card,) * devices, links=links, host=memory_of_host)


def setting_of(*, devices=4, microbatches=16, costs=None, **options) -> Setting:
    machine = options.pop("machine", None) or machine_of(devices)
    return Setting(
        costs=costs or costs_of(),
        devices=devices,
        microbatches=microbatches,
        machine=machine,
        **options,
    )


@pytest.mark.parametrize("name", ["auto", "round_robin", "hybrid", "replicated", "gpipe"])
def test_what_is_chosen_lowers_and_passes_every_rule(name):
    setting = setting_of(devices=2, microbatches=4, costs=costs_of(4))
    plan = choose(setting, name)
    computation = plan.computation(setting.costs, devices=2, microbatches=4)
    check(lower_chain(computation, Options(costs=setting.costs)))
    assert name in ("auto", "hybrid") or plan.candidate.name(2) == name
    assert plan.why.startswith(plan.candidate.name(2).replace("_", "-"))


def test_round_robin_has_one_round_and_one_device_a_stage_whatever_it_costs():
    plan = choose(setting_of(), "round_robin")
    assert (plan.candidate.rounds, plan.candidate.num_copies) == (1, 3)


def test_the_same_setting_gives_the_same_plan():
    assert choose(setting_of()) == choose(setting_of())


def test_a_hybrid_is_never_slower_than_round_robin_and_auto_is_near_the_best():
    setting = setting_of()
    seconds = {name: choose(setting, name).seconds for name in ("round_robin", "hybrid", "auto")}
    assert seconds["hybrid"] <= seconds["round_robin"]
    assert seconds["auto"] <= seconds["hybrid"] * 1.011


def test_more_host_bandwidth_is_never_slower():
    steps = [
        choose(setting_of(machine=machine_of(host=rate)), "hybrid").seconds
        for rate in (60e9, 150e9, 600e9)
    ]
    assert steps[1] <= steps[0]
    assert steps[2] <= steps[1] * 1.02  # a climb may end on another hill


def test_layers_are_fused_as_far_as_that_pays_and_fits():
    small, large = (
        choose(setting_of(machine=machine_of(memory=memory)), "hybrid").partition
        for memory in (6 * GB, 24 * GB)
    )
    assert len(small.fused) < len(large.fused)


def test_what_the_host_cannot_hold_is_not_chosen():
    setting = setting_of(machine=machine_of(host=1000e9))
    free = choose(setting, "hybrid")
    assert free.candidate.num_copies > 3
    scarce = choose(replace(setting, host_limit=4 * GB), "hybrid")
    assert scarce.candidate.num_copies < free.candidate.num_copies


def test_a_plan_for_staleness_1_wastes_less_than_an_exact_one_where_updates_are_slow():
    exact, late = (
        choose(setting_of(machine=machine_of(host=50e9), staleness=staleness), "round_robin")
        for staleness in (0, 1)
    )
    assert late.seconds < exact.seconds


def test_a_device_twice_as_fast_gets_about_twice_the_work():
    setting = setting_of(devices=3, speeds=(2.0, 1.0, 1.0), microbatches=24)
    plan = choose(setting, "hybrid")
    computation = plan.computation(setting.costs, devices=3, microbatches=24)
    work = [0.0] * 3
    for visit in computation.visits:
        for layer in visit.layers:
            cost = setting.costs.layers[layer]
            seconds = cost.forward_seconds + visit.has_backward * cost.backward_seconds
            work[visit.device] += seconds * len(visit.microbatches)
    assert work[0] / ((work[1] + work[2]) / 2) == pytest.approx(2, rel=0.2)


def test_a_layer_that_fits_nowhere_is_named():
    with pytest.raises(PlanError, match="layer"):
        choose(setting_of(machine=machine_of(memory=GB // 2)))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="hint: auto, round_robin, hybrid"):
        choose(setting_of(), "round-robin")


def test_what_fits_in_rounds_alone_runs_in_rounds():
    costs = costs_of(2, activation_bytes=1_500_000_000, boundary_bytes=100_000_000)
    machine = machine_of(1, memory=5 * GB)
    plan = choose(setting_of(devices=1, microbatches=64, costs=costs, machine=machine))
    assert plan.candidate.rounds > 1
    with pytest.raises(PlanError):  # its bits promise one round
        choose(setting_of(devices=1, microbatches=64, costs=costs, machine=machine), "round_robin")


@pytest.mark.parametrize("name", ["auto", "round_robin", "hybrid", "replicated", "gpipe", "other"])
@pytest.mark.parametrize("limit", [24 * GB, 3 * GB, GB, GB // 4])
def test_what_is_refused_is_refused_before_the_best_is_looked_for(name, limit):
    setting = setting_of(devices=2, microbatches=4, costs=costs_of(4), memory_limit=limit)

    def refusal(ask):
        try:
            ask(setting, name)
        except (ConfigError, PlanError) as error:
            return type(error), str(error)
        return None

    assert refusal(require_plan) == refusal(choose)
