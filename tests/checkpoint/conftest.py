"""A small training that can be stopped, saved and gone on with; two are compared by their bits."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import roundpipe


class Tied(nn.Module):
    """Reads a table that another layer owns."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight

    def forward(self, x):
        return x @ self.weight.T


def small_model(dtype=torch.float32):
    """Dropout, running statistics, a tied table, a frozen layer and one that nothing uses."""
    with torch.random.fork_rng(devices=[]):  # what is drawn later is up to the training's seed
        torch.manual_seed(1)
        return _small_model(dtype)


def _small_model(dtype):
    table = nn.Linear(12, 12, bias=False)
    frozen = nn.Linear(12, 12)
    frozen.requires_grad_(False)
    norm = nn.BatchNorm1d(12).to(torch.float32) if dtype == torch.float32 else nn.LayerNorm(12)
    model = nn.Sequential(
        table, nn.Dropout(0.2), norm, nn.Tanh(), frozen, nn.Linear(12, 12), Tied(table)
    )
    model[5].register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.to(dtype)


def squares(outputs, labels):
    return ((outputs - labels) ** 2).mean()


MAKERS = {
    "adamw": lambda p: roundpipe.optim.AdamW(p, lr=1e-2),
    "adamw bf16": lambda p: roundpipe.optim.AdamW(p, lr=1e-2, state_dtype="bf16"),
    "adamw int8": lambda p: roundpipe.optim.AdamW(p, lr=1e-2, state_dtype="int8"),
    "amsgrad": lambda p: roundpipe.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: roundpipe.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "torch adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "torch sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "torch nadam": lambda p: torch.optim.NAdam(p, lr=torch.tensor(1e-2)),
    "torch asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "torch adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "whole": lambda p: Unknown(p, lr=1e-2, momentum=0.9),
}


class Unknown(torch.optim.SGD):
    """An optimizer that steps as a whole, as anything not known does."""


# Nothing is searched for: that takes longer than all the rest.
PLAN = roundpipe.ModelExecutePlan()
PLAN.fwd_plan = [range(3), range(3, 5)]
PLAN.bwd_plan = [range(5, 7), range(3, 5), range(3)]


class Training:
    """``model`` and optimizer over batches that the step's number decides."""

    def __init__(self, *, optimizer="adamw", late=False, calls=1, model=None, dtype=torch.float32,
                 devices="cpu*2", **settings):  # fmt: skip
        self.pipe = roundpipe.RoundPipe(
            model or small_model(dtype),
            model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=4, execute_plan=PLAN),
            devices=devices,
            **settings,
        )
        self.late, self.calls, self.dtype = late, calls, dtype
        self.optimizer = MAKERS[optimizer](self.pipe.optim_parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))
        self.num_steps = 0
        self.losses = []

    def batch(self, number):
        draws = torch.Generator().manual_seed(number)
        size = 8 + 4 * (number % 3)
        return [torch.randn(size, 12, generator=draws).to(self.dtype) for _ in range(2)]

    def step(self, num=1):
        for _ in range(num):
            for call in range(self.calls):
                x, y = self.batch(self.num_steps * 7 + call)
                self.losses.append(self.pipe.forward_backward((x,), label=y, loss_fn=squares))
            self.pipe.step(self.optimizer, is_async=self.late, max_grad_norm=1.0)
            self.scheduler.step()
            self.num_steps += 1
        return self

    def save(self, folder, **options):
        return self.pipe.save_checkpoint(
            folder, self.optimizer, self.scheduler, step=self.num_steps, **options
        )

    def load(self, folder):
        state = self.pipe.load_checkpoint(folder, self.optimizer, self.scheduler)
        self.num_steps = state["step"]
        return state

    def outcome(self):
        """All that must be the same: masters, working weights, buffers, state, rates, losses."""
        self.pipe.synchronize()
        found = {f"master {n}": p.detach() for n, p in self.pipe.optim_named_parameters()}
        found |= {f"weight {n}": t for n, t in self.pipe.model.state_dict().items()}
        state = self.optimizer.state_dict()
        for number, entry in state["state"].items():
            for key, value in entry.items():
                found[f"state {number} {key}"] = torch.as_tensor(value)
        found["rate"] = torch.as_tensor(float(state["param_groups"][0]["lr"]))
        found["draws"] = torch.randn(3)
        return {name: tensor.clone() for name, tensor in found.items()}


def same(one, other):
    assert one.keys() == other.keys()
    different = [n for n in one if not torch.equal(one[n], other[n])]
    assert not different, different


@pytest.fixture
def training():
    """``training(**how)``: a `Training` that is closed at the end; torch's seed is set anew."""
    with contextlib.ExitStack() as ends:

        def make(*, seed=5, **how):
            torch.manual_seed(seed)
            made = Training(**how)
            ends.callback(made.pipe.close)
            return made

        yield make


@pytest.fixture(scope="session")
def make_training():
    """The same as a context, for many in one test."""

    @contextlib.contextmanager
    def make(*, seed=5, **how):
        torch.manual_seed(seed)
        made = Training(**how)
        with contextlib.closing(made.pipe):
            yield made

    return make


@pytest.fixture(scope="session")
def never_stopped(make_training):
    """``never_stopped(**how)``: outcome and losses of four steps, made once."""
    known = {}

    def ask(**how):
        key = repr(sorted(how.items()))
        if key not in known:
            with make_training(**how) as made:
                known[key] = made.step(4).outcome(), list(made.losses)
        return known[key]

    return ask


@pytest.fixture(scope="session")
def same_bits():
    return same


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
