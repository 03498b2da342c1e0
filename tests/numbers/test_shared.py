"""A parameter that several layers read: one master, one sum of all uses, counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe


class Uses(nn.Module):
    """A matrix that others use too, and a bias of its own."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


def one_module_twice():
    twice = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(8, 8), twice, nn.Tanh(), twice, nn.Linear(8, 8))


def one_matrix_in_three_layers():
    weight = nn.Parameter(torch.randn(8, 8) * 0.3)
    return nn.Sequential(Uses(weight), nn.LayerNorm(8), Uses(weight), nn.Tanh(), Uses(weight))


def one_block_for_all():
    """As ALBERT has it."""
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Linear(8, 8), block, block, block, nn.Linear(8, 8))


def a_frozen_matrix():
    model = one_matrix_in_three_layers()
    model[0].weight.requires_grad_(requires_grad=False)
    return model


MODELS = {
    make.__name__.replace("_", " "): (make, shared)
    for make, shared in (
        (one_module_twice, ("1.weight", "3.weight")),
        (one_matrix_in_three_layers, ("0.weight", "2.weight", "4.weight")),
        (one_block_for_all, ("1.1.weight", "2.1.weight", "3.1.weight")),
        (a_frozen_matrix, ("0.weight", "2.weight", "4.weight")),
    )
}


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def points(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 6, 8, generator=generator)
    return {"x": x, "y": y}


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_all_uses_add_up_once_and_stay_tied(
    name, num_devices, square_loss, plain, wrap, train_xy, close_to, tmp_path
):
    """To 1e-6 a step: the sums of the uses run in another order than in one graph."""
    reference, model = plain(made(name), square_loss), made(name)
    wrapped = wrap(model, num_devices)
    plain_sgd = torch.optim.SGD([p for p in reference.model.parameters() if p.requires_grad], 1e-2)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-2)
    for step in range(3):
        batch = points(step)
        expected = reference.forward_backward(batch, 3)
        found = train_xy(wrapped, batch, square_loss, 3)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        close_to(wrapped.gradients(), reference.sums, 2e-6)
        norm = reference.step(plain_sgd, 1.0)
        clipped = wrapped.step(sgd, max_grad_norm=1.0).grad_norm
        assert clipped.item() == pytest.approx(norm.item(), rel=1e-6)  # each gradient once

    state = wrapped.state_dict()
    close_to(state, reference.model.state_dict())
    assert list(state) == list(reference.model.state_dict())
    names = MODELS[name][1]
    assert len({state[each].data_ptr() for each in names}) == 1
    trained = [n for n, p in reference.model.named_parameters() if p.requires_grad]
    assert [n for n, _ in wrapped.optim_named_parameters()] == trained
    held = sum(layer.weights.layout.num_bytes for layer in wrapped._layers)
    parameters = list(model.parameters())  # each once
    assert held <= sum(p.nbytes for p in parameters) + 256 * len(parameters)

    torch.save(dict(state), tmp_path / "state.pt")
    wrapped.close()
    assert len({id(model.get_parameter(each)) for each in names}) == 1
    again = made(name)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    batch = points(9)
    assert torch.equal(again(batch["x"]), model(batch["x"]))


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_shared_matrix_may_be_frozen_and_trained_again(
    num_devices, square_loss, plain, wrap, train_xy, close_to
):
    """Whoever owns it and whoever borrows it: all have one view of what is trained."""
    name = "one matrix in three layers"
    reference, model = plain(made(name), square_loss), made(name)
    wrapped = wrap(model, num_devices)
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    plain_adamw = torch.optim.AdamW(
        reference.model.parameters(), **settings, foreach=False, fused=False
    )
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), **settings)
    for step, is_trained in enumerate([True, False, False, True]):
        for each in (reference.model, model):
            each[2].weight.requires_grad_(is_trained)
        wrapped.synchronize()
        batch = points(step)
        expected = reference.forward_backward(batch, 3)
        assert ("0.weight" in reference.sums) == is_trained
        found = train_xy(wrapped, batch, square_loss, 3)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert wrapped.gradients().keys() == reference.sums.keys()
        reference.step(plain_adamw)
        wrapped.step(adamw)
    close_to(wrapped.state_dict(), reference.model.state_dict(), 1e-5)
