"""The scale itself moves as torch's does, and its state can be exchanged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.optim.scaler import GradScaler

GROWING = {"init_scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.25, "growth_interval": 3}


def torch_step(scaler: torch.amp.GradScaler, *, is_finite: bool) -> None:
    """One step of torch's own loop, with a gradient that is finite or not."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = scaler.scale((weight * (1.0 if is_finite else torch.inf)).sum())
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()


@given(st.lists(st.booleans(), max_size=12))
def test_the_scale_moves_as_torch_moves_it(steps: list[bool]) -> None:
    ours, theirs = GradScaler(**GROWING), torch.amp.GradScaler("cpu", **GROWING)
    for is_finite in steps:
        ours.count(is_finite=is_finite)
        torch_step(theirs, is_finite=is_finite)
        assert ours.state_dict() == theirs.state_dict()


def test_its_state_loads_into_torchs_and_back() -> None:
    ours = GradScaler(**GROWING)
    for is_finite in (True, False, True, True):
        ours.count(is_finite=is_finite)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    torch_step(theirs, is_finite=True)
    other = GradScaler()
    other.load_state_dict(theirs.state_dict())
    ours.count(is_finite=True)
    assert other.state_dict() == ours.state_dict()
    assert other.get_scale() == 512.0


def test_a_scale_never_grows_to_infinity() -> None:
    scaler = GradScaler(init_scale=2.0**127, growth_interval=1)
    scaler.count(is_finite=True)
    assert scaler.get_scale() == 2.0**127


def test_one_that_is_off_scales_by_one_and_has_no_state() -> None:
    scaler = GradScaler(enabled=False)
    scaler.count(is_finite=False)
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert torch.equal(scaler.scale(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"init_scale": 0.0}, "init_scale must be above 0: 0.0"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1: 1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor must be between 0 and 1: 1.0"),
        ({"growth_interval": 0}, "growth_interval must be at least 1: 0"),
    ],
)
def test_factors_that_do_not_move_the_scale_are_refused(wrong, text) -> None:
    with pytest.raises(ConfigError, match=text):
        GradScaler(**wrong)


def test_what_is_called_in_the_wrong_place_says_where_it_belongs() -> None:
    scaler = GradScaler()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for use in (lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer)):
        with pytest.raises(ConfigError, match=r"no gradients here(.|\n)*hint: model\.step"):
            use()
    with pytest.raises(ConfigError, match="no step was made"):
        scaler.update()
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0


def test_factors_are_asked_for_and_set_as_in_torch() -> None:
    scaler = GradScaler(**GROWING)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(1)
    assert scaler.get_growth_factor(up_to_date=True) == scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor(up_to_date=True) == 0.5
    assert scaler.get_growth_interval(up_to_date=True) == 1
    torch_step(scaler, is_finite=True)
    assert scaler.get_scale() == 3072.0
