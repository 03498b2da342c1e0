import pytest
import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.optim import Adam, AdamW


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_are_those_of_torch(implementation, weight_decay):
    ours, theirs = nn.Parameter(randn(0, 1000)), nn.Parameter(randn(0, 1000))
    options = {"lr": 1e-2, "weight_decay": weight_decay}
    optimizer = Adam([ours], implementation=implementation, **options)
    torchs = torch.optim.Adam([theirs], foreach=False, fused=False, **options)
    for step in range(10):
        for parameter, each in ((ours, optimizer), (theirs, torchs)):
            parameter.grad = randn(step, 1000)
            each.step()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_without_decay_it_is_adamw(implementation):
    parameters = [nn.Parameter(randn(0, 500)) for _ in range(2)]
    for kind, parameter in zip((Adam, AdamW), parameters, strict=True):
        optimizer = kind([parameter], weight_decay=0.0, implementation=implementation)
        parameter.grad = randn(1, 500)
        optimizer.step()
    assert torch.equal(*parameters)


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="weight_decay must not be negative"):
        Adam([nn.Parameter(torch.ones(1))], weight_decay=-0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"amsgrad": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"maximize": True, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
    ],
)
def test_each_of_torchs_options_does_what_it_does_there(options):
    ours, theirs = nn.Parameter(randn(0, 300)), nn.Parameter(randn(0, 300))
    optimizer = Adam([ours], 1e-2, (torch.tensor(0.9), 0.99), implementation="chunks", **options)
    torchs = torch.optim.Adam([theirs], 1e-2, (0.9, 0.99), foreach=False, fused=False, **options)
    for step in range(5):
        for parameter, each in ((ours, optimizer), (theirs, torchs)):
            parameter.grad = randn(step, 300) / (step + 1)
            each.step()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    other = Adam([nn.Parameter(ours.detach().clone())], **options)
    other.load_state_dict(torchs.state_dict())
    theirs_, ours_ = torchs.state[theirs], next(iter(other.state.values()))
    assert {n: v.tolist() for n, v in ours_.items()} == {n: v.tolist() for n, v in theirs_.items()}


def test_the_largest_second_moment_is_what_amsgrad_divides_by():
    parameters = [nn.Parameter(torch.ones(10)) for _ in range(2)]
    for parameter, amsgrad in zip(parameters, (False, True), strict=True):
        optimizer = Adam([parameter], betas=(0.0, 0.5), amsgrad=amsgrad, implementation="chunks")
        for size in (1.0, 0.01, 0.01):
            parameter.grad = torch.full((10,), size)
            optimizer.step()
    assert (parameters[0] < parameters[1]).all()


def test_what_says_how_to_execute_is_ignored_aloud_or_refused():
    parameter = nn.Parameter(torch.ones(1))
    for name in ("foreach", "fused"):
        with pytest.warns(UserWarning, match=f"ignores {name}=True"):
            Adam([parameter], **{name: True})
    for name in ("capturable", "differentiable"):
        with pytest.raises(ConfigError, match=f"not supported: {name}=True"):
            Adam([parameter], **{name: True})
    with pytest.raises(ConfigError, match="amsgrad=True needs"):
        Adam([parameter], amsgrad=True, state_dtype="bf16")
