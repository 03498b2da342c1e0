"""How a RoundPipe begins and ends: notebooks, pools, copies, odd sizes, and use after the end."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe import (
    ConfigError,
    DevicePool,
    ModelError,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
)
from roundpipe.engine.worker import Worker
from roundpipe.optim import AdamW

WIDTH = 6


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def chain(num_layers=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def batch(size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, size, WIDTH, generator=generator)


def step(pipe, optimizer, *, microbatches=2, size=4, seed=0):
    inputs, labels = batch(size, seed)
    loss = pipe.forward_backward(
        (inputs,),
        label=labels,
        loss_fn=mse_loss,
        run_config=RoundPipeRunConfig(num_microbatch=microbatches),
    )
    pipe.step(optimizer)
    return loss.item()


def optimizer_of(pipe):
    return AdamW(pipe.optim_parameters(), lr=0.05)


def plain(model, steps, *, microbatches=2, size=4):
    optimizer, losses = AdamW(model.parameters(), lr=0.05), []
    for seed in range(steps):
        total = torch.zeros(())
        for x, y in zip(*(t.tensor_split(microbatches) for t in batch(size, seed)), strict=True):
            loss = mse_loss(model(x), y)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def name_of(task):
    return getattr(getattr(task, "func", None), "__name__", "")


def our_threads():
    return [t for t in threading.enumerate() if t.name.startswith("roundpipe")]


# ---- notebooks


def test_running_the_wrapping_cell_twice_frees_the_first_instance_and_keeps_its_weights():
    model = chain()
    first = RoundPipe(model, devices="cpu*2")
    losses = [step(first, optimizer_of(first))]
    threads = len(our_threads())
    second = RoundPipe(model, devices="cpu*2")
    assert len(our_threads()) <= threads
    with pytest.raises(ConfigError, match="closed"):
        step(first, None)
    optimizer = optimizer_of(second)
    losses.append(step(second, optimizer, seed=1))
    second.close()
    assert losses[0] == plain(chain(), 1)[0]
    assert losses[1] < 2 * losses[0]
    assert our_threads() == []


def test_a_cell_that_failed_while_wrapping_can_be_run_again():
    model = chain()
    with pytest.raises(ConfigError):
        RoundPipe(model, devices="cpu*2", schedule="no such schedule")
    kept = None  # a notebook keeps the last traceback, and what it refers to
    try:
        RoundPipe(model, devices="cpu*2", schedule="no such schedule")
    except ConfigError as error:
        kept = error
    with RoundPipe(model, devices="cpu*2") as pipe:
        assert step(pipe, optimizer_of(pipe)) == plain(chain(), 1)[0]
    assert "no such schedule" in str(kept)


def test_a_copy_of_a_wrapped_model_is_nobodys():
    model = chain()
    with RoundPipe(model, devices="cpu") as pipe:
        optimizer = optimizer_of(pipe)
        with RoundPipe(copy.deepcopy(model), devices="cpu") as other:
            step(other, optimizer_of(other))
            assert step(pipe, optimizer) == plain(chain(), 1)[0]


def test_a_wrapped_model_can_be_saved_whole():
    model = chain()
    with RoundPipe(model, devices="cpu"):
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert plain(loaded, 1) == plain(chain(), 1)


def test_the_model_is_usable_after_the_end_with_the_newest_weights():
    model = chain()
    with RoundPipe(model, devices="cpu*2") as pipe:
        optimizer = optimizer_of(pipe)
        for seed in range(3):
            inputs, labels = batch(seed=seed)
            pipe.forward_backward(
                (inputs,), label=labels, loss_fn=mse_loss,
                run_config=RoundPipeRunConfig(num_microbatch=2),
            )  # fmt: skip
            pipe.step(optimizer, is_async=True)
        newest = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, newest[name])
    assert not torch.equal(next(iter(newest.values())), chain()[0].weight)


# ---- the end


def test_what_is_dropped_without_closing_leaves_no_thread():
    pipe = RoundPipe(chain(), devices="cpu*2")
    optimizer = optimizer_of(pipe)
    for seed in range(2):
        step(pipe, optimizer, seed=seed)
    gone = weakref.ref(pipe)
    del pipe, optimizer
    gc.collect()
    assert gone() is None
    assert our_threads() == []


class Held(nn.Module):
    """A layer whose recompute waits until it is let go."""

    def __init__(self, inner, gate):
        super().__init__()
        self.inner, self.gate = inner, gate

    def forward(self, x):
        if torch.is_grad_enabled():
            assert self.gate.wait(30)
        return self.inner(x)


class Gate:
    def __init__(self):
        self.event = threading.Event()
        self.wait = self.event.wait

    def __deepcopy__(self, _):
        return self


def held_chain(gate):
    layers = list(chain())
    return nn.Sequential(Held(layers[0], gate), *layers[1:])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_dropped_finishes_the_step_under_way(shared, is_async):
    gate = Gate()
    pool = DevicePool("cpu*2") if shared else None
    model = held_chain(gate)
    pipe = RoundPipe(model, devices="cpu*2", pool=pool)
    inputs, labels = batch()
    pipe.forward_backward(
        (inputs,),
        label=labels,
        loss_fn=mse_loss,
        run_config=RoundPipeRunConfig(
            num_microbatch=2,
            execute_plan=ModelExecutePlan([range(2)], [range(2, 4), range(2)]),
        ),
    )
    pipe.step(optimizer_of(pipe), is_async=is_async)
    threading.Timer(0.1, gate.event.set).start()
    del pipe  # waits for it
    assert gate.event.is_set()
    expected = held_chain(gate)
    plain(expected, 1)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    if pool is not None:
        assert [device.allocated_bytes for device in pool.devices] == [0, 0]
        pool.close()


def test_what_is_collected_in_a_thread_of_its_own_pool_ends_too():
    pipe = RoundPipe(chain(), devices="cpu*2")
    step(pipe, optimizer_of(pipe))
    worker, last = pipe._pool.worker(0), [pipe]
    gone = weakref.ref(pipe)
    del pipe
    worker.put(last.clear)
    for thread in our_threads():
        thread.join(30)
    assert gone() is None


def test_what_is_dropped_after_a_failure_leaves_no_thread():
    pipe = RoundPipe(chain(), devices="cpu*2")

    def loss_fn(_outputs, _labels):
        raise LookupError("no")

    with contextlib.suppress(RuntimeError):
        pipe.forward_backward((batch()[0],), label=batch()[1], loss_fn=loss_fn)
    gone = weakref.ref(pipe)
    del pipe, loss_fn
    gc.collect()
    assert gone() is None
    assert our_threads() == []


def test_closing_twice_is_closing_once_and_with_closes():
    with RoundPipe(chain(), devices="cpu*2") as pipe:
        step(pipe, optimizer_of(pipe))
        pipe.close()
        assert our_threads() == []
        pipe.close()
    assert our_threads() == []


def test_with_closes_when_the_body_raises():
    with contextlib.suppress(ZeroDivisionError), RoundPipe(chain(), devices="cpu") as pipe:
        step(pipe, optimizer_of(pipe))
        raise ZeroDivisionError
    assert our_threads() == []


def test_closing_while_python_ends_leaves_the_newest_weights_in_the_module(monkeypatch):
    module = chain()
    pipe = RoundPipe(module, devices="cpu")
    step(pipe, optimizer_of(pipe))
    newest = {name: weight.clone() for name, weight in pipe.state_dict().items()}
    pipe._pool.close()  # as an early `atexit` hook finds it
    monkeypatch.setattr(weakref.finalize, "_shutdown", True)
    pipe.close()
    assert all(torch.equal(module.state_dict()[name], newest[name]) for name in newest)


def test_use_after_closing_says_so():
    pipe = RoundPipe(chain(), devices="cpu", name="mine")
    optimizer = optimizer_of(pipe)
    step(pipe, optimizer)
    pipe.close()
    for use in (
        lambda: pipe.forward_backward((batch()[0],), label=batch()[1], loss_fn=mse_loss),
        lambda: pipe(batch()[0]),
        lambda: pipe.step(optimizer),
    ):
        with torch.no_grad(), pytest.raises(ConfigError, match="mine is closed\nhint: wrap"):
            use()
    assert set(pipe.state_dict()) == set(chain().state_dict())  # the weights are still there


def test_memory_of_the_devices_is_given_back():
    with DevicePool("cpu*2") as pool:
        pipe = RoundPipe(chain(), pool=pool)
        step(pipe, optimizer_of(pipe))
        assert sum(device.allocated_bytes for device in pool.devices) > 0
        pipe.close()
        assert [device.allocated_bytes for device in pool.devices] == [0, 0]


# ---- several


def test_two_instances_side_by_side_do_not_disturb_each_other():
    with (
        RoundPipe(chain(seed=1), devices="cpu*2") as one,
        RoundPipe(chain(seed=2), devices="cpu") as two,
    ):
        optimizers = optimizer_of(one), optimizer_of(two)
        losses = [], []
        for seed in range(3):
            losses[0].append(step(one, optimizers[0], seed=seed))
            losses[1].append(step(two, optimizers[1], seed=seed))
    assert losses == (plain(chain(seed=1), 3), plain(chain(seed=2), 3))


def test_two_instances_share_a_pool_which_outlives_them():
    with DevicePool("cpu*2") as pool:
        for _ in range(2):
            with RoundPipe(chain(seed=1), pool=pool) as one, RoundPipe(chain(3), pool=pool) as two:
                optimizers = optimizer_of(one), optimizer_of(two)
                losses = [], []
                for seed in range(3):
                    losses[0].append(step(one, optimizers[0], seed=seed))
                    losses[1].append(step(two, optimizers[1], seed=seed))
            assert losses == (plain(chain(seed=1), 3), plain(chain(3), 3))
        assert not pool.is_closed
    assert our_threads() == []


def test_two_threads_train_on_one_pool():
    """Each worker must get the runs of both in the same order, or they wait for each other."""
    losses = {}
    models = [chain(seed=seed) for seed in range(3)]  # drawn here: threads share one generator

    def train(pool, seed):
        with RoundPipe(models[seed], pool=pool, stall_seconds=30) as pipe:
            optimizer = optimizer_of(pipe)
            losses[seed] = [step(pipe, optimizer, seed=each) for each in range(20)]

    with DevicePool("cpu*3") as pool:
        threads = [threading.Thread(target=train, args=(pool, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert losses == {seed: plain(chain(seed=seed), 20) for seed in range(3)}


def test_a_run_that_starts_while_another_one_does_comes_behind_it_everywhere(monkeypatch):
    """The second thread comes when the first has given its work to one worker of three."""
    put, losses, started = Worker.put, {}, threading.Event()
    models = [chain(seed=seed) for seed in range(2)]  # drawn here: threads share one generator

    def train(pool, seed):
        with RoundPipe(models[seed], pool=pool, stall_seconds=5) as pipe:
            losses[seed] = step(pipe, optimizer_of(pipe))

    with DevicePool("cpu*2") as pool:
        other = threading.Thread(target=train, args=(pool, 1))

        def put_and_let_the_other_start(self, task):
            put(self, task)
            if threading.current_thread() is other:
                if name_of(task) == "_bring_results":
                    started.set()
            elif name_of(task) == "issue" and not other.ident:
                other.start()
                started.wait(0.5)  # in vain, unless nothing keeps it out

        monkeypatch.setattr(Worker, "put", put_and_let_the_other_start)
        train(pool, 0)
        other.join()
    assert losses == {seed: plain(chain(seed=seed), 1)[0] for seed in range(2)}


def test_a_pool_that_is_closed_first_is_noticed():
    pool = DevicePool("cpu*2")
    pipe = RoundPipe(chain(), pool=pool)
    optimizer = optimizer_of(pipe)
    step(pipe, optimizer)
    pool.close()
    with pytest.raises(ConfigError, match="closed"):
        step(pipe, optimizer)
    pipe.close()
    with pytest.raises(ConfigError, match="the pool is closed"):
        RoundPipe(chain(), pool=pool)


# ---- what is refused


def test_moving_casting_and_pickling_are_refused_with_the_way_out():
    with RoundPipe(chain(), devices="cpu") as pipe:
        for move in (
            lambda: pipe.to("cpu"),
            pipe.half,
            pipe.bfloat16,
            pipe.cpu,
        ):
            with pytest.raises(ConfigError, match="hint: cast the model before wrapping"):
                move()
        for copied in (lambda: pickle.dumps(pipe), lambda: copy.deepcopy(pipe)):
            with pytest.raises(TypeError, match="hint: save state_dict"):
                copied()
        with pytest.raises(ModelError, match="wrapped already"):
            RoundPipe(pipe)
    with pytest.raises(ModelError, match=r"not a module: 'org/name'\nhint: .*from_pretrained"):
        RoundPipe("org/name")


def test_an_empty_batch_is_refused_and_so_is_one_without_a_batch():
    with RoundPipe(chain(), devices="cpu") as pipe:
        optimizer = optimizer_of(pipe)
        with pytest.raises(ConfigError, match="the batch is empty"):
            step(pipe, optimizer, size=0)
        with pytest.raises(ConfigError, match="no tensor with a batch dimension"):
            pipe.forward_backward((3,), label=batch()[1], loss_fn=mse_loss)
        with pytest.raises(ConfigError, match=r"hint: input_args=\(x,\)"):
            pipe.forward_backward(batch()[0], label=batch()[1], loss_fn=mse_loss)
        assert step(pipe, optimizer) == plain(chain(), 1)[0]


# ---- odd sizes


@pytest.mark.parametrize("num_devices", [1, 2, 5])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_any_number_of_layers_runs_on_any_number_of_devices(num_layers, num_devices):
    with RoundPipe(chain(num_layers), devices=f"cpu*{num_devices}") as pipe:
        optimizer = optimizer_of(pipe)
        losses = [step(pipe, optimizer, seed=seed) for seed in range(4)]
        state = pipe.state_dict()
    expected = chain(num_layers)
    assert losses == plain(expected, 4)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())


def test_a_module_that_is_no_chain_is_one_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = chain()

        def forward(self, x):
            return self.chain(x)

    with RoundPipe(Net(), devices="cpu*2") as pipe:
        optimizer = optimizer_of(pipe)
        assert [step(pipe, optimizer, seed=seed) for seed in range(3)] == plain(Net(), 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_smaller_than_the_microbatches_gives_fewer(size):
    with RoundPipe(chain(), devices="cpu*2") as pipe:
        optimizer = optimizer_of(pipe)
        losses = [step(pipe, optimizer, microbatches=4, size=size, seed=s) for s in range(3)]
    assert losses == plain(chain(), 3, microbatches=size, size=size)


def test_batches_of_changing_sizes_follow_each_other():
    with RoundPipe(chain(), devices="cpu*2") as pipe:
        optimizer = optimizer_of(pipe)
        losses = [step(pipe, optimizer, microbatches=4, size=s, seed=s) for s in (4, 1, 7, 2, 7, 7)]
    model, expected = chain(), []
    other = AdamW(model.parameters(), lr=0.05)
    for size in (4, 1, 7, 2, 7, 7):
        total = torch.zeros(())
        pieces = (t.tensor_split(min(4, size)) for t in batch(size, size))
        for x, y in zip(*pieces, strict=True):
            loss = mse_loss(model(x), y)
            loss.backward()
            total = total + loss.detach()
        other.step()
        other.zero_grad()
        expected.append(total.item())
    assert losses == expected


def test_a_model_without_anything_to_train_gives_its_loss_and_can_be_stepped():
    model = chain().requires_grad_(requires_grad=False)
    with RoundPipe(model, devices="cpu*2") as pipe:
        assert pipe.optim_parameters() == []
        stranger = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        inputs, labels = batch()
        for _ in range(2):
            loss = pipe.forward_backward((inputs,), label=labels, loss_fn=mse_loss)
            assert loss.item() == pytest.approx(mse_loss(chain()(inputs), labels).item())
            stranger.param_groups[0]["params"].clear()
            result = pipe.step(stranger)
            assert result.grad_norm.item() == 0
        with torch.enable_grad():  # nothing to differentiate: not refused
            torch.testing.assert_close(pipe(inputs), chain()(inputs).detach())
