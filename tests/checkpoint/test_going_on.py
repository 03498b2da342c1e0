"""Going on from a checkpoint is the same, bit for bit, as never having stopped."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lr

import roundpipe
from roundpipe.errors import ConfigError, RoundPipeError

OPTIMIZERS = [
    "adamw",
    "adamw bf16",
    "adamw int8",
    "amsgrad",
    "sgd",
    "torch adamw",
    "torch sgd",
    "torch nadam",
    "torch asgd",
    "torch adafactor",
    "whole",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_was_stopped_ends_in_the_same_bits(
    optimizer, tmp_path, training, never_stopped, same_bits
):
    how = {"optimizer": optimizer, "late": OPTIMIZERS.index(optimizer) % 2 == 0}
    expected, losses = never_stopped(**how)
    training(**how).step(2).save(tmp_path / "checkpoint-2")
    again = training(seed=99, **how)
    assert again.load(tmp_path / "checkpoint-2") == {"step": 2}
    again.step(2)
    assert torch.equal(torch.stack(again.losses), torch.stack(losses[2:]))
    same_bits(again.outcome(), expected)


def stop_and_go_on(tools, folder, at, devices, is_async, **how):
    """Saved at any step, also before the first, beside training or not; on other devices."""
    make_training, never_stopped, same_bits = tools
    expected, _ = never_stopped(**how)
    with make_training(devices=devices[0], **how) as made:
        made.step(at)
        saved = made.save(folder, is_async=is_async)
        saving = made.step(4 - at).outcome()
        saved.wait()
    same_bits(saving, expected)
    with make_training(devices=devices[1], seed=99, **how) as made:
        made.load(folder)
        same_bits(made.step(4 - at).outcome(), expected)


@pytest.fixture(scope="session")
def tools(make_training, never_stopped, same_bits):
    return make_training, never_stopped, same_bits


ANYWHERE = given(
    optimizer=st.sampled_from(OPTIMIZERS),
    late=st.booleans(),
    at=st.integers(0, 3),
    devices=st.tuples(*[st.sampled_from(["cpu", "cpu*2", "cpu*3"])] * 2),
    calls=st.integers(1, 2),
    is_async=st.booleans(),
)


@settings(max_examples=2)
@ANYWHERE
def test_wherever_it_stops_and_on_whatever_it_goes_on(tools, tmp_path_factory, **how):
    stop_and_go_on(tools, tmp_path_factory.mktemp("runs") / "checkpoint", **how)


@pytest.mark.accept
@settings(max_examples=100)
@ANYWHERE
def test_wherever_it_stops_a_hundred_times(tools, tmp_path_factory, **how):
    stop_and_go_on(tools, tmp_path_factory.mktemp("runs") / "checkpoint", **how)


@pytest.mark.parametrize(("late", "optim_dtype"), [(False, torch.bfloat16), (True, None)])
def test_16_bit_weights_and_their_remainders(
    late, optim_dtype, tmp_path, training, never_stopped, same_bits
):
    how = {"late": late, "dtype": torch.bfloat16, "optim_dtype": optim_dtype}
    training(**how).step(2).save(tmp_path / "checkpoint-2")
    again = training(**how)
    again.load(tmp_path / "checkpoint-2")
    same_bits(again.step(2).outcome(), never_stopped(**how)[0])


def test_looking_at_the_model_between_a_save_and_the_next_step_changes_nothing(
    tmp_path, training, never_stopped, same_bits
):
    expected, _ = never_stopped(late=True)
    made = training(late=True).step(2)
    x, _ = made.batch(3)
    for look in (made.pipe.synchronize, made.pipe.eval, made.pipe.state_dict):
        look()
        saved = made.save(tmp_path / "checkpoint-2", is_async=True)
        made.pipe.eval()
        with torch.no_grad():
            made.pipe(x)
        made.pipe.train()
    same_bits(made.step(2).outcome(), expected)
    saved.wait()  # another RoundPipe reads it
    again = training(late=True)
    again.load(tmp_path / "checkpoint-2")
    again.pipe.synchronize()
    same_bits(again.step(2).outcome(), expected)


def test_a_loss_scale_goes_on_where_it_was(tmp_path, training, same_bits):
    def scaled():
        scaler = roundpipe.GradScaler(init_scale=2.0**8, growth_interval=3)
        return training(grad_scaler=scaler, late=True), scaler

    made, one = scaled()
    expected = made.step(5).outcome()
    made, _ = scaled()
    made.step(2).save(tmp_path / "checkpoint-2")
    made, two = scaled()
    made.load(tmp_path / "checkpoint-2")
    same_bits(made.step(3).outcome(), expected)
    assert two.state_dict() == one.state_dict()
    assert two.get_scale() > 2.0**8
    with pytest.raises(ConfigError, match=r"saved with a scaler\nhint: scaler="):
        training().load(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("late", [False, True])
def test_state_on_disk_is_saved_and_comes_back_to_wherever_state_is(
    late, tmp_path, training, never_stopped, same_bits
):
    how = {"late": late, "dtype": torch.bfloat16}
    expected = state_of(never_stopped(**how)[0])
    made = training(optim_state_dir=tmp_path / "one", **how).step(2)
    saved = made.save(tmp_path / "checkpoint-2", is_async=True)
    same_bits(state_of(made.step(2).outcome()), expected)
    saved.wait()
    for folder in (None, tmp_path / "two"):
        again = training(optim_state_dir=folder, **how)
        again.load(tmp_path / "checkpoint-2")
        same_bits(state_of(again.step(2).outcome()), expected)


def state_of(outcome):
    """An outcome without masters: they have no memory while they are on disk."""
    return {n: v for n, v in outcome.items() if not n.startswith("master")}


def test_weights_alone_are_loaded_without_an_optimizer(tmp_path, training, same_bits):
    made = training(late=True).step(3)
    made.save(tmp_path / "checkpoint-3")
    newest = made.pipe.state_dict()
    other = training(optimizer="sgd").step(2)
    rate = dict(other.optimizer.param_groups[0])
    assert other.pipe.load_checkpoint(tmp_path / "checkpoint-3") == {"step": 3}
    same_bits(other.pipe.state_dict(), newest)
    assert dict(other.optimizer.param_groups[0]) == rate
    other.step()
    assert not torch.equal(other.pipe.state_dict()["5.weight"], newest["5.weight"])


def test_state_of_ones_own_comes_back(tmp_path, training):
    made = training().step(1)
    given = {"order": torch.arange(5), "epoch": 0.25, "log": [{"loss": float("nan"), "n": (1, 2)}]}
    made.pipe.save_checkpoint(tmp_path / "one", made.optimizer, about={"step": 1}, own=given)
    found = made.pipe.load_checkpoint(tmp_path / "one", made.optimizer)["own"]
    assert torch.equal(found.pop("order"), given.pop("order"))
    assert repr(found) == repr(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr.MultiStepLR(o, [1, 3]),
        lambda o: lr.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.5), lr.CosineAnnealingLR(o, 4)], [2]),
        lambda o: lr.CosineAnnealingWarmRestarts(o, 2),
    ],
)
def test_schedulers_go_on_where_they_were(make, tmp_path, training):
    def rates(steps, folder=None):
        made = training()
        made.scheduler = make(made.optimizer)
        if folder is not None:
            made.load(folder)
        found = []
        for _ in range(steps):
            made.optimizer._opt_called = True
            made.scheduler.step()
            found.append(made.scheduler.get_last_lr())
        return made, found

    made, first = rates(2)
    made.save(tmp_path / "checkpoint-2")
    assert first + rates(3, tmp_path / "checkpoint-2")[1] == rates(5)[1]


def test_another_kind_of_scheduler_does_not_take_the_state_of_this_one(tmp_path, training):
    training().step(1).save(tmp_path / "checkpoint-1")
    other = training()
    other.scheduler = lr.CosineAnnealingLR(other.optimizer, 4)
    with pytest.raises(ConfigError, match=r"its scheduler is .*LambdaLR, not .*CosineAnnealingLR"):
        other.load(tmp_path / "checkpoint-1")


def test_a_disk_that_fails_while_weights_are_read_leaves_them_marked_as_mixed(
    tmp_path, training, monkeypatch
):
    made = training().step(1)
    made.save(tmp_path / "checkpoint-1")
    with monkeypatch.context() as patch:
        patch.setattr(
            "roundpipe.checkpoint.load._fill_state", lambda *_: (_ for _ in ()).throw(OSError("io"))
        )
        with pytest.raises(RoundPipeError, match=r"(?s)so the weights are mixed: io.*hint:"):
            made.load(tmp_path / "checkpoint-1")
    with pytest.raises(ConfigError, match="the weights are mixed"):
        made.save(tmp_path / "checkpoint-2")
    made.load(tmp_path / "checkpoint-1")
    made.save(tmp_path / "checkpoint-2")


def test_a_thread_that_cannot_be_started_holds_nothing_up(tmp_path, training, monkeypatch):
    made = training().step(1)
    with monkeypatch.context() as patch:
        whole = threading.Thread.start

        def start(thread):
            if thread.name.startswith("writes "):
                raise RuntimeError("can't start new thread")
            whole(thread)

        patch.setattr("threading.Thread.start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            made.save(tmp_path / "checkpoint-1", is_async=True)
    made.step(1).save(tmp_path / "checkpoint-2", is_async=True).wait()


def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(tmp_path, training, same_bits):
    made = training().step(2)
    made.save(tmp_path / "checkpoint-2")
    bf16 = training(optimizer="adamw bf16").step(1)
    other = training(optimizer="sgd").step(1)
    wide = training(optim_dtype=torch.float64).step(1)
    frozen = training().step(1)
    frozen.pipe.model[5].bias.requires_grad_(False)
    apart = training().step(1)
    halves = [apart.pipe.optim_parameters()[:2], apart.pipe.optim_parameters()[2:]]
    apart.optimizer = roundpipe.optim.AdamW([{"params": half} for half in halves])
    for each, named in (
        (bf16, "state_dtype is fp32, not bf16"),
        (other, r"its optimizer is roundpipe\.optim\.adamw\.AdamW, not roundpipe\.optim\.sgd\.SGD"),
        (wide, r"0\.weight \(master\) is .*float32.* there, .*float64.* here"),
        (frozen, r"trained there and not here: 5\.bias"),
        (apart, "other parameters: 1 groups there, 2 here"),
    ):
        each.scheduler = torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda _: 1.0)
        before = each.outcome()
        with pytest.raises(ConfigError, match=named) as caught:
            each.load(tmp_path / "checkpoint-2")
        assert "\nhint: " in str(caught.value)
        after = each.outcome()
        same_bits({**after, "draws": before["draws"]}, before)
    with pytest.raises(ConfigError, match="saved with a scheduler"):
        made.pipe.load_checkpoint(tmp_path / "checkpoint-2", made.optimizer)


def test_nothing_is_saved_in_the_middle_of_a_step(tmp_path, training):
    made = training().step(1)
    x, y = made.batch(0)
    made.pipe.forward_backward((x,), label=y, loss_fn=lambda o, t: (o - t).square().mean())
    with pytest.raises(ConfigError, match="gradients of a step that was not made"):
        made.save(tmp_path / "checkpoint-1")
    made.pipe.zero_grad()
    made.pipe._engine.is_mixed = True
    with pytest.raises(ConfigError, match="the weights are mixed"):
        made.save(tmp_path / "checkpoint-1")
    made.pipe._engine.is_mixed = False
    with pytest.raises(ConfigError, match=r"without pickle: state\.own: function"):
        made.save(tmp_path / "checkpoint-1", own=print and (lambda: 0))
    made.save(tmp_path / "checkpoint-1")
    assert made.pipe._engine.last_checkpoint == str(tmp_path / "checkpoint-1")


def test_no_folder_with_other_files_is_replaced(tmp_path, training, monkeypatch):
    made = training().step(1)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    saved = made.save("out", is_async=True)
    monkeypatch.chdir("/")
    saved.wait()
    assert (tmp_path / "out" / "manifest.json").exists()
    made.save(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"the place of other files: .*out: notes\.txt"):
        made.save(tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="not a folder"):
        made.save(tmp_path / "out" / "notes.txt")


def test_the_model_alone_can_be_saved_but_not_gone_on_from(tmp_path, training, same_bits):
    from safetensors.torch import load_file

    made = training(late=True).step(2)
    made.save(tmp_path / "model", only_model=True)
    state = made.pipe.state_dict()
    found = load_file(tmp_path / "model" / "model.safetensors")
    state.pop("6.weight")  # tied: once in the file
    same_bits(found, state)
    with pytest.raises(ConfigError, match="holds the model alone"):
        made.load(tmp_path / "model")


def test_a_plan_whose_bits_are_its_own_is_kept(training, tmp_path):
    def hybrid(devices):
        model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))
        made = training(schedule="hybrid", model=model, devices=devices)
        made.pipe._config = roundpipe.RoundPipeRunConfig(num_microbatch=4)
        return made

    made = hybrid("cpu*2").step(1)
    made.save(tmp_path / "checkpoint-1")
    again = hybrid("cpu*2")
    again.load(tmp_path / "checkpoint-1")
    assert again.pipe.planner.like == made.pipe.planner.candidates
    again.step(1)
    assert again.pipe.plan.candidate.replicas == made.pipe.plan.candidate.replicas
    live = hybrid("cpu*2").step(1)  # it goes back
    live.pipe.planner._plans[4, None] = other_plan = replace(live.pipe.plan, why="another")
    live.load(tmp_path / "checkpoint-1")
    live.step(1)
    assert live.pipe.plan is not other_plan
    other = hybrid("cpu*3")
    other.load(tmp_path / "checkpoint-1")
    assert other.pipe.planner.like == {}
