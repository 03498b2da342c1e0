"""How a model is stepped, in public: eagerly, with loss scaling, with state on disk."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.errors import ConfigError, StepError


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(4)]
        return nn.Sequential(*layers).to(dtype)


def batch(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 6, generator=generator).to(dtype)


def train(ours, optimizer, steps, *, scale=1.0, dtype=torch.float32, **how):
    results = []
    for step in range(steps):
        x = batch(step, dtype)
        ours.forward_backward(
            (x,), label=x, loss_fn=lambda out, y: scale * (out - y).square().sum()
        )
        results.append(ours.step(optimizer, **how))
    return results


def weights(ours):
    return {name: value.clone() for name, value in ours.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("devices", [1, 2])
def test_eager_steps_end_in_the_bits_of_whole_ones(devices):
    found = []
    for commit in ("whole", "eager"):
        with roundpipe.RoundPipe(model(), devices=["cpu"] * devices, commit=commit) as ours:
            train(ours, roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2), 4)
            found.append(weights(ours))
    assert same(*found)


def test_a_word_for_the_loss_that_means_nothing_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"unknown loss reduction: avg\nhint: sum, mean"):
        roundpipe.RoundPipe(model(), devices="cpu", loss_reduction="avg")


def test_what_an_eager_step_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="commit must be"):
        roundpipe.RoundPipe(model(), devices="cpu", commit="now")
    with roundpipe.RoundPipe(model(), devices="cpu", commit="eager") as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters())
        for how in ({"max_grad_norm": 1.0}, {"is_async": True}):
            with pytest.raises(ConfigError, match="eager"):
                train(ours, optimizer, 1, **how)
            ours.zero_grad()


def test_a_scaler_skips_steps_that_overflow_and_the_rest_is_as_without():
    scaler = roundpipe.GradScaler(init_scale=2.0**14)
    with roundpipe.RoundPipe(model(torch.float16), devices="cpu", grad_scaler=scaler) as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
        before = weights(ours)
        (too_much,) = train(ours, optimizer, 1, scale=1e4, dtype=torch.float16)
        assert too_much.skipped
        assert same(weights(ours), before)
        assert scaler.get_scale() == 2.0**13
        good = train(ours, optimizer, 3, scale=1e-2, dtype=torch.float16)
        assert not any(result.skipped for result in good)
        found = weights(ours)
    with roundpipe.RoundPipe(model(), devices="cpu") as plain:
        optimizer = roundpipe.optim.AdamW(plain.optim_parameters(), lr=1e-2)
        train(plain, optimizer, 3, scale=1e-2)
        for name, value in weights(plain).items():
            torch.testing.assert_close(found[name].float(), value, rtol=2e-2, atol=2e-2)


def test_a_function_that_steps_gets_unscaled_gradients():
    scaler = roundpipe.GradScaler(init_scale=8.0)
    seen = []
    with roundpipe.RoundPipe(model(), devices="cpu", grad_scaler=scaler) as ours:
        masters = ours.optim_parameters()
        train(ours, lambda: seen.extend(p.grad.clone() for p in masters), 1)
    with roundpipe.RoundPipe(model(), devices="cpu") as plain:
        masters = plain.optim_parameters()
        train(plain, lambda: seen.extend(p.grad.clone() for p in masters), 1)
    half = len(seen) // 2
    assert half == 8
    for one, other in zip(seen[:half], seen[half:], strict=True):
        torch.testing.assert_close(one, other)


def steps_on_disk(folder, dtype, weights_before=None, *, steps, resume=False):
    with roundpipe.RoundPipe(model(dtype), devices="cpu", optim_state_dir=folder) as ours:
        if weights_before is not None:
            ours.load_state_dict(weights_before)
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
        ours.attach_optimizer(optimizer, resume=resume)
        for step in steps:
            x = batch(step, dtype)
            ours.forward_backward((x,), label=x, loss_fn=lambda out, y: (out - y).square().sum())
            ours.step(optimizer)
        return weights(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_on_disk_gives_the_same_bits_and_another_run_goes_on_from_it(tmp_path, dtype):
    with roundpipe.RoundPipe(model(dtype), devices="cpu") as ours:
        train(ours, roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2), 4, dtype=dtype)
        expected = weights(ours)
    folder = tmp_path / "state"
    half = steps_on_disk(folder, dtype, steps=range(2))
    # bf16 masters are among the files; fp32 weights are their own masters and the caller's to keep
    loaded = half if dtype is torch.float32 else None
    assert same(steps_on_disk(folder, dtype, loaded, steps=range(2, 4), resume=True), expected)


def test_state_on_disk_is_refused_with_weights_of_another_step(tmp_path):
    folder = tmp_path / "state"
    steps_on_disk(folder, torch.float32, steps=range(2))
    with pytest.raises(ConfigError, match="other weights"):
        steps_on_disk(folder, torch.float32, steps=(), resume=True)


def test_state_on_disk_is_of_one_optimizer_and_no_function(tmp_path):
    with roundpipe.RoundPipe(model(), devices="cpu", optim_state_dir=tmp_path / "s") as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
        train(ours, optimizer, 2)
        assert optimizer.state_dict()["state"]
        with pytest.raises(ConfigError, match="one optimizer"):
            ours.attach_optimizer(roundpipe.optim.AdamW(ours.optim_parameters()))
        with pytest.raises(ConfigError, match="on disk"):
            train(ours, lambda: None, 1)


def test_an_optimizers_state_is_that_of_the_last_step_whenever_it_is_asked():
    with roundpipe.RoundPipe(model(), devices=["cpu", "cpu"]) as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
        train(ours, optimizer, 3)
        assert {float(s["step"]) for s in optimizer.state_dict()["state"].values()} == {3.0}
        with pytest.raises(ConfigError, match="nothing to resume"):
            ours.attach_optimizer(roundpipe.optim.AdamW(ours.optim_parameters()), resume=True)


@pytest.mark.parametrize("loads", [False, True])
def test_loading_an_optimizers_state_waits_for_the_update_under_way(loads):
    class Slow(roundpipe.optim.SGD):
        """Its updates, in another thread, begin when the test says so, or when nobody does."""

        def update_(self, *args, **kwargs):
            goes_on.wait(0.02)
            super().update_(*args, **kwargs)

    goes_on = threading.Event()
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        optimizer = Slow(ours.optim_parameters(), lr=1e-2, momentum=0.9)
        train(ours, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())  # tensors are taken as they are
        train(ours, optimizer, 1)
        if loads:
            optimizer.load_state_dict(copy.deepcopy(saved))
        goes_on.set()
        ours.synchronize()
        found = optimizer.state_dict()["state"]
    momenta = [
        found[k]["momentum_buffer"].equal(saved["state"][k]["momentum_buffer"]) for k in found
    ]
    assert all(momenta) is loads


def test_an_optimizer_that_is_used_no_more_is_let_go():
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        alive = []
        for _ in range(3):
            optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-2)
            alive.append(weakref.ref(optimizer))
            train(ours, optimizer, 1)
        ours.synchronize()
        del optimizer
        gc.collect()
        assert [each() is None for each in alive] == [True, True, False]


def test_a_loss_of_the_callers_own_is_scaled_by_the_caller_as_in_torch():
    norms = []
    for scaler in (roundpipe.GradScaler(init_scale=8.0), None):
        with roundpipe.RoundPipe(model(), devices="cpu", grad_scaler=scaler) as ours:
            optimizer = roundpipe.optim.SGD(ours.optim_parameters(), lr=1e-2)
            loss = ours(batch(0)).square().sum()
            (loss if scaler is None else scaler.scale(loss)).backward()
            norms.append(ours.step(optimizer).grad_norm)
    torch.testing.assert_close(norms[0], norms[1])


def test_the_callers_default_device_changes_nothing():
    found = []
    for name in ("cpu", "meta"):
        scaler = roundpipe.GradScaler(init_scale=8.0)
        with roundpipe.RoundPipe(model(), devices="cpu", grad_scaler=scaler) as ours:
            x = batch(0)
            masters = ours.optim_parameters()
            optimizer = torch.optim.SGD(masters, lr=1e-2)
            with torch.device(name):
                ours.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)
                ours.step(optimizer, max_grad_norm=0.1)
                ours(x).square().sum().backward()
                ours.step(lambda m=masters: m[0].data.add_(m[0].grad), max_grad_norm=0.1)
            found.append(weights(ours))
    assert same(*found)


class Failing(torch.autograd.Function):
    """Passes on what it gets; its backward fails when ``armed``, once an update has been made."""

    armed, updated = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Failing.armed.is_set():
            assert Failing.updated.wait(10)
            raise ArithmeticError("not today")
        return gradient


class Fragile(nn.Linear):
    def forward(self, x):
        return Failing.apply(super().forward(x))


class Signalling(roundpipe.optim.AdamW):
    def update_(self, *args, **kwargs):
        super().update_(*args, **kwargs)
        Failing.updated.set()


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_state_on_disk_of_two_steps_is_not_resumed_from(tmp_path, is_reloaded):
    """An eager step that failed has updated some layers; nothing of that shows in the files."""
    net = nn.Sequential(Fragile(6, 6), *model()).bfloat16()
    x = batch(0, torch.bfloat16)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with roundpipe.RoundPipe(
        net, devices="cpu", commit="eager", optim_state_dir=tmp_path / "s"
    ) as ours:
        optimizer = Signalling(ours.optim_parameters(), lr=1e-2)
        train(ours, optimizer, 1, dtype=torch.bfloat16)
        ours.synchronize()
        Failing.updated.clear()
        Failing.armed.set()
        ours.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)
        ours.step(optimizer)
        with pytest.raises(StepError, match="the weights are mixed"):
            ours.synchronize()
        Failing.armed.clear()
        if is_reloaded:
            ours.load_state_dict(before)
    assert (tmp_path / "s" / "manifest.json").exists() is is_reloaded
    assert not (tmp_path / "s" / ".lock").exists()
    with roundpipe.RoundPipe(
        nn.Sequential(nn.Linear(6, 6), *model()).bfloat16(),
        devices="cpu",
        optim_state_dir=tmp_path / "s",
    ) as other:
        again = Signalling(other.optim_parameters(), lr=1e-2)
        if is_reloaded:
            other.attach_optimizer(again, resume=True)
        else:
            with pytest.raises(ConfigError, match="middle of a step"):
                other.attach_optimizer(again, resume=True)


# ---- steps by a function


def one_call(ours, x=None):
    x = batch(0) if x is None else x
    ours.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)


def test_a_function_gets_its_arguments_and_gradients_of_masters():
    seen = []
    with roundpipe.RoundPipe(model(torch.bfloat16), devices="cpu") as ours:
        one_call(ours, batch(0, torch.bfloat16))
        masters = ours.optim_parameters()

        def step_fn(*args, **kwargs):
            seen.append((args, kwargs, {m.grad.dtype for m in masters}))

        result = ours.step(step_fn, False, 1, two=2)
        assert seen == [((1,), {"two": 2}, {torch.float32})]
        assert result.grad_norm > 0
        assert all(m.grad is None for m in masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_the_function_the_models_parameters_are_the_masters_so_clipping_them_clips(dtype):
    with roundpipe.RoundPipe(model(dtype), devices="cpu*2") as ours:
        optimizer = torch.optim.SGD(ours.optim_parameters(), lr=1.0)
        before = [master.detach().clone() for master in ours.optim_parameters()]
        ours.forward_backward((batch(0, dtype),), loss_fn=lambda out, _: out.square().sum())

        def clipped():
            nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
            optimizer.step()

        ours.step(clipped)
        after = [master.detach() for master in ours.optim_parameters()]
        moved = [old - new for old, new in zip(before, after, strict=True)]
    norm = torch.cat([each.flatten() for each in moved]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)  # as far as the clipped norm, at lr 1


def test_what_a_step_by_a_function_costs_is_said_once(caplog):
    caplog.set_level("INFO", logger="roundpipe.stepping")
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        for _ in range(2):
            one_call(ours)
            ours.step(lambda: None)
    assert [r.message for r in caplog.records if "function steps" in r.message] != []
    assert len(caplog.records) == 1


@pytest.mark.parametrize("scaler", [None, roundpipe.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_gradients_that_are_not_finite_reach_no_weight_and_no_moment(scaler, options):
    scaler = None if scaler is None else scaler(**({} if scaler.__module__[0] == "r" else
                                                   {"device": "cpu"}))  # fmt: skip
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        optimizer = torch.optim.AdamW(ours.optim_parameters(), lr=1e-2, **options)
        called, scales = [], []

        def step_fn():
            called.append(True)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad()

        def loss_fn(outputs, labels):
            loss = nn.functional.mse_loss(outputs, labels)
            return loss if scaler is None else scaler.scale(loss)

        for step in range(3):
            x = batch(step)
            if step == 1:
                x[0, 0] = torch.inf
                before = weights(ours), copy.deepcopy(optimizer.state_dict()["state"])
            ours.forward_backward((x,), label=x, loss_fn=loss_fn)
            assert ours.step(step_fn).skipped == (step == 1)
            if scaler is not None:
                scaler.update()
                scales.append(scaler.get_scale())
            if step == 1:
                assert same(weights(ours), before[0])
                for kept, now in zip(before[1].values(), optimizer.state_dict()["state"].values(),
                                     strict=True):  # fmt: skip
                    assert all(torch.equal(kept[name], now[name]) for name in kept)
        assert len(called) == 3
        assert scaler is None or scales == [2.0**16, 2.0**15, 2.0**15]
        assert not same(weights(ours), before[0])


def test_a_function_that_steps_working_weights_is_told_the_line_to_write():
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
        before = weights(ours)
        for step in (optimizer, optimizer.step):
            one_call(ours)
            with pytest.raises(ConfigError, match=r"hint: roundpipe\.optim\.AdamW\(model\.optim"):
                ours.step(step)
            ours.zero_grad()
        assert same(weights(ours), before)
        one_call(ours)
        ours.step(torch.optim.SGD(ours.optim_parameters(), lr=0.1).step)
        assert not same(weights(ours), before)


def test_other_optimizers_may_step_in_the_function_too():
    other = nn.Linear(2, 2)
    other.weight.grad = torch.ones(2, 2)
    with roundpipe.RoundPipe(model(), devices="cpu") as ours:
        one_call(ours)
        before = other.weight.detach().clone()
        ours.step(torch.optim.SGD(other.parameters(), lr=1.0).step)
    assert torch.equal(other.weight, before - 1)


def test_a_late_step_by_a_function_is_refused_where_steps_are_eager():
    with roundpipe.RoundPipe(model(), devices="cpu", commit="eager") as ours:
        one_call(ours)
        with pytest.raises(ConfigError, match="would wait a step"):
            ours.step(lambda: None, is_async=True)


def test_a_scaler_that_works_by_itself_is_not_to_be_stepped():
    scaler = roundpipe.GradScaler()
    with roundpipe.RoundPipe(model(), devices="cpu", grad_scaler=scaler) as ours:
        optimizer = torch.optim.SGD(ours.optim_parameters(), lr=0.1)
        for use in (lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer)):
            one_call(ours)
            with pytest.raises(ConfigError, match=r"by themselves\nhint: model\.step\(optimizer\)"):
                ours.step(use)
        scaler.update()  # nothing to do
        assert scaler.get_scale() == 2.0**16
