"""What calls hand back: outputs beside the loss, passes without gradient, precision as asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ConfigError


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("size", [2, 7])
def test_outputs_come_with_the_loss_in_the_order_of_the_batch(
    size, num_devices, batches, tiny_tower, square_loss, pieces_of, wrap, train_xy
):
    batch = batches.points(size)
    model = tiny_tower()
    expected = [model(piece["x"]) for piece in pieces_of(batch, 4)]
    wrapped = wrap(tiny_tower(), num_devices)

    loss, outputs = train_xy(wrapped, batch, square_loss, 4, return_outputs=True)
    _, listed = train_xy(wrapped, batch, square_loss, 4, return_outputs=True, merge_output=False)

    assert torch.equal(outputs, torch.cat(expected))
    assert not outputs.requires_grad
    assert loss.dim() == 0
    assert not loss.requires_grad
    assert len(listed) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(listed, expected, strict=True))


def test_a_causal_lm_hands_back_its_output_with_the_batchs_loss_and_logits(
    batches, tiny_llama, pieces_of, wrap, train_lm
):
    batch = batches.sequences([9, 14, 5, 7, 6])
    model = tiny_llama()
    expected = torch.cat([model(**piece).logits for piece in pieces_of(batch, 3)])

    loss, output = train_lm(wrap(tiny_llama(), 2), batch, 3, return_outputs=True)

    assert torch.equal(output.logits, expected)
    assert output.logits.shape == (5, 14, 96)
    assert torch.equal(output.loss, loss)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_a_pass_without_gradient_equals_the_plain_model(
    num_devices, batches, tiny_llama, wrap, split_in
):
    batch = batches.sequences([9, 14, 5, 7])
    model = tiny_llama().eval()
    wrapped = wrap(tiny_llama().eval(), num_devices)
    with torch.no_grad():
        plain = model(**batch)
        whole = wrapped(**batch, roundpipe_run_config=split_in(1))
        parts = wrapped(**batch, roundpipe_run_config=split_in(3))
        listed = wrapped(**batch, roundpipe_run_config=split_in(3, merge_output=False))
        nothing_to_lose = wrapped(input_ids=batch["input_ids"])

    assert torch.equal(whole.logits, plain.logits)
    assert torch.equal(whole.loss, plain.loss)
    assert torch.allclose(parts.logits, plain.logits, atol=1e-5)
    assert parts.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert torch.equal(torch.cat(listed.logits), parts.logits)
    assert nothing_to_lose.loss is None


def test_a_pass_without_gradient_of_a_sequential(batches, tiny_tower, wrap, split_in):
    batch = batches.points(7)
    model = tiny_tower()
    wrapped = wrap(tiny_tower(), 3)
    with torch.no_grad():
        assert torch.equal(wrapped(batch["x"], roundpipe_run_config=split_in(1)), model(batch["x"]))
        assert torch.allclose(wrapped(batch["x"]), model(batch["x"]), atol=1e-6)
        empty = wrapped(batch["x"], roundpipe_run_config=split_in(20, merge_output=False))
    assert [len(each) for each in empty] == [1] * 7


def test_passes_between_training_calls_use_the_newest_weights_and_keep_the_gradients(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits, split_in
):
    """Also between the calls of one step."""
    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=1e-2)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-2)
    for seed in range(3):
        batch = batches.points(6, seed=seed)
        for _ in range(2):
            part = plain(reference.model, square_loss)
            part.forward_backward(batch, 3)
            for name, grad in part.gradients().items():
                held = reference.sums.get(name)
                reference.sums[name] = grad if held is None else held + grad
            train_xy(wrapped, batch, square_loss, 3)
            with torch.no_grad():
                found = wrapped(batch["x"], roundpipe_run_config=split_in(1))
                assert torch.equal(found, reference.model(batch["x"]))
        reference.step(plain_sgd)
        wrapped.step(sgd)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_outputs_of_different_lengths_are_listed_or_refused(wrap, split_in):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x)[:, : int(x[0, 0, 0])]

    x = torch.ones(2, 3, 3)
    x[1] = 2
    wrapped = wrap(nn.Sequential(Rows()), 1)
    with torch.no_grad():
        listed = wrapped(x, roundpipe_run_config=split_in(2, merge_output=False))
        with pytest.raises(ConfigError, match="different shapes"):
            wrapped(x, roundpipe_run_config=split_in(2))
    assert [each.shape[1] for each in listed] == [1, 2]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_autocast_around_a_call_equals_autocast_around_a_plain_forward(
    grain, num_devices, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    batch = batches.sequences([9, 14, 5, 7])

    def around(_):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    reference = plain(tiny_llama())
    expected = reference.forward_backward(batch, 4, around=around)
    gradients = reference.gradients()
    in_fp32 = plain(tiny_llama()).forward_backward(batch, 4)
    wrapped = wrap(tiny_llama(), num_devices)

    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = train_lm(wrapped, batch, 4, recompute_grain=grain)
        assert torch.equal(found, expected)
        assert not torch.equal(found, in_fp32)
        same_bits(wrapped.gradients(), gradients)
        wrapped.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert wrapped(input_ids=batch["input_ids"]).logits.dtype == torch.bfloat16


class Island(nn.Module):
    """Asks for fp32 in the middle of autocast, as routers and losses do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16 * 16).reshape(16, 16))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_an_island_of_fp32_inside_autocast_stays_fp32_in_backward(
    grain, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """Backward runs outside autocast, as PyTorch says: else it would cast what forward did not."""

    def model():
        return tiny_tower(blocks=3).insert(2, Island()).insert(4, Island())

    batch = batches.points(6)
    reference = plain(model(), square_loss)
    expected = reference.forward_backward(
        batch, 3, around=lambda _: torch.autocast("cpu", dtype=torch.bfloat16)
    )
    wrapped = wrap(model(), 2)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = train_xy(wrapped, batch, square_loss, 3, recompute_grain=grain)

    assert torch.equal(found, expected)
    same_bits(wrapped.gradients(), reference.gradients())


def test_inference_mode_around_evaluation_leaves_training_as_it_is(
    batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits, split_in
):
    """The first call of all, and all that happens between steps, in inference mode."""
    reference, wrapped = plain(tiny_tower(), square_loss), wrap(tiny_tower(), 2)
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=1e-2, momentum=0.9)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-2, momentum=0.9)
    for seed in range(4):
        batch = batches.points(6, seed=seed)
        with torch.inference_mode():
            found = wrapped(batch["x"], roundpipe_run_config=split_in(1))
            assert torch.equal(found, reference.model(batch["x"]))
            same_bits(wrapped.state_dict(), reference.model.state_dict())
            frozen = seed == 2
            wrapped.model[1].requires_grad_(not frozen)
            reference.model[1].requires_grad_(not frozen)
            wrapped.synchronize()
        expected = reference.forward_backward(batch, 3)
        reference.step(plain_sgd)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        wrapped.step(sgd)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_evaluation_and_training_take_turns(batches, tiny_llama, plain, wrap, train_lm, same_bits):
    """``eval()`` and ``train()`` of the whole, between steps that are chained otherwise."""
    reference = plain(tiny_llama())
    wrapped = wrap(tiny_llama(), 2)
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=0.1)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1)
    for seed in range(5):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected = reference.forward_backward(batch, 4)
        reference.step(plain_sgd)
        assert torch.equal(train_lm(wrapped, batch, 4), expected)
        wrapped.step(sgd)
        if seed % 2:
            wrapped.eval()
            assert not wrapped.model.training
            with torch.no_grad():
                found = wrapped(**batch)
                assert found.loss.item() == pytest.approx(
                    reference.model(**batch).loss.item(), rel=1e-6
                )
            wrapped.train()
    same_bits(wrapped.state_dict(), reference.model.state_dict())
