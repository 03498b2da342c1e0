"""``forward`` under autograd: part of the caller's graph, with the gradients of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.errors import ConfigError, StepError


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_loss_of_ones_own_gives_plain_gradients(devices, wrap, tiny_tower, batches):
    batch = batches.points(7)
    model = tiny_tower()
    x = batch["x"].clone().requires_grad_()
    loss = (model(x) - batch["y"]).square().mean()
    loss.backward()
    ours = wrap(tiny_tower(), devices)
    given = batch["x"].clone().requires_grad_()
    found = (ours(given) - batch["y"]).square().mean()
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(given.grad, x.grad, rtol=1e-5, atol=1e-7)
    gradients = ours.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_bits_do_not_depend_on_devices_and_equal_forward_backward(
    wrap, tiny_tower, batches, square_loss, train_xy
):
    batch = batches.points(9)
    fused = wrap(tiny_tower(dropout=0.2), 2, seed=5)
    train_xy(fused, batch, square_loss, 4)
    expected = fused.gradients()
    for devices in (1, 2, 3):
        ours = wrap(tiny_tower(dropout=0.2), devices, seed=5)
        config = roundpipe.RoundPipeRunConfig(num_microbatch=4)
        out = ours(batch["x"], roundpipe_run_config=config)
        square_loss(out, batch["y"]).backward()
        found = ours.gradients()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_causal_lms_own_loss_goes_backward(grain, wrap, tiny_llama, batches, plain):
    batch = batches.sequences([5, 9, 12, 7, 3])
    reference = plain(tiny_llama())
    reference.forward_backward(batch, 5)
    ours = wrap(tiny_llama(), 2)
    config = roundpipe.RoundPipeRunConfig(recompute_grain=grain)
    out = ours(**batch, roundpipe_run_config=config)
    assert out.logits.shape == (5, 12, 96)
    out.loss.backward()
    torch.testing.assert_close(out.loss.detach(), reference.losses[0], rtol=1e-6, atol=0)
    found = ours.gradients()
    for name, gradient in reference.gradients().items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_two_models_in_one_graph_share_a_pool(wrap, tiny_tower, batches):
    batch = batches.points(6)
    torch.manual_seed(1)
    head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with roundpipe.DevicePool(["cpu", "cpu"]) as pool:
        first = roundpipe.RoundPipe(tiny_tower(), pool=pool)
        second = roundpipe.RoundPipe(nn.Sequential(*map(_copy, head)), pool=pool)
        second(torch.relu(first(batch["x"])) * 2).sum().backward()
        found = {**first.gradients(), **{f"2.{n}": g for n, g in second.gradients().items()}}
        first.close()
        second.close()
    model = tiny_tower()
    head(torch.relu(model(batch["x"])) * 2).sum().backward()
    expected = dict(model.named_parameters())
    expected |= {f"2.{name}": parameter for name, parameter in head.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name].grad, rtol=1e-5, atol=1e-6)


def _copy(module):
    import copy

    return copy.deepcopy(module)


def test_calls_of_one_step_add_up_and_the_step_is_plain(wrap, tiny_tower, batches):
    ours = wrap(tiny_tower(), 2)
    model = tiny_tower()
    mine = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
    other = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for part in range(2):
            batch = batches.points(5, seed=10 * step + part)
            (ours(batch["x"]) - batch["y"]).square().sum().backward()
            (model(batch["x"]) - batch["y"]).square().sum().backward()
        result = ours.step(mine, max_grad_norm=1.0)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        other.step()
        other.zero_grad()
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=2e-6)


def test_it_may_be_mixed_with_forward_backward(wrap, tiny_tower, batches, square_loss, train_xy):
    one, two = batches.points(4, seed=1), batches.points(4, seed=2)
    ours = wrap(tiny_tower(), 2)
    train_xy(ours, one, square_loss, 2)
    square_loss(ours(two["x"]), two["y"]).backward()
    model = tiny_tower()
    for batch in (one, two):
        square_loss(model(batch["x"]), batch["y"]).backward()
    found = ours.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_frozen_layers_below_pass_gradients_to_the_input_only_if_it_wants_one(
    wrap, tiny_tower, batches
):
    batch = batches.points(4)
    for wants in (False, True):
        frozen = tiny_tower()
        frozen[0].requires_grad_(requires_grad=False)
        frozen[1].requires_grad_(requires_grad=False)
        ours = wrap(frozen, 2)
        x = batch["x"].clone().requires_grad_(wants)
        ours(x).square().sum().backward()
        model = tiny_tower()
        expected = batch["x"].clone().requires_grad_()
        model(expected).square().sum().backward()
        found = ours.gradients()
        assert "0.weight" not in found
        assert "2.up.weight" in found
        for name, gradient in found.items():
            plain = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-5)
        if wants:
            torch.testing.assert_close(x.grad, expected.grad, rtol=1e-5, atol=1e-6)


def test_a_model_without_anything_trained_gives_its_input_a_gradient(wrap, tiny_tower, batches):
    frozen = tiny_tower().requires_grad_(requires_grad=False)
    x = batches.points(5)["x"].requires_grad_()
    wrap(frozen, 2)(x).square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    tiny_tower()(expected).square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-5, atol=1e-6)


def test_without_grad_mode_or_when_asked_there_is_no_graph(wrap, tiny_tower, batches):
    ours = wrap(tiny_tower(), 1)
    x = batches.points(3)["x"]
    with torch.no_grad():
        assert not ours(x).requires_grad
    config = roundpipe.RoundPipeRunConfig(requires_grad=False)
    assert not ours(x, roundpipe_run_config=config).requires_grad
    assert ours(x).requires_grad


def test_a_second_backward_needs_the_graph_to_be_kept(wrap, tiny_tower, batches):
    ours = wrap(tiny_tower(), 2)
    x = batches.points(3)["x"]
    loss = ours(x).sum()
    loss.backward(retain_graph=True)
    once = {name: gradient.clone() for name, gradient in ours.gradients().items()}
    loss.backward()
    for name, gradient in ours.gradients().items():
        assert torch.equal(gradient, 2 * once[name])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_step_between_forward_and_backward_is_refused(wrap, tiny_tower, batches):
    ours = wrap(tiny_tower(), 2)
    optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
    x = batches.points(3)["x"]
    early, late = ours(x).sum(), ours(x).sum()
    early.backward()
    ours.step(optimizer)
    with pytest.raises(ConfigError, match="updated between"):
        late.backward()
    ours.eval()
    in_eval = ours(x).sum()
    ours.train()
    with pytest.raises(ConfigError, match="train"):
        in_eval.backward()


def test_an_attribute_set_between_forward_and_backward_is_refused(wrap, tiny_tower, batches):
    model = tiny_tower()
    model.factor = 1.0
    wrapped = wrap(model, 2)
    outputs = wrapped(batches.points(4)["x"])
    wrapped.factor = 2.0
    with pytest.raises(ConfigError, match="an attribute of the model was set between"):
        outputs.sum().backward()
    wrapped(batches.points(4)["x"]).sum().backward()


def test_staleness_one_uses_the_weights_of_the_step_before(wrap, tiny_tower, batches):
    ours, fused = wrap(tiny_tower(), 2), wrap(tiny_tower(), 2)
    mine = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
    other = roundpipe.optim.AdamW(fused.optim_parameters(), lr=1e-2)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=3)
    for step in range(4):
        batch = batches.points(6, seed=step)
        out = ours(batch["x"], roundpipe_run_config=config)
        (out - batch["y"]).square().sum().backward()
        ours.step(mine, is_async=True)
        fused.forward_backward(
            (batch["x"],),
            label=batch["y"],
            loss_fn=lambda out, y: (out - y).square().sum(),
            run_config=config,
        )
        fused.step(other, is_async=True)
    left, right = ours.state_dict(), fused.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


class Failing(nn.Module):
    """Fails in backward while its class says so: instances are copied for each device."""

    fails = False

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        out = x * self.weight
        if out.requires_grad:
            out.register_hook(lambda _: 1 / 0 if Failing.fails else None)
        return out


def test_a_failure_in_backward_reaches_the_caller_and_the_next_call_works(
    wrap, tiny_tower, batches, monkeypatch
):
    model = tiny_tower()
    model[2] = Failing()
    ours = wrap(model, 2)
    x = batches.points(3)["x"]
    loss = ours(x).sum()
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(StepError, match="division"):
        loss.backward()
    monkeypatch.setattr(Failing, "fails", False)
    assert not ours.gradients()
    ours(x).sum().backward()
    assert ours.gradients().keys() == {name for name, _ in model.named_parameters()}


def test_integer_outputs_pass_through(wrap):
    class Pair(nn.Module):
        def forward(self, x):
            return x * 2, (x > 0).long()

    ours = wrap(nn.Sequential(nn.Linear(8, 4), Pair()), 2)
    values, signs = ours(torch.randn(5, 8))
    assert values.requires_grad
    assert not signs.requires_grad
    values.sum().backward()
    assert "0.weight" in ours.gradients()
