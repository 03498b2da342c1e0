import pytest
import torch
from torch import nn

from roundpipe.errors import HostMemoryError
from roundpipe.store import layer as layer_module
from roundpipe.store.build import build_store, relayout
from roundpipe.store.layer import HostLayer


def mixed() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "frozen": nn.Parameter(torch.randn(5), requires_grad=False),
        "half": nn.Parameter(torch.randn(3, 4).bfloat16()),
        "full": nn.Parameter(torch.randn(7)),
        "half2": nn.Parameter(torch.randn(2).bfloat16()),
        "table": torch.randn(6),
        "count": torch.tensor(3),
    }


def layer_of(tensors: dict[str, torch.Tensor], **kwargs) -> HostLayer:
    return build_store([tensors], **kwargs)[0]


def test_trainable_parameters_come_first_grouped_by_dtype():
    layer = layer_of(mixed())
    assert layer.weights.layout.names == ("half", "half2", "full", "frozen", "table", "count")
    assert layer.trainable == ("half", "full", "half2")
    assert layer.trainable_layout.names == ("half", "half2", "full")


def test_moving_in_keeps_every_value_and_points_the_users_tensors_into_the_segment():
    tensors, before = mixed(), {n: t.detach().clone() for n, t in mixed().items()}
    kept = dict(tensors)
    layer = layer_of(tensors)
    storage = layer.weights.buffer.untyped_storage().data_ptr()
    for name, tensor in tensors.items():
        assert tensor is kept[name]
        assert torch.equal(tensor, before[name])
        assert tensor.dtype == before[name].dtype
        assert tensor.untyped_storage().data_ptr() == storage
    assert tensors["half"].requires_grad
    assert not tensors["frozen"].requires_grad


def test_gradients_have_the_trainable_prefix_or_partial_sums_of_it():
    layer = layer_of(mixed())
    assert layer.gradient_layout(partial_sums=False) == layer.trainable_layout
    wide = layer.gradient_layout(partial_sums=True)
    assert wide.names == layer.trainable_layout.names
    assert {s.dtype for s in wide.slices} == {torch.float32}
    assert layer.slot_gradient_layout == wide


def test_gradients_are_taken_in_parameter_order():
    layer = layer_of(mixed())
    layer.gradients(partial_sums=False)
    layer.mark_received(["half2", "full", "half"])
    assert list(layer.take_gradients()) == ["half", "full", "half2"]


def test_partial_sums_of_a_visit_are_added_for_the_names_that_got_one():
    layer = layer_of(mixed())
    buffer = torch.zeros(layer.slot_gradient_layout.num_bytes, dtype=torch.uint8)
    views = layer.slot_gradient_layout.view(buffer)
    views["full"].fill_(1.0)
    views["half"].fill_(float("nan"))  # never written: its bytes mean nothing
    found = list(layer.partials(["full"], buffer))
    assert [(owner, name) for owner, name, _ in found] == [(layer.index, "full")]
    layer.add_partials_({"full": [view for _, _, view in found * 2]})
    assert layer.received == {"full"}
    assert layer.gradient("full").tolist() == [2.0] * 7
    assert layer.gradient("half") is None
    layer.clear_gradients()
    assert layer.gradient("full") is None


def test_an_upload_is_one_piece_and_the_slot_views_equal_the_tensors():
    tensors = mixed()
    layer = layer_of(tensors)
    assert len(layer.upload_pieces()) == 1
    slot = fill_slot(layer)
    for name, tensor in tensors.items():
        assert torch.equal(slot[name], tensor)


def fill_slot(layer: HostLayer) -> dict[str, torch.Tensor]:
    slot = torch.empty(layer.slot_layout.num_bytes, dtype=torch.uint8)
    for piece in layer.upload_pieces():
        slot[piece.offset : piece.offset + piece.num_bytes].copy_(piece.source)
    return layer.slot_layout.view(slot)


def tied() -> tuple[list[HostLayer], dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(9, 4).bfloat16())
    norm = nn.Parameter(torch.randn(4).bfloat16())
    middle = nn.Parameter(torch.randn(4, 4).bfloat16())
    layers = build_store([{"table": table}, {"middle": middle}, {"norm": norm, "table": table}])
    return layers, {"table": table, "middle": middle, "norm": norm}


def test_a_tied_tensor_has_one_owner_and_is_counted_once():
    layers, parameters = tied()
    assert layers[2].weights.layout.names == ("norm",)
    assert layers[2].borrowed == ((layers[0], "table"),)
    assert list(layers[2].masters) == ["norm"]
    owned = sum(layer.weights.layout.num_bytes for layer in layers)
    assert owned == 256 * 3
    assert [layer.shares_parameters for layer in layers] == [True, False, True]
    assert len(layers[2].upload_pieces()) == 2
    slot = fill_slot(layers[2])
    assert torch.equal(slot["table"], parameters["table"])
    assert torch.equal(slot["norm"], parameters["norm"])


def test_gradients_of_both_uses_of_a_tied_tensor_add_up_at_its_owner():
    layers, _ = tied()
    for layer in (layers[2], layers[0]):
        buffer = torch.zeros(layer.slot_gradient_layout.num_bytes, dtype=torch.uint8)
        for view in layer.slot_gradient_layout.view(buffer).values():
            view.fill_(1.5)
        for owner, name, view in layer.partials(layer.gradient_owners, buffer):
            layers[owner].add_partials_({name: [view]})
    assert layers[2].gradient_owners == {"norm": layers[2], "table": layers[0]}
    assert torch.equal(layers[0].gradient("table"), torch.full((9, 4), 3.0))
    assert layers[0].received == {"table"}
    assert layers[2].received == {"norm"}


def test_both_uses_of_a_tied_tensor_see_its_update():
    layers, parameters = tied()
    layers[0].masters["table"].data.fill_(7.0)
    layers[0].publish()
    assert torch.equal(fill_slot(layers[2])["table"], torch.full((9, 4), 7.0).bfloat16())
    assert torch.equal(parameters["table"], fill_slot(layers[0])["table"])


def test_freezing_the_owner_of_a_tied_tensor_reaches_those_who_borrow_it():
    layers, parameters = tied()
    parameters["table"].requires_grad_(False)
    assert relayout(layers)
    assert layers[2].slot_gradient_layout.names == ("norm",)
    assert not layers[2].shares_parameters
    assert torch.equal(fill_slot(layers[2])["table"], parameters["table"])


def test_relayout_keeps_values_masters_and_gradients_of_what_stays_trainable():
    tensors = mixed()
    layer = layer_of(tensors)
    masters = dict(layer.masters)
    masters["half"].data.add_(1e-4)
    half = masters["half"].detach().clone()
    layer.gradients(partial_sums=False).views["full"].fill_(2.0)
    layer.mark_received(["full", "half2"])
    before = {n: t.detach().clone() for n, t in tensors.items() if n != "half"}
    assert not relayout([layer])
    tensors["half2"].requires_grad_(False)
    tensors["frozen"].requires_grad_(True)
    assert relayout([layer])
    assert layer.weights.layout.names == ("frozen", "full", "half", "half2", "table", "count")
    assert list(layer.masters) == ["frozen", "half", "full"]
    assert layer.masters["half"] is masters["half"]
    assert torch.equal(layer.masters["half"], half)
    assert layer.masters["full"].data_ptr() == tensors["full"].data_ptr()
    assert list(layer.take_gradients()) == ["full"]
    assert layer.gradient("full").tolist() == [2.0] * 7
    for name, value in before.items():
        assert torch.equal(tensors[name], value)


def test_a_parameter_that_is_frozen_keeps_its_newest_value():
    tensors = mixed()
    layer = layer_of(tensors)
    layer.split_masters()
    for name in ("half", "full"):
        layer.masters[name].data.fill_(2.0)
        tensors[name].requires_grad_(False)
    relayout([layer])
    assert tensors["half"].unique().tolist() == [2.0]
    assert tensors["full"].unique().tolist() == [2.0]


def test_newest_is_the_master_in_the_working_dtype_also_before_it_is_published():
    layer = layer_of(mixed())
    layer.split_masters()
    layer.masters["half"].data.fill_(2.0)
    layer.masters["full"].data.fill_(2.0)
    assert layer.newest("half").dtype == torch.bfloat16
    assert layer.newest("half").unique().tolist() == [2.0]
    assert layer.newest("full").unique().tolist() == [2.0]
    assert layer.weights.views["full"].unique().numel() == 7
    assert torch.equal(layer.newest("table"), mixed()["table"])


def test_masters_are_not_made_before_someone_asks():
    layer = layer_of(mixed())
    layer.publish()
    layer.newest("half")
    assert layer._masters is None
    assert layer.gradient("half") is None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_layers_without_own_bytes_upload_only_what_they_borrow(requires_grad):
    shared = nn.Parameter(torch.randn(3), requires_grad=requires_grad)
    layers = build_store([{"w": shared}, {}, {"w": shared}])
    assert [len(layer.upload_pieces()) for layer in layers] == [1, 0, 1]
    assert torch.equal(fill_slot(layers[2])["w"], shared)
    assert fill_slot(layers[1]) == {}


def test_a_relayout_that_memory_has_no_room_for_changes_nothing_and_can_be_done_again(monkeypatch):
    tensors = mixed()
    layer = layer_of(tensors)
    before, places = layer.weights, {n: t.data_ptr() for n, t in tensors.items()}
    tensors["frozen"].requires_grad_(True)

    def refuse(_layout):
        raise HostMemoryError("out of host memory")

    with monkeypatch.context() as patch:
        patch.setattr(layer_module, "Segment", refuse)
        with pytest.raises(HostMemoryError):
            relayout([layer])
    assert layer.weights is before
    assert layer.trainable == ("half", "full", "half2")
    assert {n: t.data_ptr() for n, t in tensors.items()} == places
    assert relayout([layer])
    assert layer.trainable == ("frozen", "half", "full", "half2")
