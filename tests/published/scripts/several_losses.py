"""A loss function that returns several losses, and models that return their loss."""

import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y):
        error = self.linear(x) - y
        return error.square().sum(), error.abs().sum()


torch.manual_seed(0)
x, y = torch.randn(6, 4), torch.randn(6, 3)
config = RoundPipeRunConfig(num_microbatch=3)

model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
losses, outputs = model.forward_backward(
    input_args=(x,),
    label=y,
    loss_fn=lambda outputs, labels: [(outputs - labels).square().sum(), outputs.abs().sum()],
    return_outputs=True,
    run_config=config,
)
model.synchronize()
gradients = {n: p.grad.clone() for n, p in model.named_parameters()}

own = RoundPipe(WithLoss())
own_losses = own.forward_backward(input_args=(x,), input_kwargs={"y": y}, run_config=config)
own.synchronize()
own_gradients = {n: p.grad.clone() for n, p in own.named_parameters()}
