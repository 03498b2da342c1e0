"""What the caller's thread has around it also holds where the work runs."""

from __future__ import annotations

import contextvars
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode

from roundpipe.engine.caller import CallerState
from roundpipe.engine.microbatch import sizes
from roundpipe.errors import ModelError

WHO = contextvars.ContextVar("WHO", default="nobody")


def elsewhere(work):
    """Run ``work`` in a thread that has nothing of ours; what it returns."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def autocast_now():
    on = torch.is_autocast_enabled("cpu")
    return on, torch.get_autocast_dtype("cpu") if on else None


def test_autocast_is_taken_along_and_ends_with_the_work():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = CallerState.capture()

    def both():
        return state.run(autocast_now), autocast_now()

    assert elsewhere(both) == ((True, torch.bfloat16), (False, None))


def test_context_variables_are_taken_along_and_changes_stay_inside():
    token = WHO.set("caller")
    state = CallerState.capture()
    WHO.reset(token)

    def change():
        seen = WHO.get()
        WHO.set("worker")
        return seen

    assert [elsewhere(lambda: state.run(change)) for _ in range(2)] == ["caller", "caller"]
    assert WHO.get() == "nobody"


def test_one_state_serves_several_threads_at_once():
    token = WHO.set("caller")
    state = CallerState.capture()
    WHO.reset(token)
    inside = threading.Barrier(2, timeout=10)

    def meet():
        inside.wait()
        return WHO.get()

    other = threading.Thread(target=lambda: state.run(meet))
    other.start()
    assert state.run(meet) == "caller"
    other.join()


class Counting(TorchFunctionMode):
    """Counts the threads in which functions of torch were called under it."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.threads.add(threading.get_ident())
        return func(*args, **(kwargs or {}))


def test_function_modes_are_taken_along():
    with Counting() as mode:
        state = CallerState.capture()
    assert not state.is_plain
    mode.threads.clear()
    elsewhere(lambda: state.run(lambda: torch.add(torch.ones(1), 1)))
    assert len(mode.threads) == 1


def test_a_caller_with_nothing_around_it_costs_nothing():
    state = contextvars.Context().run(CallerState.capture)
    assert state.is_plain
    work_of = []
    state.run(lambda: work_of.append(threading.current_thread()))
    assert work_of == [threading.current_thread()]


class Spy(nn.Module):
    """A linear layer that notes what it runs under."""

    def __init__(self, width, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(width, width), seen

    def forward(self, x):
        y = self.linear(x)
        self.seen.note(torch.is_grad_enabled(), self.training, y.dtype, WHO.get())
        return y.float()


class Seen:
    """Notes from shells, which are copies: this is shared by all of them."""

    def __init__(self):
        self.notes = set()

    def __deepcopy__(self, _):
        return self

    def note(self, *what):
        self.notes.add(what)


@pytest.fixture
def spied(rig):
    def make(**options):
        seen = Seen()
        torch.manual_seed(0)
        model = nn.Sequential(*(Spy(8, seen) for _ in range(5)))
        return rig.trainer(["cpu", "cpu"], model=model, **options), seen

    return make


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_callers_autocast_holds_in_forward_recompute_and_loss(spied, rig, grain):
    losses_in = []

    def loss_fn(outputs, labels):
        losses_in.append(autocast_now())
        return mse_loss(outputs, labels)

    trainer, seen = spied(recompute_grain=grain, loss_fn=loss_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = trainer.call()
    trainer.step()
    trainer.pipe.synchronize()
    assert seen.notes == {(grad, True, torch.bfloat16, "nobody") for grad in (True, False)}
    assert set(losses_in) == {(True, torch.bfloat16)}
    seen.notes.clear()
    trainer.call()
    trainer.step()
    trainer.pipe.synchronize()
    assert {dtype for _, _, dtype, _ in seen.notes} == {torch.float32}

    torch.manual_seed(0)
    plain = nn.Sequential(*(Spy(8, Seen()) for _ in range(5)))
    total = torch.zeros(())
    lengths = sizes(6, 3)
    for x, y in zip(*(t.split(lengths) for t in rig.batch(0)), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mse_loss(plain(x), y)
        loss.backward()
        total = total + loss.detach()
    assert first == total.item()


def test_context_variables_are_seen_in_layers_and_in_the_loss(spied):
    def loss_fn(outputs, labels):
        return mse_loss(outputs, labels) * (1 if WHO.get() == "caller" else float("nan"))

    trainer, seen = spied(loss_fn=loss_fn)
    token = WHO.set("caller")
    loss = trainer.call()
    WHO.reset(token)
    trainer.step()
    trainer.pipe.synchronize()
    assert math.isfinite(loss)
    assert {who for *_, who in seen.notes} == {"caller"}


def test_the_callers_grad_mode_neither_disturbs_nor_is_disturbed(spied, rig):
    trainer, _ = spied()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            before = torch.is_grad_enabled()
            trainer.train(1)
            assert torch.is_grad_enabled() == before
    assert torch.is_grad_enabled()
    other, _ = spied()
    other.train(2)
    assert rig.same_bits(trainer.state(), other.state()) == []


def test_train_and_eval_reach_the_shells_at_the_next_call(spied):
    trainer, seen = spied()
    trainer.train(2)
    for change, expected in (
        (trainer.pipe.eval, {False}),
        (trainer.pipe.train, {True}),
        (trainer.pipe.model.eval, {False}),  # past the wrapper
        (trainer.pipe.model[1].train, {False, True}),  # of one layer only
    ):
        trainer.pipe.synchronize()
        seen.notes.clear()
        change()
        trainer.train(1)
        trainer.pipe.synchronize()
        assert {training for _, training, *_ in seen.notes} == expected


def test_a_hook_or_attribute_set_after_wrapping_is_refused_with_the_way_out(spied):
    trainer, _ = spied()
    trainer.train(1)
    hook = trainer.pipe.model[2].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="forward hook added to 2\nhint: close"):
        trainer.call()
    hook.remove()
    trainer.train(1)
    trainer.pipe.model[0].extra = 1
    with pytest.raises(ModelError, match=r"attribute changed: 0\.extra"):
        trainer.step()
    del trainer.pipe.model[0].extra
    trainer.train(1)
