"""fp16 with a loss scale that overflows at first; the norm is clipped where gradients are."""

import torch
from torch import nn

from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig
from roundpipe.optim import Adam

NUM_MICROBATCH = 3
torch.manual_seed(0)
my_model = nn.Sequential(
    nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
)
data = [(torch.randn(12, 8).half(), torch.randint(3, (12,))) for _ in range(8)]

scaler = GradScaler(init_scale=2.0**22, growth_interval=2)
model = RoundPipe(
    my_model.to(torch.float16),
    optim_dtype=torch.float32,
    model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH),
)
optimizer = Adam(model.optim_parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()


def optimizer_step():
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.optim_parameters(), 0.5)
    scaler.step(optimizer)
    optimizer.zero_grad()


losses, scales = [], []
for images, labels in data:
    loss = model.forward_backward(
        input_args=(images,),
        label=labels,
        loss_fn=lambda out, lbl: scaler.scale(criterion(out.float(), lbl)) / NUM_MICROBATCH,
    )
    losses.append(loss.item() / scaler.get_scale())
    model.step(optimizer_step)
    scaler.update()
    scales.append(scaler.get_scale())

factors = (
    scaler.get_growth_factor(up_to_date=True),
    scaler.get_backoff_factor(up_to_date=True),
    scaler.get_growth_interval(up_to_date=True),
)
scaler.set_growth_interval(100)
model.synchronize()
weights = model.state_dict()
