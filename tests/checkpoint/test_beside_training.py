"""A checkpoint is written while training goes on, and holds the step that it was taken of."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe.checkpoint import layer_files
from roundpipe.checkpoint.manifest import check
from roundpipe.checkpoint.saved import SavedCheckpoint
from roundpipe.errors import RoundPipeError
from roundpipe.store.layer import HostLayer

LONG = 60.0  # seconds: what never comes would fail the test, nothing waits so long


class Gate:
    """Stops the writer in front of a master; tells when an update waits for it."""

    def __init__(self, monkeypatch, name):
        self.opened, self.reached, self.anybody = (threading.Event() for _ in range(3))
        self.waited = {}
        look, wait = layer_files._require_finite, HostLayer.wait_unread

        def stopped(master, value):
            if master == name:
                self.reached.set()
                self.opened.wait(LONG)
            look(master, value)

        def noted(layer):
            if layer.reading is not None and not layer.reading.is_over:
                self.waits_for(layer.index).set()
                self.anybody.set()
            wait(layer)

        monkeypatch.setattr(layer_files, "_require_finite", stopped)
        monkeypatch.setattr(HostLayer, "wait_unread", noted)

    def waits_for(self, layer):
        return self.waited.setdefault(layer, threading.Event())


@pytest.fixture
def gate(monkeypatch):
    made = []

    def make(name):
        made.append(Gate(monkeypatch, name))
        return made[-1]

    yield make
    for each in made:
        each.opened.set()


def masters(made):
    """Those of now: whatever is under way goes on."""
    return {n: p.detach().clone() for n, p in made.pipe.optim_named_parameters()}


@pytest.mark.parametrize(("late", "is_looked_at"), [(False, False), (True, False), (True, True)])
def test_the_next_step_runs_forward_and_backward_while_the_writer_stands_still(
    late, is_looked_at, tmp_path, training, gate, never_stopped, same_bits
):
    expected, _ = never_stopped(late=late)
    made = training(late=late).step(2)
    if is_looked_at:
        made.pipe.synchronize()  # what the next call reads is kept aside
    writer = gate("0.weight")
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    before = masters(made)  # nothing is under way but the writer
    assert writer.reached.wait(LONG)
    made.step()  # returns: its losses are there, its update is under way
    assert writer.anybody.wait(LONG)
    assert not saved.is_done
    same_bits(masters(made), before)
    writer.opened.set()
    saved.wait()
    made.step()
    same_bits(made.outcome(), expected)
    again = training(late=late)
    again.load(tmp_path / "checkpoint-2")
    same_bits(masters(again), before)
    again.step(2)
    same_bits(again.outcome(), expected)


def test_a_layer_that_is_written_is_updated_before_the_next_one_is(tmp_path, training, gate):
    made = training().step(2)
    writer = gate("5.weight")
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    before = masters(made)  # nothing is under way but the writer
    assert writer.reached.wait(LONG)
    made.step()
    assert writer.waits_for(5).wait(LONG)
    now = masters(made)
    changed = {name for name in now if not torch.equal(now[name], before[name])}
    assert changed == {"0.weight", "2.weight", "2.bias"}
    writer.opened.set()
    saved.wait()


@pytest.mark.parametrize("how", ["whole", "torch sgd"])
def test_optimizers_that_are_not_ours_wait_too(how, tmp_path, training, gate, same_bits):
    made = training(optimizer=how).step(2)
    writer = gate("0.weight")
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    before = masters(made)  # nothing is under way but the writer
    made.step()
    assert writer.waits_for(0).wait(LONG)
    same_bits(masters(made), before)
    writer.opened.set()
    saved.wait()
    again = training(optimizer=how)
    again.load(tmp_path / "checkpoint-2")
    same_bits(masters(again), before)


def test_a_step_function_waits_until_all_is_written(tmp_path, training, gate, same_bits):
    made = training().step(2)
    writer = gate("0.weight")
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    before = masters(made)  # nothing is under way but the writer
    opens = threading.Thread(
        target=lambda: (writer.anybody.wait(LONG), writer.opened.set()), name="opens"
    )
    opens.start()
    x, y = made.batch(1)
    made.pipe.forward_backward((x,), label=y, loss_fn=lambda o, t: ((o - t) ** 2).mean())
    made.pipe.step(made.optimizer.step)
    opens.join()
    saved.wait()
    again = training()
    again.load(tmp_path / "checkpoint-2")
    same_bits(masters(again), before)


def test_closing_and_loading_wait_until_a_checkpoint_is_whole(tmp_path, training, same_bits):
    made = training().step(2)
    saved = made.save(tmp_path / "one", is_async=True)
    before = masters(made)
    made.pipe.load_state_dict({n: t * 0 for n, t in made.pipe.state_dict().items()})
    assert saved.is_done
    saved = made.save(tmp_path / "two", is_async=True)
    made.pipe.close()
    assert saved.is_done
    check(tmp_path / "two")
    again = training()
    again.load(tmp_path / "one")
    same_bits(masters(again), before)


def test_what_is_trained_may_change_while_a_checkpoint_is_written(tmp_path, training):
    made = training().step(2)
    weight = made.pipe.state_dict()["5.weight"]
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    made.pipe.model[5].requires_grad_(False)
    made.step(2)
    saved.wait()
    again = training()
    again.load(tmp_path / "checkpoint-2")
    assert torch.equal(again.pipe.state_dict()["5.weight"], weight)


def test_a_weight_that_is_not_finite_makes_no_checkpoint(tmp_path, training):
    made = training().step(1)
    with torch.no_grad():
        dict(made.pipe.optim_named_parameters())["5.bias"][3] = float("inf")
    with pytest.raises(RoundPipeError, match=r"not finite, so no checkpoint is made: 5\.bias"):
        made.save(tmp_path / "checkpoint-1")
    saved = made.save(tmp_path / "checkpoint-1", is_async=True)
    with pytest.raises(RoundPipeError, match=r"5\.bias"):
        saved.wait()
    with pytest.raises(RoundPipeError, match=r"5\.bias"):
        made.save(tmp_path / "checkpoint-1", only_model=True)
    assert list(tmp_path.iterdir()) == []


def test_what_writes_beside_it_may_fail(tmp_path, training):
    made = training().step(1)

    def beside(folder):
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        made.save(tmp_path / "checkpoint-1", beside=beside)
    assert list(tmp_path.iterdir()) == []
    made.step()


def test_writing_counts_as_progress_of_the_pool(tmp_path, training):
    made = training().step(1)
    made.pipe.synchronize()
    before = made.pipe._pool.num_finished
    made.save(tmp_path / "checkpoint-1")
    assert made.pipe._pool.num_finished >= before + len(masters(made))


def test_a_failure_is_told_whenever_one_asks(tmp_path):
    saved = SavedCheckpoint(tmp_path / "checkpoint-1")

    def fails():
        raise RuntimeError("broken")

    saved.start(fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            saved.wait()
    saved.require_told()  # has been
    assert saved.is_done
    assert "failed" in repr(saved)
