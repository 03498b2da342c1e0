import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.errors import ModelError
from roundpipe.store.build import build_store


class OldStoragesAlive(TorchDispatchMode):
    """Counts, at each copy, how many of the model's first storages still exist."""

    def __init__(self, tensors):
        super().__init__()
        self.refs = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        self.counts = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.counts.append(sum(not ref.expired() for ref in self.refs))
        return func(*args, **(kwargs or {}))


def test_the_model_never_exists_twice_while_it_moves_in():
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    layer_tensors = [
        {f"{i}.{n}": p for n, p in child.named_parameters()} for i, child in enumerate(module)
    ]
    with OldStoragesAlive(module.parameters()) as watch:
        build_store(layer_tensors)
    assert watch.counts == [6, 5, 4, 3, 2, 1]
    assert all(ref.expired() for ref in watch.refs)


def test_a_module_moved_in_computes_what_it_did():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    module.eval()
    before = module(x)
    build_store(
        [
            {f"{i}.{n}": t for n, t in [*child.named_parameters(), *child.named_buffers()]}
            for i, child in enumerate(module)
        ]
    )
    assert torch.equal(module(x), before)
    assert [p.is_contiguous() for p in module.parameters()] == [True] * 6


def test_transposed_and_expanded_tensors_move_in():
    turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
    wide = torch.tensor([1.0]).expand(4)
    build_store([{"turned": turned, "wide": wide}])
    assert turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert wide.tolist() == [1.0] * 4


def test_parameters_that_share_memory_under_two_names_are_refused_before_anything_moves():
    whole = torch.zeros(4)
    a, b = nn.Parameter(whole[:3]), nn.Parameter(whole[2:])
    with pytest.raises(ModelError, match="two parameters share memory: a and b\nhint: "):
        build_store([{"a": a}, {"b": b}])
    assert a.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    neighbours = nn.Parameter(whole[:2]), nn.Parameter(whole[2:])
    build_store([{"a": neighbours[0]}, {"b": neighbours[1]}])


def test_tensors_without_data_and_sparse_ones_are_refused_by_name():
    with pytest.raises(ModelError, match="a tensor has no data: w"):
        build_store([{"w": torch.empty(2, device="meta")}])
    with pytest.raises(ModelError, match=r"a tensor is not dense: w \(sparse_coo\)"):
        build_store([{"w": torch.eye(2).to_sparse()}])


def test_two_tensors_of_one_name_are_not_taken_for_a_tied_one():
    with pytest.raises(AssertionError, match="two tensors of one name: w"):
        build_store([{"w": torch.ones(1)}, {"w": torch.ones(1)}])


def test_names_and_the_trainable_set_can_be_given():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    layers = build_store([{"a": a}, {"b": b}], names=["first", "second"], trainable={"b"})
    assert [layer.name for layer in layers] == ["first", "second"]
    assert [layer.trainable for layer in layers] == [(), ("b",)]
