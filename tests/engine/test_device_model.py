from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.device_model import Arena, DeviceModel, pair_bytes
from roundpipe.engine.measure import costs_from_sizes
from roundpipe.engine.program import Program
from roundpipe.models.sequential import sequential_spec
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower
from roundpipe.store.build import build_store


@pytest.fixture
def device():
    made = CpuDevice(threads=1)
    yield made
    made.close()


# ---- arenas


def test_consecutive_visits_lie_at_the_two_ends_and_do_not_overlap(device):
    arena = Arena(device)
    assert arena.fit(700)
    assert (arena.place(300, 0), arena.place(400, 1)) == (0, 300)
    assert (arena.place(100, 0), arena.place(500, 1)) == (0, 200)


def test_an_arena_grows_and_never_shrinks_and_says_when_memory_moved(device):
    arena = Arena(device)
    assert [arena.fit(size) for size in (512, 256, 512, 1024)] == [True, False, False, True]
    assert device.allocated_bytes == 1024
    arena.release()
    arena.release()
    assert device.allocated_bytes == 0


def program(num_layers=4, devices=2, *, width=4, microbatches=2, start_device=0):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    spec = sequential_spec(module)
    layers = build_store(
        [layer.tensors for layer in spec.layers], names=[layer.name for layer in spec.layers]
    )
    costs = costs_from_sizes(spec, layers)
    last = num_layers - 1
    partition = Partition(
        tuple(range(i, i + 1) for i in range(last)),
        range(last, num_layers),
        tuple(range(i, i + 1) for i in range(last - 1, -1, -1)),
    )
    computation = round_robin(
        partition, costs, devices=devices, microbatches=microbatches, start_device=start_device
    )
    return Program(lower(computation, Options(costs=costs))), spec, layers


def test_an_arena_holds_any_two_visits_that_follow_each_other_on_any_device():
    """Also from step to step, when the deal goes on with another device."""
    made, _, _ = program(devices=2)  # visits 0 .. 6, so the next step starts on device 1
    sizes = {visit.number: 10**visit.number for visit in made.schedule.visits}
    assert pair_bytes(made, sizes) == 10**6 + 10**4  # 0, 2, 4, 6 | 1, 3, 5 on device 0
    assert pair_bytes(made, {5: 7, 0: 5}) == 12  # 1, 3, 5 | 0, 2, 4, 6 on device 1
    assert pair_bytes(made, {}) == 0


def test_one_device_holds_neighbours_only():
    made, _, _ = program(devices=1)
    sizes = {visit.number: 10**visit.number for visit in made.schedule.visits}
    assert pair_bytes(made, sizes) == 10**6 + 10**5


# ---- a model on a device


@pytest.fixture
def placed(device):
    made, spec, layers = program(devices=1)
    model = DeviceModel(device, 0, spec, layers)
    model.prepare(made)
    yield model, made, layers
    model.close()
    assert device.allocated_bytes == 0


def upload(model, visit, turn):
    slot = model.slot(visit, turn)
    at = 0
    for index in visit.layers:
        for piece in model.layers[index].upload_pieces():
            start = at + piece.offset
            slot.narrow(0, start, piece.num_bytes).copy_(piece.source)
        at += model.layers[index].slot_layout.num_bytes


def test_a_shell_is_made_once_and_bound_to_the_slot_of_the_visit(placed):
    model, made, layers = placed
    first, second = made.schedule.visits[:2]
    upload(model, first, 0)
    upload(model, second, 1)
    for visit, turn in ((first, 0), (second, 1)):
        model.enter(visit, turn)
        shell = model.shell(visit.layers[0])
        assert shell is model.shell(visit.layers[0])
        for name, parameter in shell.parameters.items():
            assert torch.equal(parameter, layers[visit.layers[0]].tensors[name])
            assert parameter.data_ptr() != layers[visit.layers[0]].tensors[name].data_ptr()


def test_gradients_add_up_in_the_slot_in_microbatch_order_and_say_who_got_one(placed):
    model, made, layers = placed
    visit = next(visit for visit in made.schedule.visits if visit.has_backward)
    (layer,) = visit.layers
    upload(model, visit, 0)
    model.enter(visit, 0)
    received = model.collect(visit, 0)
    shell = model.shell(layer)
    weight, bias = (f"{layer}.{kind}" for kind in ("weight", "bias"))
    x = torch.randn(3, 4)
    for _ in range(2):
        (x @ shell.parameters[weight]).sum().backward()
    assert received == {layer: [weight]}  # once, and nothing for the bias
    sums = layers[layer].slot_gradient_layout.view(model.sums_slot(visit, 0))
    expected = 2 * x.sum(0)[:, None].expand(4, 4)
    torch.testing.assert_close(sums[weight], expected)
    assert shell.parameters[weight].grad.data_ptr() == sums[weight].data_ptr()
    assert bias in sums


def test_a_new_visit_begins_without_gradients(placed):
    model, made, _ = placed
    visit = next(visit for visit in made.schedule.visits if visit.has_backward)
    (layer,) = visit.layers
    upload(model, visit, 0)
    model.enter(visit, 0)
    parameter = model.shell(layer).parameters[f"{layer}.weight"]
    model.collect(visit, 0)
    parameter.sum().backward()
    again = model.collect(visit, 1)
    assert parameter.grad is None
    assert again == {layer: []}
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(4, 4))
    assert again == {layer: [f"{layer}.weight"]}


def test_dropping_what_is_in_flight_keeps_memory_and_shells(placed, device):
    model, made, _ = placed
    before, shell = device.allocated_bytes, model.shell(0)
    for held in (
        model.kept, model.kept_gradients, model.arrived, model.arrived_gradients,
        model.leaving, model.leaving_gradients, model.graphs,
    ):  # fmt: skip
        held[0, 0] = torch.ones(1)
    model.drop_in_flight()
    assert model.arrived == model.graphs == model.kept == model.leaving_gradients == {}
    assert device.allocated_bytes == before
    assert model.shell(0) is shell
    model.forget_shells()
    assert model.shell(0) is not shell
    model.prepare(made)
    assert device.allocated_bytes == before


def test_what_was_outgrown_is_given_back_before_more_is_taken(placed, monkeypatch):
    """A view that is left somewhere, in a shell or as its gradient, would keep all of it."""
    model, made, _ = placed
    visits = [visit for visit in made.schedule.visits if visit.has_backward]
    for turn, visit in enumerate(visits[:2]):
        upload(model, visit, turn)
        model.enter(visit, turn)
        model.collect(visit, turn)
        for parameter in model.shell(visit.layers[0]).parameters.values():
            parameter.sum().backward()
    old = [StorageWeakRef(a.buffer.untyped_storage()) for a in (model.weights, model.sums)]
    left = []
    fit = Arena.fit

    def fitting(arena, *args, **kwargs):
        arena.release()
        left.append([each.expired() for each in old])
        return fit(arena, *args, **kwargs)

    monkeypatch.setattr(Arena, "fit", fitting)
    costs = costs_from_sizes(model.spec, model.layers)
    whole = round_robin(Partition((), range(4), ()), costs, devices=1, microbatches=2)
    model.prepare(Program(lower(whole, Options(costs=costs))))
    assert left == [[True, False], [True, True]]
    upload(model, whole.visits[0], 0)
    model.enter(whole.visits[0], 0)
    model.collect(whole.visits[0], 0)
    for parameter in model.shell(2).parameters.values():
        parameter.sum().backward()
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
