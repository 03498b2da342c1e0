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
