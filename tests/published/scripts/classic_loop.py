"""A model that is wrapped part by part: forward, the caller's own loss, its backward, a step."""

import torch
from torch import nn

from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    OptimizerCtx,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.optim import Adam


class Branching(nn.Module):
    """Reads every block's output, so it is no chain."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        hidden, seen = self.embed(x), []
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
            seen.append(hidden)
        return self.head(self.norm(sum(seen)))


torch.manual_seed(0)
raw_model = Branching()
data = [(torch.randn(6, 6), torch.randint(4, (6,))) for _ in range(3)]
criterion = nn.CrossEntropyLoss()

model = wrap_model_to_roundpipe(
    raw_model,
    use_sequential_preset=False,
    lower_threshold=64,
    skip_modules=[raw_model.norm],
    override_config={block: RoundPipeRunConfig(merge_output=True) for block in raw_model.blocks},
    model_run_config=RoundPipeRunConfig(num_microbatch=3),
    optim_dtype=torch.float32,
)
is_auto = isinstance(model, AutoRoundPipe)
with OptimizerCtx():
    optim = Adam(model.parameters(), lr=1e-2)
scaler = GradScaler(8192.0)

losses = []
for inputs, labels in data:
    loss = criterion(model(inputs), labels)
    scaler.scale(loss).backward()
    losses.append(loss.item())
    model.step(lambda: (scaler.step(optim), optim.zero_grad(), None)[-1])
    scaler.update()

model.synchronize()
model.eval()
with torch.no_grad():
    outputs = model(data[0][0])
checkpoint = {name: tensor.clone() for name, tensor in raw_model.state_dict().items()}
model.close()
