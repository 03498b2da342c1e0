import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.optim import SGD
from roundpipe.optim.forms import joined


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    numel=st.sampled_from([0, 1, 255, 1000]),
    momentum=st.sampled_from([0.0, 0.9]),
    dampening=st.sampled_from([0.0, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    nesterov=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_steps_have_the_bits_of_torch(
    implementation, numel, momentum, dampening, weight_decay, nesterov, dtype
):
    nesterov = nesterov and momentum > 0 and dampening == 0
    options = {"lr": 0.1, "momentum": momentum, "dampening": dampening,
               "weight_decay": weight_decay, "nesterov": nesterov}  # fmt: skip
    ours, theirs = nn.Parameter(randn(0, numel)), nn.Parameter(randn(0, numel))
    optimizer = SGD([ours], implementation=implementation, **options)
    torchs = torch.optim.SGD([theirs], foreach=False, **options)
    out = torch.empty(numel, dtype=torch.bfloat16)
    for step in range(1, 4):
        grad = randn(step, numel).to(dtype)
        optimizer.update_(ours, grad, optimizer.hyperparameters(), out=out)
        theirs.grad = grad.float()
        torchs.step()
    # One multiply-add more or less is where an implementation may differ.
    assert torch.allclose(ours, theirs, rtol=2**-22, atol=2**-22)
    assert implementation == "compiled" or torch.equal(ours, theirs)
    assert torch.equal(out, ours.bfloat16())
    assert ("momentum_buffer" in optimizer.state[ours]) is (momentum > 0)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_momentum_may_be_narrow_and_bf16_weights_keep_their_low_bits(implementation, state_dtype):
    weight = nn.Parameter(torch.ones(600, dtype=torch.bfloat16))
    options = {"momentum": 0.9, "state_dtype": state_dtype, "implementation": implementation}
    optimizer = SGD([weight], lr=1e-5, **options)
    for _ in range(40):
        weight.grad = torch.linspace(0.5, 1.5, 600).bfloat16()
        optimizer.step()
    # The momentum tends to ten gradients: 31 of them in sum.
    moved = 1e-5 * 310 * torch.linspace(0.5, 1.5, 600)
    exact = joined(weight.detach(), optimizer.state[weight]["remainder"])
    assert torch.allclose(1 - exact, moved, rtol=0.15)
    assert (1 - exact).mean().item() == pytest.approx(moved.mean().item(), rel=0.02)


def test_the_first_momentum_is_the_gradient_undampened(implementation):
    weight = nn.Parameter(torch.zeros(3))
    optimizer = SGD([weight], momentum=0.9, dampening=0.5, implementation=implementation)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative: -1.0"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"nesterov": True}, "nesterov needs momentum and no dampening: momentum 0.0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "dampening 0.1\nhint: nesterov"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        SGD([nn.Parameter(torch.ones(1))], **options)
