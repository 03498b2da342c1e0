"""A ResNet-18 with batch norm: weights and running statistics of a plain loop, on any devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe

SIZES = {  # width of the first stage, pixels, batch, steps
    "small": (4, 8, 8, 2),
    "whole": (64, 32, 32, 20),
}


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is one too where the shape changes."""

    def __init__(self, given, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or given != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x):
        out = torch.relu_(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return torch.relu_(out.add_(self.shortcut(x)))


def resnet18(width):
    """Stem, eight residual blocks, head: a layer each; with fixed weights, in training mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        blocks, given = [], width
        for stage in range(4):
            for at in range(2):
                stride = 2 if stage > 0 and at == 0 else 1
                blocks.append(Residual(given, width << stage, stride))
                given = width << stage
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 10))
        return nn.Sequential(stem, *blocks, head)


def images(size, pixels, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, pixels, pixels, generator=generator)
    return {"x": x, "y": torch.randint(0, 10, (size,), generator=generator)}


def optimizers(kind, plain_parameters, masters):
    if kind == "SGD":
        settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
        return torch.optim.SGD(plain_parameters, **settings), torch.optim.SGD(masters, **settings)
    settings = {"lr": 1e-3, "weight_decay": 0.05}
    theirs = torch.optim.AdamW(plain_parameters, **settings, foreach=False, fused=False)
    return theirs, roundpipe.optim.AdamW(masters, **settings)


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        ("small", "SGD"),
        pytest.param("whole", "SGD", marks=[pytest.mark.accept, pytest.mark.timeout(3600)]),
        pytest.param("whole", "AdamW", marks=[pytest.mark.accept, pytest.mark.timeout(3600)]),
    ],
)
def test_weights_and_running_statistics_are_those_of_a_plain_loop_on_any_number_of_devices(
    size, kind, plain, wrap, train_xy, same_bits
):
    width, pixels, batch, steps = SIZES[size]

    def loss_fn(outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, reduction="sum") / batch

    reference = plain(resnet18(width), loss_fn)
    models = [resnet18(width) for _ in range(3)]
    pipes = [wrap(model, 1 + at) for at, model in enumerate(models)]
    plain_optimizer, _ = optimizers(
        kind, reference.model.parameters(), [nn.Parameter(torch.ones(1))]
    )
    theirs = [
        optimizers(kind, [nn.Parameter(torch.ones(1))], p.optim_parameters())[1] for p in pipes
    ]

    for step in range(steps):
        given = images(batch, pixels, step)
        expected = reference.forward_backward(given, 4)
        reference.step(plain_optimizer)
        for pipe, optimizer in zip(pipes, theirs, strict=True):
            assert torch.equal(train_xy(pipe, given, loss_fn, 4), expected)
            pipe.step(optimizer)

    state = reference.model.state_dict()
    counted = [name for name in state if name.endswith("num_batches_tracked")]
    assert len(counted) == 20
    assert {state[name].item() for name in counted} == {4 * steps}
    for pipe, model in zip(pipes, models, strict=True):
        same_bits(pipe.state_dict(), state)
        pipe.eval()
        reference.model.eval()
        with torch.no_grad():
            outputs = pipe(
                given["x"], roundpipe_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1)
            )
            assert torch.equal(outputs, reference.model(given["x"]))
        same_bits(pipe.state_dict(), state)  # evaluation changes nothing
        pipe.close()
        same_bits(model.state_dict(), state)
