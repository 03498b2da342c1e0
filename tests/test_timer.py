"""`ModelTimer.VERBOSE` tells what layers took."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.timer import ModelTimer

LINE = re.compile(
    r"Layer (\d+) (fwd|re |bwd)  new record: (\d+\.\d{3}) ms  new estimate: (\d+\.\d{3}) ms"
)


@pytest.fixture
def _verbose(monkeypatch):
    monkeypatch.setattr(ModelTimer, "VERBOSE", True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    with roundpipe.RoundPipe(
        nn.Sequential(*layers), devices=["cpu", "cpu"], model_run_config=config
    ) as made:
        yield made


def train(model, steps=1):
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    for _ in range(steps):
        model.forward_backward((torch.randn(4, 64),), loss_fn=lambda out, _: out.square().mean())
        model.step(optimizer)


def told(capsys):
    lines = capsys.readouterr().err.splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    return [(int(m[1]), m[2].strip(), float(m[3]), float(m[4])) for m in found if m]


@pytest.mark.usefixtures("_verbose")
def test_every_layer_has_a_line_for_each_kind_of_work_after_every_step(model, capsys):
    by_hand = roundpipe.ModelExecutePlan(
        [range(2), range(2, 3)], [range(3, 4), range(1, 3), range(1)]
    )
    config = roundpipe.RoundPipeRunConfig(execute_plan=by_hand)
    out = model.forward_backward(
        (torch.randn(4, 64),), loss_fn=lambda out, _: out.square().mean(), run_config=config
    )
    assert out.isfinite()
    model.synchronize()
    found = told(capsys)
    kinds = [(layer, kind) for layer, kind, *_ in found]
    below = [(layer, kind) for layer in range(3) for kind in ("fwd", "re", "bwd")]
    assert kinds == [*below, (3, "fwd"), (3, "bwd")]
    assert all(record == estimate for _, _, record, estimate in found)


@pytest.mark.usefixtures("_verbose")
def test_estimates_move_towards_records(model, capsys):
    train(model)
    model.synchronize()
    first = {(layer, kind): estimate for layer, kind, _, estimate in told(capsys)}
    train(model)
    model.synchronize()
    for layer, kind, record, estimate in told(capsys):
        low, high = sorted((first[layer, kind], record))
        assert low - 0.002 <= estimate <= high + 0.002


@pytest.mark.usefixtures("_verbose")
def test_forward_in_a_graph_and_without_one_are_told_of(model, capsys):
    model(torch.randn(4, 64)).sum().backward()
    assert {kind for _, kind, *_ in told(capsys)} == {"fwd", "re", "bwd"}
    with torch.no_grad():
        model(torch.randn(4, 64))
    model.synchronize()
    assert {kind for _, kind, *_ in told(capsys)} == {"fwd"}


def test_nothing_is_told_or_kept_by_default(model, capsys):
    train(model, steps=2)
    model.synchronize()
    assert not capsys.readouterr().err
    assert not model._chain._timer._runs


@pytest.mark.usefixtures("_verbose")
def test_a_step_that_failed_is_left_out(model, capsys):
    def fail(*_):
        raise ValueError("no loss")

    with pytest.raises(roundpipe.StepError):
        model.forward_backward((torch.randn(4, 64),), loss_fn=fail)
    train(model)
    model.synchronize()
    assert len({(layer, kind) for layer, kind, *_ in told(capsys)}) >= 8
    assert not model._chain._timer._runs


def test_an_estimate_takes_a_fifth_of_each_record():
    timer = ModelTimer()
    for seconds in (1.0, 2.0):
        timer._lines({(0, "fwd"): seconds})
    assert timer.estimates == {(0, "fwd"): pytest.approx(1.2)}
