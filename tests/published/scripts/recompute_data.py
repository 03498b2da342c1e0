"""A layer that keeps its routing, so that recompute repeats what forward decided."""

import torch
from torch import nn

from roundpipe import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)

decided = []


class Experts(nn.Module):
    def __init__(self, width=8, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if doing_recompute():
            (chosen,) = get_recompute_data()
        else:
            chosen = scores.topk(2, dim=-1).indices
            decided.append(chosen.detach().clone())
            save_for_recompute(chosen)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = scores[:, number : number + 1] * (chosen == number).any(-1, keepdim=True)
            mixed = mixed + weight * expert(x)
        return x + mixed


torch.manual_seed(0)
my_model = nn.Sequential(*[Experts() for _ in range(3)])
data, labels = torch.randn(6, 8), torch.randn(6, 8)
model = RoundPipe(my_model)
plan = ModelExecutePlan([range(2)], [range(2, 3), range(1, 2), range(1)])
loss = model.forward_backward(
    input_args=(data,),
    label=labels,
    loss_fn=nn.MSELoss(reduction="sum"),
    run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=plan),
)
model.synchronize()
gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
is_recomputing = doing_recompute()
