"""A small chain to train, through RoundPipe and in plain PyTorch."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe.config import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.device.fake import FakeDevice, Ledger
from roundpipe.engine.microbatch import sizes
from roundpipe.engine.program import Program
from roundpipe.engine.run import Run
from roundpipe.engine.updates import StepResult, Update
from roundpipe.optim import AdamW
from roundpipe.optim.host import HostOptimizer
from roundpipe.plan.actions import Action
from roundpipe.plan.check import check
from roundpipe.plan.generators import Replicas, round_robin
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.roundpipe import RoundPipe

WIDTH = 8
NUM_SAMPLES = 6
# Seven stages for five layers on two devices: every kind of action, and a deal that goes on.
PLAN = ModelExecutePlan(
    [range(1), range(1, 3), range(3, 4)], [range(4, 5), range(2, 4), range(1, 2), range(1)]
)


class Block(nn.Module):
    """A layer with a parameter that gets no gradient."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def chain(num_layers=5, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(num_layers)))


def batch(step):
    """Inputs and labels of one step; each step has its own."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (2, NUM_SAMPLES, WIDTH)
    inputs, labels = torch.randn(shape, generator=generator)
    return inputs, labels


@functools.cache
def _lowered(partition, computation, options):
    """Lowering takes longer than a step of so small a model; many tests run the same schedules."""
    computed = round_robin(partition, options.costs, **dict(computation))
    chained = lower_chain(computed, options, steps=1 if options.accumulate else 3)
    check(chained)
    return chained


@functools.cache
def _lowered_only(partition, computation, options):
    """Without `check`, for those who make very many and look at what comes out."""
    return lower_chain(round_robin(partition, options.costs, **dict(computation)), options)


class Trainer:
    """A RoundPipe over a chain, with its optimizer."""

    def __init__(self, devices, *, model=None, staleness=0, microbatches=3, plan=PLAN, **options):
        self.staleness, self.clip = staleness, options.pop("clip", None)
        self.is_eager, self.scaler = options.pop("eager", False), options.pop("scaler", None)
        self.loss_fn = options.pop("loss_fn", mse_loss)
        grain = options.pop("recompute_grain", None)
        self.config = RoundPipeRunConfig(
            num_microbatch=microbatches, execute_plan=plan, recompute_grain=grain
        )
        self.pipe = RoundPipe(model or chain(), devices=devices, **options)
        self.optimizer = AdamW(self.pipe.optim_parameters(), lr=1e-2, weight_decay=0.1)
        self.done = 0
        self.pipe._chain._num_runs = 100  # past planning anew from measured times
        if self.scaler is not None:
            self.scale_losses()
        self.use_schedule()

    def call(self, step=None):
        inputs, labels = batch(self.done if step is None else step)
        return self.pipe.forward_backward(
            (inputs,), label=labels, loss_fn=self.loss_fn, run_config=self.config
        ).item()

    def step(self):
        if self.is_eager:
            result = self.step_with(is_eager=True)
        elif self.scaler is not None:
            result = self.step_with(scaler=self.scaler)
        else:
            result = self.pipe.step(
                self.optimizer, is_async=self.staleness == 1, max_grad_norm=self.clip
            )
        self.done += 1
        return result

    def scale_losses(self):
        """Multiply the losses of all training calls."""
        make = self.pipe._call

        def scaled(*args, **more):
            call = make(*args, **more)
            return replace(call, loss_scale=self.pipe._engine.loss_scale(self.scaler))

        self.pipe._call = scaled

    def step_with(self, **how):
        """A step whose update is made by hand: what `RoundPipe.step` does, with ``how`` besides."""
        pipe, is_async = self.pipe, self.staleness == 1
        optimizer = HostOptimizer(self.optimizer, pipe._layers).begin()
        update = Update(
            pipe._layers,
            optimizer,
            max_norm=self.clip,
            scale=pipe._chain.making.token_scale,
            publish=not is_async,
            **how,
        )
        if is_async:
            for layer in pipe._layers:
                layer.split_masters()
        pipe._chain.step(update, is_async=is_async)
        return StepResult(update, pipe._engine)

    def train(self, steps):
        losses = []
        for _ in range(steps):
            losses.append(self.call())
            self.step()
        return losses

    def state(self):
        """Weights, masters and moments, as they are when nothing is under way."""
        return _state(self.pipe.state_dict(), self.pipe.optim_named_parameters(), self.optimizer)

    def use_schedule(self, change=lambda schedule: schedule, **how):
        """Run other programs than the planner's: see `lowered`, and changed at will."""
        kept = {}

        def training(kind, start):
            key = (kind, start)
            if key not in kept:
                chained = self.lowered(kind, start, **how)
                kept[key] = Program(change(chained[-1]))
            return kept[key]

        self.pipe._chain._planner.training = training

    def lowered(
        self, kind, start, *, rounds=1, chunk_bytes=1 << 22, checked=True, eager=None, replicas=()
    ):
        """A chain of steps, the last of which starts its deal on device ``start``."""
        computation = {
            "devices": len(self.pipe._pool.devices),
            "microbatches": kind.num_microbatches,
            "rounds": rounds,
            "replicas": Replicas(*replicas),
            "start_device": start,
        }
        options = Options(
            costs=self.pipe._chain._planner.costs,
            staleness=kind.staleness,
            accumulate=kind.accumulate,
            eager=self.is_eager if eager is None else eager,
            min_chunk_bytes=chunk_bytes,
        )
        lowered = _lowered if checked else _lowered_only
        return lowered(kind.plan.partition, tuple(computation.items()), options)

    def allocated_bytes(self):
        return [device.allocated_bytes for device in self.pipe._pool.devices]


class Plain:
    """The loop one would write, in the given staleness: ``read`` is what gradients are taken of."""

    def __init__(self, *, model=None, staleness=0, microbatches=3, clip=None):
        self.newest = model or chain()
        self.read = copy.deepcopy(self.newest) if staleness else self.newest
        self.optimizer = AdamW(self.newest.parameters(), lr=1e-2, weight_decay=0.1)
        self.microbatches, self.clip = microbatches, clip

    def call(self, step):
        lengths = sizes(NUM_SAMPLES, self.microbatches)
        total = torch.zeros(())
        for x, y in zip(*(t.split(lengths) for t in batch(step)), strict=True):
            loss = mse_loss(self.read(x), y)
            loss.backward()
            total = total + loss.detach()
        return total.item()

    def step(self):
        if self.read is not self.newest:
            for p, q in zip(self.newest.parameters(), self.read.parameters(), strict=True):
                p.grad, q.grad = q.grad, None
            self.refresh()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.newest.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def call_in_groups(self, step, groups):
        """A call whose gradients add up in groups of microbatches, then group by group.

        ``groups``: of each layer, in the order in which they are added.
        """
        named, parts, losses = dict(self.read.named_parameters()), [], []
        lengths = sizes(NUM_SAMPLES, self.microbatches)
        for x, y in zip(*(t.split(lengths) for t in batch(step)), strict=True):
            loss = mse_loss(self.read(x), y)
            loss.backward()
            losses.append(loss.detach())
            parts.append({name: p.grad for name, p in named.items()})
            self.read.zero_grad()
        for name, parameter in named.items():
            sums = []
            for group in groups[int(name.partition(".")[0])]:
                some = [parts[m][name] for m in group if parts[m][name] is not None]
                sums += [sum(some[1:], some[0])] if some else []
            parameter.grad = sum(sums[1:], sums[0]) if sums else None
        return sum(losses[1:], losses[0]).item()

    def refresh(self):
        """Read the newest weights from now on."""
        self.read.load_state_dict(self.newest.state_dict())

    def state(self):
        return _state(self.newest.state_dict(), self.newest.named_parameters(), self.optimizer)


def plain(steps, *, calls=1, **options):
    """Losses and weights of a plain loop over the same batches."""
    loop, losses = Plain(**options), []
    for step in range(steps):
        losses += [loop.call(step * calls + call) for call in range(calls)]
        loop.step()
    return losses, loop.newest.state_dict()


def _state(weights, masters, optimizer):
    found = {f"weight {name}": weight.clone() for name, weight in weights.items()}
    for name, master in masters:
        found[f"master {name}"] = master.detach().clone()
        for key, value in optimizer.state.get(master, {}).items():
            found[f"{key} {name}"] = torch.as_tensor(value).clone()
    return found


def same_bits(one, two):
    """The names under which two states differ."""
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


class Unordered(Action):
    """A wait for which the host issues in order, but of which no stream is told."""

    @classmethod
    def of(cls, wait):
        return cls(wait.op, wait.index, wait.microbatch, wait.chunk, before=wait.before)


def _receive_in_order_only(receive):
    def give(self, action):
        event = receive(self, Action.parse(str(action)))
        return None if isinstance(action, Unordered) else event

    return give


@pytest.fixture
def unordered(monkeypatch):
    """`Unordered` waits in schedules mean what they say."""
    monkeypatch.setattr(Run, "receive", _receive_in_order_only(Run.receive))
    return Unordered.of


def fakes(count, *, fail=None, watch=False):
    ledger = Ledger()
    return [
        FakeDevice(f"fake{index}", ledger=ledger, fail=fail, watch_storage=watch)
        for index in range(count)
    ]


@pytest.fixture
def rig():
    """The tools above; trainers made through it are closed at the end."""
    made = []

    def trainer(*args, **options):
        made.append(Trainer(*args, **options))
        return made[-1]

    yield SimpleNamespace(
        trainer=trainer, plain=plain, Plain=Plain, chain=chain, batch=batch, fakes=fakes, PLAN=PLAN,
        same_bits=same_bits, Block=Block,
    )  # fmt: skip
    for each in made:
        each.pipe.close()


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums in one order only; many threads on few cores are slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
