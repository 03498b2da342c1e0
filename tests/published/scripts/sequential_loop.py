"""A Sequential, an optimizer made as usual, steps by a function, evaluation in between."""

import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
my_model = nn.Sequential(
    nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
)
data = [(torch.randn(12, 8), torch.randint(3, (12,))) for _ in range(5)]

model = RoundPipe(
    my_model,
    optim_dtype=torch.float32,
    name="tower",
    model_run_config=RoundPipeRunConfig(num_microbatch=4),
    pin_model="register",
)
with OptimizerCtx():
    optimizer = torch.optim.AdamW(
        [{"params": [p for _, p in model.named_parameters()], "lr": 1e-2}], weight_decay=0.1
    )
criterion = nn.CrossEntropyLoss()


def evaluate():
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in data:
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct


losses, correct = [], []
for _ in range(2):
    model.train()
    for images, labels in data:
        loss, outputs = model.forward_backward(
            input_args=(images,),
            label=labels,
            loss_fn=lambda outputs, labels: criterion(outputs, labels) / 4,
            return_outputs=True,
        )
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        losses.append(loss.item())
    correct.append(evaluate())

model.synchronize()
weights = model.state_dict()
