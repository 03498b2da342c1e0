"""The shortest loop: a loader's batches go in as they are, the model's output is the loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roundpipe import OptimizerCtx, RoundPipe


class Distance(nn.Module):
    """The mean square of what comes in."""

    def forward(self, x):
        return x.square().mean()


torch.manual_seed(0)
points = torch.randn(16, 6)
module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), Distance())
model = RoundPipe(module)
with OptimizerCtx():
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

losses = []
for data in DataLoader(TensorDataset(points), batch_size=8):
    loss = model.forward_backward(data)

    def step_fn():
        optimizer.step()
        optimizer.zero_grad()

    model.step(step_fn)
    losses.append(loss)
weights = model.state_dict()
