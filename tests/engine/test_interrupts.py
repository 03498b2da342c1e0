"""What hangs is noticed, and the stop button works wherever it is pressed."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from roundpipe.config import ModelExecutePlan
from roundpipe.engine import engine as engine_module
from roundpipe.engine import pool as pool_module
from roundpipe.engine.call import StepInMaking
from roundpipe.engine.engine import Engine
from roundpipe.engine.run import Run
from roundpipe.engine.watchdog import Watchdog
from roundpipe.errors import ConfigError, StallError

SMALL = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])
LONG = 30.0  # how long a test waits for what must happen


def press_stop():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


class Gate:
    """Holds whoever goes through it once it is shut, with or without gradient. Shells share it."""

    def __init__(self):
        self.grad = None
        self.reached, self.opened = threading.Event(), threading.Event()
        self.when_reached = lambda: None

    def __deepcopy__(self, _):
        return self

    def shut(self, *, grad, when_reached=lambda: None):
        self.grad, self.when_reached = grad, when_reached

    def __call__(self):
        if torch.is_grad_enabled() == self.grad:
            self.grad = None
            self.reached.set()
            self.when_reached()
            assert self.opened.wait(LONG)


class Gated(nn.Module):
    def __init__(self, block, gate):
        super().__init__()
        self.block, self.gate = block, gate

    def forward(self, x):
        self.gate()
        return self.block(x)


def gated(rig, gate):
    blocks = rig.chain(3)
    return nn.Sequential(Gated(blocks[0], gate), *blocks[1:])


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def held(rig, gate):
    """Makes a trainer with a gate in its first layer, two steps in."""

    def make(devices=("cpu", "cpu"), **options):
        trainer = rig.trainer(
            list(devices), model=gated(rig, gate), microbatches=2, plan=SMALL, **options
        )
        trainer.train(2)
        trainer.pipe.synchronize()
        return trainer

    return make


def expected(rig, steps):
    return rig.plain(steps, model=gated(rig, Gate()), microbatches=2)[1]


def goes_on(rig, trainer, done):
    """Train to four steps, of which ``done`` are there."""
    trainer.done = done
    trainer.train(4 - done)
    return rig.same_bits(trainer.pipe.state_dict(), expected(rig, 4)) == []


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_a_layer_that_hangs_is_told_of_and_the_object_is_usable_once_it_goes_on(
    rig, held, gate, kind, capfd
):
    trainer = held(["cpu", "cpu"] if kind == "cpu" else rig.fakes(2), stall_seconds=0.5)
    before = trainer.state()
    gate.shut(grad=False)
    begin = time.monotonic()
    with pytest.raises(StallError) as caught:
        trainer.call()
    assert time.monotonic() - begin < LONG / 2
    text = str(caught.value)
    assert text.startswith("nothing finished for 0.5 s:\n")
    assert re.search(r"  device \d \((cpu|fake)\S*\) compute: F0\.0\n", text)
    assert re.search(r"  device \d \((cpu|fake)\S*\) weights: (idle|U|waiting)", text)
    assert "  host host: " in text
    stacks = capfd.readouterr().err
    assert stacks.count("test_interrupts.py") >= 2  # who calls, and who hangs
    assert "in __call__" in stacks
    gate.opened.set()
    assert rig.same_bits(trainer.state(), before) == []
    assert goes_on(rig, trainer, 2)


def test_a_call_on_what_still_hangs_says_so_again(held, gate):
    trainer = held(stall_seconds=0.2)
    gate.shut(grad=False)
    for _ in range(2):
        with pytest.raises(StallError, match="nothing finished"):
            trainer.call()


def test_a_backward_that_hangs_is_noticed_by_whoever_waits(rig, held, gate):
    trainer = held(stall_seconds=0.3)
    gate.shut(grad=True)
    trainer.call()
    result = trainer.step()
    with pytest.raises(StallError, match="nothing finished"):
        result.grad_norm  # noqa: B018 - reading it waits
    with pytest.raises(StallError, match="nothing finished"):
        trainer.pipe.synchronize()
    gate.opened.set()
    assert goes_on(rig, trainer, 2)


@pytest.mark.parametrize("told", [True, False])
def test_closing_what_hangs_takes_a_moment(held, gate, monkeypatch, caplog, told):
    monkeypatch.setattr(pool_module, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(engine_module, "_GRACE_SECONDS", 0.2)
    trainer = held(stall_seconds=0.4 if not told else LONG)
    gate.shut(grad=False, when_reached=press_stop if told else lambda: None)
    with pytest.raises(KeyboardInterrupt if told else StallError):
        trainer.call()
    begin = time.monotonic()
    trainer.pipe.close()
    assert time.monotonic() - begin < LONG / 5
    assert [record.name for record in caplog.records if record.exc_info and told] == []
    with pytest.raises(ConfigError, match="closed"):
        trainer.call()


def test_the_stop_button_during_a_call_leaves_the_weights_of_the_last_step(rig, held, gate):
    trainer = held()
    before, threads = trainer.state(), threading.active_count()
    gate.opened.set()
    gate.shut(grad=False, when_reached=press_stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.call()
    assert rig.same_bits(trainer.state(), before) == []
    assert threading.active_count() == threads
    assert goes_on(rig, trainer, 2)


def test_the_stop_button_does_not_wait_for_a_long_action(rig, held, gate, monkeypatch):
    monkeypatch.setattr(engine_module, "_GRACE_SECONDS", 0.1)
    trainer = held()
    gate.shut(grad=False, when_reached=press_stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.call()
    assert not gate.opened.is_set()
    gate.opened.set()
    assert goes_on(rig, trainer, 2)


def test_the_step_before_is_kept_when_the_button_is_pressed_in_the_next_call(rig, held, gate):
    """Its updates may be under way still; the step is committed, or dropped as a whole."""
    trainer = held()
    gate.opened.set()
    trainer.call()
    trainer.step()
    gate.shut(grad=False, when_reached=press_stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.call()
    assert rig.same_bits(trainer.pipe.state_dict(), expected(rig, 3)) == []
    assert goes_on(rig, trainer, 3)


def _press_when_waited_for(monkeypatch, gate):
    """Hold the backward until the caller waits, then press the button."""
    waiting, is_set = threading.Event(), Watchdog.is_set

    def telling(self, ready, seconds):
        waiting.set()
        return is_set(self, ready, seconds)

    def press():
        assert waiting.wait(LONG)
        monkeypatch.undo()
        press_stop()

    gate.opened.set()
    gate.shut(grad=True, when_reached=press)
    return lambda: monkeypatch.setattr(Watchdog, "is_set", telling)


def test_the_stop_button_during_synchronize_leaves_the_step_alone(rig, held, gate, monkeypatch):
    trainer = held()
    arm = _press_when_waited_for(monkeypatch, gate)
    trainer.call()
    result = trainer.step()
    arm()
    with pytest.raises(KeyboardInterrupt):
        trainer.pipe.synchronize()
    assert float(result.grad_norm) > 0
    assert rig.same_bits(trainer.pipe.state_dict(), expected(rig, 3)) == []
    assert goes_on(rig, trainer, 3)


def test_the_stop_button_while_reading_a_result_leaves_the_step_alone(rig, held, gate, monkeypatch):
    trainer = held()
    arm = _press_when_waited_for(monkeypatch, gate)
    trainer.call()
    result = trainer.step()
    arm()
    with pytest.raises(KeyboardInterrupt):
        result.grad_norm  # noqa: B018 - reading it waits
    assert float(result.grad_norm) > 0
    assert rig.same_bits(trainer.pipe.state_dict(), expected(rig, 3)) == []
    assert goes_on(rig, trainer, 3)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Engine, "start"),
        (Engine, "step"),
        (Engine, "wait_results"),
        (Run, "__init__"),
        (StepInMaking, "count"),
        (StepInMaking, "end"),
    ],
)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_stop_button_anywhere_in_our_own_code_leaves_a_whole_number_of_steps(
    rig, held, monkeypatch, owner, name, after, staleness
):
    """Before or after what the caller's thread runs there, once, in the middle of training."""
    trainer = held(staleness=staleness)
    original, pressed = getattr(owner, name), []

    def interrupted(self, *args, **kwargs):
        is_callers = threading.current_thread() is threading.main_thread()
        if is_callers and not pressed and not after:
            pressed.append(1)
            raise KeyboardInterrupt
        result = original(self, *args, **kwargs)
        if is_callers and not pressed:
            pressed.append(1)
            raise KeyboardInterrupt
        return result

    trainer.train(1)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(1)
    monkeypatch.undo()
    loop = rig.Plain(model=gated(rig, Gate()), microbatches=2, staleness=staleness)
    weights = trainer.pipe.state_dict()
    for step in range(5):
        if rig.same_bits(weights, loop.newest.state_dict()) == []:
            break
        loop.call(step)
        loop.step()
    assert step in (3, 4)
    loop.refresh()
    for each in range(step, 6):
        trainer.done = each
        assert trainer.train(1) == [loop.call(each)]
        loop.step()
    assert rig.same_bits(trainer.state(), loop.state()) == []
