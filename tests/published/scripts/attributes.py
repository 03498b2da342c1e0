"""A wrapped model used as the model itself: attributes, modes, names, state."""

import torch
from torch import nn

from roundpipe import RoundPipe


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gain = 1.0
        self.kind = "net"

    def forward(self, x):
        return self.first(x) * self.gain

    def describe(self):
        return f"{self.kind} of {self.first.in_features}"


torch.manual_seed(0)
net = Net()
model = RoundPipe(net)
x = torch.randn(2, 4)
read = (model.kind, model.describe(), model.first is net.first, model.model is net)
with torch.no_grad():
    once = model(x)
    model.gain = 3.0
    thrice = model(x)
model.note = "mine"
written = (net.gain, net.note)
del model.note
deleted = not hasattr(net, "note") and not hasattr(model, "note")
names = [name for name, _ in model.named_parameters()]
state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
model.load_state_dict({name: tensor + 1 for name, tensor in state.items()})
original = nn.Module()
original.vocab_size = 7
model.set_original_model(original)
vocab_size = model.vocab_size
model.vocab_size = 8
