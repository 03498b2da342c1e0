"""Parameters and buffers of any dtype, shape and name, several of them in one layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Mixed(nn.Module):
    """Norm and gate in one dtype, matrices in another: as routers and norms are kept in fp32."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other
        self.norm = nn.LayerNorm(8, dtype=one)
        self.up = nn.Linear(8, 8, dtype=other)
        self.gate = nn.Parameter(torch.ones((), dtype=one))
        self.down = nn.Linear(8, 8, dtype=other)
        self.register_buffer("table", torch.rand(8, dtype=F32))  # never cast

    def forward(self, x):
        hidden = torch.tanh(self.up(self.norm(x).to(self.other)))
        return x + self.down(hidden).to(self.one) * self.gate * self.table.to(self.one)


def mixed(one, other):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Mixed(one, other) for _ in range(3)))


def points(step, dtype):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 6, 8, generator=generator).to(dtype)
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("one", "other"), [(F32, BF16), (BF16, F32), (F32, F16), (F64, BF16), (F64, F32)], ids=str
)
def test_layers_of_two_dtypes_step_as_a_plain_loop_with_fp32_masters_does(
    one, other, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(mixed(one, other), square_loss)
    named = dict(reference.model.named_parameters())
    masters = {
        n: p.detach().to(torch.promote_types(p.dtype, F32)).clone() for n, p in named.items()
    }
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    plain_adamw = torch.optim.AdamW(masters.values(), **settings, foreach=False, fused=False)
    wrapped = wrap(mixed(one, other), 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), **settings)
    assert {p.dtype for p in wrapped.optim_parameters()} <= {F32, F64}
    for step in range(3):
        batch = points(step, one)
        expected = reference.forward_backward(batch, 3)
        gradients = reference.gradients()
        for name, master in masters.items():
            master.grad = gradients[name].to(master.dtype)
        plain_adamw.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(masters[name])

        found = train_xy(wrapped, batch, square_loss, 3)
        assert torch.equal(found, expected)
        same_bits(wrapped.gradients(), gradients)
        wrapped.step(adamw)

    state = wrapped.state_dict()
    assert {n: t.dtype for n, t in state.items()} == {
        n: t.dtype for n, t in reference.model.state_dict().items()
    }
    same_bits(state, reference.model.state_dict())


class Odd(nn.Module):
    """What a module may hold besides matrices."""

    def __init__(self):
        super().__init__()
        self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.rand(4)))
        self.register_buffer("flag", torch.tensor(data=True))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("unset", None)
        self.register_parameter("absent", None)
        self.register_parameter("a name/with ü", nn.Parameter(torch.rand(8)))
        self.data = nn.Parameter(torch.tensor(1.5))  # as every tensor has an attribute
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.strided = nn.Parameter(torch.randn(16, 8)[::2])
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.rand(8))])
        self.kept = nn.ParameterDict({"a": nn.Parameter(torch.rand(8))})

    def forward(self, x):
        pairs = torch.view_as_complex(x[:, self.order].reshape(-1, 4, 2).contiguous())
        x = torch.view_as_real(pairs * self.turn).reshape(x.shape)
        x = x * self.data + self.strided.sum(0) + self.empty.sum() + self.nothing.sum()
        x = x * getattr(self, "a name/with ü") + self.listed[0] * self.listed[1]
        return x + self.kept["a"] if self.flag else x


def odd():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential()
        for name in ("a b", "7", "self", "weight"):
            model.add_module(name, Odd())
        shared = torch.rand(8)
        for layer in model:
            layer.register_buffer("shared", shared, persistent=False)
        return model


@pytest.mark.parametrize("num_devices", [1, 3])
def test_anything_that_a_module_may_hold_moves_and_trains(
    num_devices, square_loss, plain, wrap, train_xy, same_bits
):
    reference, wrapped = plain(odd(), square_loss), wrap(odd(), num_devices)
    plain_sgd = torch.optim.SGD([p for p in reference.model.parameters() if p.requires_grad], 1e-3)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=1e-3)
    for step in range(2):
        batch = points(step, F32)
        expected = reference.forward_backward(batch, 3)
        norm = reference.step(plain_sgd, 1.0)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        assert torch.equal(wrapped.step(sgd, max_grad_norm=1.0).grad_norm, norm)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_complex_layers_train(plain, wrap, train_xy, same_bits):
    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Linear(8, 8, dtype=torch.complex64) for _ in range(3)))

    def loss_fn(outputs, labels):
        return (outputs - labels).abs().square().sum()

    batch = {key: torch.complex(value, value.flip(0)) for key, value in points(0, F32).items()}
    reference, wrapped = plain(model(), loss_fn), wrap(model(), 2)
    expected = reference.forward_backward(batch, 3)
    assert torch.equal(train_xy(wrapped, batch, loss_fn, 3), expected)
    same_bits(wrapped.gradients(), reference.sums)
