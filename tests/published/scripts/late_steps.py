"""Asynchronous steps: each call reads the weights from before the last step."""

import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
my_model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(torch.bfloat16)
data = [(torch.randn(6, 8).bfloat16(), torch.randint(3, (6,))) for _ in range(6)]

model = RoundPipe(my_model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1, momentum=0.9)


def step_fn(optimizer, *, clear):
    optimizer.step()
    if clear:
        optimizer.zero_grad()


losses = []
for images, labels in data:
    loss = model.forward_backward(
        input_args=(images,),
        label=labels,
        loss_fn=lambda out, lbl: nn.functional.cross_entropy(out.float(), lbl) / 2,
    )
    losses.append(loss.item())
    model.step(step_fn, True, optimizer, clear=True)

model.synchronize()
weights = model.state_dict()
checkpoint = model.model.state_dict()
