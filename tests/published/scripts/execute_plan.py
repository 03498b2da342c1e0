"""Stages given by hand and stages that are balanced automatically, for both ways to train."""

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
my_model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
data, labels = torch.randn(6, 8), torch.randn(6, 8)
loss_fn = nn.MSELoss(reduction="sum")
model = RoundPipe(my_model)

train = ModelExecutePlan()
train.fwd_plan = [range(2), range(2, 4)]
train.bwd_plan = [range(3, 4), range(2, 3), range(1, 2), range(1)]
fused = ModelExecutePlan()
fused.fwd_plan = [range(3)]
fused.bwd_plan = [range(3, 4), range(2, 3), range(1, 2), range(1)]

losses, gradients = [], []
for plan in (fused, ModelExecutePlan.auto("fused", model, min_stages=2, upper_threshold=1.5)):
    losses.append(
        model.forward_backward(
            input_args=(data,),
            label=labels,
            loss_fn=loss_fn,
            run_config=RoundPipeRunConfig(execute_plan=plan, num_microbatch=3),
        )
    )
    model.synchronize()
    gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    model.zero_grad()

for plan in (train, ModelExecutePlan.auto("train", model, model_memory_limit=1.0)):
    outputs = model(
        data, roundpipe_run_config=RoundPipeRunConfig(execute_plan=plan, num_microbatch=3)
    )
    loss = loss_fn(outputs, labels)
    loss.backward()
    losses.append(loss.detach())
    model.synchronize()
    gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    model.zero_grad()

with torch.no_grad():
    infer = ModelExecutePlan.auto("infer", model)
    evaluated = model(data, roundpipe_run_config=RoundPipeRunConfig(execute_plan=infer))
