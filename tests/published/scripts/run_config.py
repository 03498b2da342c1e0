"""Every field of a run config, for a model and for a call."""

import torch
from torch import nn

from roundpipe import RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
my_model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))
x, y = torch.randn(7, 4), torch.randn(7, 2)
model = RoundPipe(
    my_model,
    model_run_config=RoundPipeRunConfig(
        requires_grad=True,
        output_device=torch.device("cpu"),
        preserve_rng_state=True,
        recompute_grain="layer",
        num_microbatch=3,
    ),
)
loss = model.forward_backward(
    input_args=(x,),
    label=y,
    loss_fn=lambda out, label: (out - label).square().sum(),
    run_config=RoundPipeRunConfig(recompute_grain="stage", preserve_rng_state=False),
)
model.zero_grad()
without = model(x, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))
with torch.no_grad():
    within = model(x)
model.eval()
many = model(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=20))
