"""Inputs, labels and outputs cut and joined by functions, by specs, and not at all."""

import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe import RoundPipe, RoundPipeRunConfig


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, images, masks, *, scale, shift=None):
        hidden = self.linear(images) * masks * scale
        hidden = hidden if shift is None else hidden + shift
        return {"hidden": hidden, "rows": hidden.sum(), "kind": "masked"}


torch.manual_seed(0)
images, masks = torch.randn(6, 6), (torch.rand(6, 4) > 0.3).float()
targets, weights_of = torch.randn(6, 4), torch.rand(6, 4)
scale, shift = torch.tensor(2.0), torch.randn(1, 4)
model = RoundPipe(Masked())


def loss_fn(outputs, label):
    target, weight = label
    return ((outputs["hidden"] - target) ** 2 * weight).sum()


def custom_split(args, kwargs, num_microbatch):
    images, masks = args
    args_list = list(zip(images.chunk(num_microbatch), masks.chunk(num_microbatch), strict=True))
    kwargs_list = [kwargs] * num_microbatch
    return args_list, kwargs_list


def custom_split_label(label, num_microbatch):
    targets, weights = label
    return list(zip(targets.chunk(num_microbatch), weights.chunk(num_microbatch), strict=True))


def custom_merge(outputs):
    return torch.cat([out["hidden"] for out in outputs], dim=0)


configs = {
    "functions": RoundPipeRunConfig(
        num_microbatch=3,
        split_input=custom_split,
        split_label=custom_split_label,
        merge_output=custom_merge,
    ),
    "specs": RoundPipeRunConfig(
        num_microbatch=3,
        split_input=(
            (TensorChunkSpec(0), TensorChunkSpec(0)),
            {"scale": _Replicate, "shift": _Replicate},
        ),
        split_label=(TensorChunkSpec(0), TensorChunkSpec(0)),
        merge_output={
            "hidden": TensorChunkSpec(0),
            "rows": _CustomReducer(torch.tensor(0.0), lambda x, y: x + y),
            "kind": _Replicate,
        },
    ),
    "half a spec": RoundPipeRunConfig(
        num_microbatch=3,
        split_input=((TensorChunkSpec(0), TensorChunkSpec(0)), None),
        merge_output=True,
    ),
    "unmerged": RoundPipeRunConfig(num_microbatch=3, merge_output=False),
}
losses, outputs, gradients = {}, {}, {}
for name, config in configs.items():
    losses[name], outputs[name] = model.forward_backward(
        input_args=(images, masks),
        input_kwargs={"scale": scale}
        if name == "half a spec"
        else {"scale": scale, "shift": shift},
        label=(targets, weights_of),
        loss_fn=loss_fn,
        return_outputs=True,
        run_config=config,
    )
    model.synchronize()
    gradients[name] = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
outputs["unmerged"]["hidden"].synchronize()
