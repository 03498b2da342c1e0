"""Two models in one graph: what one returns is the other's input, with and without joining."""

import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
model1 = RoundPipe(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
model2 = RoundPipe(nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)))
data1, labels = torch.randn(6, 8), torch.randn(6, 2)
loss_fn = nn.MSELoss(reduction="sum")
optimizers = [torch.optim.SGD(m.optim_parameters(), lr=1e-2) for m in (model1, model2)]
losses = []


def step():
    model1.step(lambda: (optimizers[0].step(), optimizers[0].zero_grad()))
    model2.step(lambda: (optimizers[1].step(), optimizers[1].zero_grad()))


# forward of one, the fused pass of the other
plan1, plan2 = ModelExecutePlan.auto("fused", model1, model2)
output1 = model1.forward(
    input_args=(data1,),
    run_config=RoundPipeRunConfig(execute_plan=plan1, merge_output=False, num_microbatch=3),
)
loss = model2.forward_backward(
    input_args=(output1,),
    label=labels,
    loss_fn=loss_fn,
    run_config=RoundPipeRunConfig(execute_plan=plan2, num_microbatch=3),
)
losses.append(loss.item())
step()

# the same joined in between
loss = model2.forward_backward(
    input_args=(model1(data1),), label=labels, loss_fn=lambda o, y: (o - y).square().mean()
)
losses.append(loss.item())
step()

# forward of both, and the caller's own loss
loss = loss_fn(model2(torch.relu(model1(data1))), labels)
loss.backward()
losses.append(loss.item())
step()

for model in (model1, model2):
    model.synchronize()
weights = [{name: w.clone() for name, w in m.state_dict().items()} for m in (model1, model2)]
