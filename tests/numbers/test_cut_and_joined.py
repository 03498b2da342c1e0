"""Rules of a caller for cutting and joining, through whole calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

import roundpipe


class Scaled(nn.Module):
    """Takes its batch in the second dimension, and a table that every microbatch needs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x, *, table):
        return self.inner(x.movedim(1, 0)) * table, x.shape[1] * torch.ones(())


def made():
    torch.manual_seed(0)
    return nn.Sequential(Scaled())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_spec_says_what_is_cut_where_and_how_outputs_come_together(devices, wrap):
    x, table, y = torch.randn(3, 6, 8), torch.randn(4), torch.randn(6, 3, 4)
    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=3,
        split_input=((TensorChunkSpec(1),), {"table": _Replicate}),
        split_label=TensorChunkSpec(0),
        merge_output=(TensorChunkSpec(0), _CustomReducer(torch.zeros(()), torch.add)),
    )
    ours = wrap(made(), devices, model_run_config=config)
    loss, (out, count) = ours.forward_backward(
        (x,),
        {"table": table},
        label=y,
        loss_fn=lambda out, label: (out[0] - label).square().sum(),
        return_outputs=True,
    )
    plain = made()
    expected, _ = plain[0](x, table=table)
    total = (expected - y).square().sum()
    total.backward()
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(loss, total.detach())
    assert count == 6
    gradients = ours.gradients()
    torch.testing.assert_close(gradients["0.inner.weight"], plain[0].inner.weight.grad)


def test_functions_cut_and_join(wrap, tiny_tower, batches):
    batch = batches.points(6)

    def cut(args, kwargs, count):
        return [(part,) for part in args[0].chunk(count)], [kwargs] * count

    config = roundpipe.RoundPipeRunConfig(
        num_microbatch=2,
        split_input=cut,
        split_label=lambda label, count: list(label.chunk(count)),
        merge_output=lambda outputs: torch.cat(outputs).sum(),
    )
    loss, total = wrap(tiny_tower(), 2).forward_backward(
        (batch["x"],),
        label=batch["y"],
        loss_fn=lambda out, y: (out - y).square().sum(),
        return_outputs=True,
        run_config=config,
    )
    out = tiny_tower()(batch["x"])
    torch.testing.assert_close(total, out.detach().sum())
    torch.testing.assert_close(loss, (out - batch["y"]).square().sum().detach())


def test_packed_outputs_of_one_model_are_the_input_of_another_with_gradients(
    wrap, tiny_tower, batches
):
    batch = batches.points(6)
    torch.manual_seed(3)
    head = nn.Sequential(nn.Linear(4, 2))
    first, second = wrap(tiny_tower(), 1), wrap(nn.Sequential(nn.Linear(4, 2)), 1)
    second.load_state_dict(head.state_dict())
    config = roundpipe.RoundPipeRunConfig(num_microbatch=3, merge_output=False)
    packed = first(batch["x"], roundpipe_run_config=config)
    assert isinstance(packed, roundpipe.RoundPipePackedData)
    assert len(packed) == 3
    second(packed).square().sum().backward()
    model = tiny_tower()
    head(model(batch["x"])).square().sum().backward()
    found = first.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second.gradients()["0.weight"], head[0].weight.grad)
