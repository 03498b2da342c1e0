"""Whole training steps on fake devices: no race, honest footprints, and each wait is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from roundpipe.config import ModelExecutePlan
from roundpipe.engine.claims import Claims
from roundpipe.errors import PlanError, RaceError, StepError
from roundpipe.plan.check import check
from roundpipe.plan.footprint import Footprint
from roundpipe.roundpipe import RoundPipe

SMALL = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_steps_on_fake_devices_have_no_race_and_plain_bits(rig, num_devices, staleness):
    trainer = rig.trainer(rig.fakes(num_devices, watch=True), staleness=staleness)
    losses, weights = rig.plain(4, staleness=staleness)
    assert trainer.train(4) == losses
    assert rig.same_bits(trainer.pipe.state_dict(), weights) == []


@pytest.mark.parametrize(("num_devices", "staleness"), [(1, 0), (2, 1), (3, 0)])
def test_rounds_and_small_chunks_have_no_race(rig, num_devices, staleness):
    trainer = rig.trainer(rig.fakes(num_devices, watch=True), staleness=staleness, microbatches=6)
    trainer.use_schedule(rounds=2, chunk_bytes=256)
    same = rig.trainer(["cpu"] * num_devices, staleness=staleness, microbatches=6)
    same.use_schedule(rounds=2, chunk_bytes=256)
    assert trainer.train(4) == same.train(4)
    assert rig.same_bits(trainer.state(), same.state()) == []
    plain = rig.plain(4, staleness=staleness, microbatches=6)[1]
    for name, weight in trainer.pipe.state_dict().items():  # rounds add up in another order
        torch.testing.assert_close(weight, plain[name], rtol=1e-5, atol=1e-6)


def test_calls_that_accumulate_have_no_race_and_nearly_plain_bits(rig):
    trainer = rig.trainer(rig.fakes(2, watch=True), clip=0.05)
    for step in range(3):
        for call in range(2):
            trainer.call(2 * step + call)
        trainer.step()
    _, weights = rig.plain(3, calls=2, clip=0.05)
    for name, weight in trainer.pipe.state_dict().items():  # calls add up in another order
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.weight = other.linear.weight

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_tied_weight_has_no_race(rig, staleness):
    def model():
        blocks = rig.chain()
        return nn.Sequential(*blocks[:4], Tied(blocks[0]))

    trainer = rig.trainer(rig.fakes(2, watch=True), model=model(), staleness=staleness)
    trainer.train(3)
    same = rig.trainer("cpu", model=model(), staleness=staleness)
    same.train(3)
    assert rig.same_bits(trainer.state(), same.state()) == []


def test_a_tied_causal_lm_has_no_race(rig):
    from transformers import LlamaConfig, LlamaForCausalLM

    def trained(devices):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, vocab_size=64, tie_word_embeddings=True,
        )  # fmt: skip
        with RoundPipe(LlamaForCausalLM(config), devices=devices) as pipe:
            optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
            tokens = torch.arange(48).reshape(4, 12)
            losses = []
            for step in range(3):
                given = {"input_ids": tokens + step, "labels": tokens + step}
                losses.append(pipe.forward_backward(input_kwargs=given).item())
                pipe.step(optimizer, max_grad_norm=1.0)
            return losses, pipe.state_dict()

    losses, weights = trained(rig.fakes(2, watch=True))
    expected, same = trained("cpu")
    assert losses == expected
    assert rig.same_bits(weights, same) == []


def test_two_models_on_one_pool_do_not_race(rig):
    from roundpipe.engine.pool import DevicePool

    with DevicePool(rig.fakes(2, watch=True)) as pool:
        one, two = (
            rig.trainer(None, pool=pool, staleness=staleness, model=rig.chain(seed=staleness))
            for staleness in (0, 1)
        )
        for _ in range(3):
            one.call()
            two.call()
            two.step()
            one.step()
        assert rig.same_bits(one.pipe.state_dict(), rig.plain(3)[1]) == []
        other = rig.plain(3, staleness=1, model=rig.chain(seed=1))[1]
        assert rig.same_bits(two.pipe.state_dict(), other) == []
        one.pipe.close()
        two.pipe.close()


@pytest.mark.parametrize("left_out", ["slot", "sums", "gradient", "weights", "master"])
def test_memory_that_an_action_does_not_declare_is_seen(rig, monkeypatch, left_out):
    honest = Claims.footprint

    def forgetful(self, run, action):
        touched = honest(self, run, action)
        reads = tuple(buffer for buffer in touched.reads if buffer[0] != left_out)
        return Footprint(reads, tuple(b for b in touched.writes if b[0] != left_out))

    monkeypatch.setattr(Claims, "footprint", forgetful)
    trainer = rig.trainer(rig.fakes(2, watch=True), staleness=1)
    with pytest.raises(StepError) as caught:  # noqa: PT012 - whichever call waits for it
        trainer.train(3)
        trainer.pipe.synchronize()
    assert isinstance(caught.value.__cause__, RaceError)
    assert "without saying so" in str(caught.value)


def _mutants(schedule, unordered):
    """The waits of the schedule but one, for each of its waits: left out, and as ``unordered``."""
    for action, after in schedule.waits.items():
        for wait in after:
            without = tuple(other for other in after if other != wait)
            untold = tuple(unordered(other) if other == wait else other for other in after)
            yield f"{action} without {wait}", {action: without}, {action: untold}


@pytest.mark.parametrize(
    ("num_devices", "staleness", "rounds"), [(1, 0, 1), (2, 0, 1), (2, 0, 2), (2, 1, 1)]
)
def test_each_dropped_wait_is_caught(rig, unordered, num_devices, staleness, rounds):
    """By ``check``; and by the fake device, where it is not for the order of transfers alone."""
    trainer = rig.trainer(
        rig.fakes(num_devices),
        model=rig.chain(3),
        staleness=staleness,
        microbatches=2,
        plan=SMALL,
    )
    trainer.use_schedule(rounds=rounds)
    trainer.train(4)  # past planning anew
    chained = trainer.lowered(trainer.pipe._chain._kind, 0, rounds=rounds)
    raced = gates = 0
    whole = chained[-1]
    for name, without, untold in _mutants(whole, unordered):
        with pytest.raises(PlanError) as broken:
            check([*chained[:-1], replace(whole, waits={**whole.waits, **without})])
        rules = {line.split(":")[0] for line in str(broken.value).splitlines()}
        if rules == {"activation_waits_behind_one_chunk"}:
            gates += 1
            continue
        trainer.use_schedule(
            lambda schedule, untold=untold: replace(schedule, waits={**schedule.waits, **untold}),
            rounds=rounds,
        )
        with pytest.raises(StepError) as caught:  # noqa: PT012 - the step that notices is any
            trainer.pipe._chain._last = None
            trainer.train(3)
            trainer.pipe.synchronize()
        assert isinstance(caught.value.__cause__, RaceError), name
        raced += 1
    assert raced > 25
    assert gates < raced / 3
