"""A wrapped model shows what the model is: names, length, attributes; else it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, ModelError


@pytest.fixture
def wrap():
    made = []

    def of(model, **settings):
        made.append(roundpipe.RoundPipe(model, devices="cpu", **settings))
        return made[-1]

    yield of
    for each in made:
        each.close()


class Scaled(nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.gain = gain

    def forward(self, x):
        return self.linear(x) * self.gain


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def test_a_sequential_has_its_length_and_its_layers(wrap):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    wrapped = wrap(model)
    assert len(wrapped) == 2
    assert wrapped[0] is model[0]
    assert list(wrapped) == list(model)
    single = wrap(Scaled())
    assert single  # true, though it has no length
    for use in (lambda: len(single), lambda: single[0], lambda: list(single)):
        with pytest.raises(TypeError, match="the model is no container: Scaled"):
            use()


def test_names_are_the_models_own(wrap):
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(3, track_running_stats=False))
    wrapped = wrap(model)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in model.named_modules()]
    assert dict(wrapped.named_modules())[""] is wrapped
    assert dict(wrapped.named_children()) == dict(model.named_children())
    assert wrapped.get_submodule("0.linear") is model[0].linear
    assert wrapped.get_parameter("0.linear.bias") is model[0].linear.bias
    assert sum(p.numel() for p in wrapped.parameters()) == sum(
        p.numel() for p in model.parameters()
    )
    outer = nn.ModuleDict({"part": wrapped})
    assert wrapped in set(outer.modules())
    assert outer.state_dict().keys() == {f"part.{name}" for name in model.state_dict()}


def test_it_is_described_in_a_line(wrap):
    wrapped = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)))
    assert repr(wrapped) == "RoundPipe(Sequential, 24 parameters, 12 trained)"


def test_an_attribute_written_through_the_wrapper_reaches_the_devices(wrap):
    wrapped = wrap(nn.Sequential(Scaled(), Scaled()))
    single = wrap(Scaled())
    with torch.no_grad():
        before = single(X)
        single.gain = 2.0
        assert torch.equal(single(X), 2 * before)
        assert single.model.gain == 2.0
        del single.gain
        assert not hasattr(single.model, "gain")
        single.gain = 1.0
        assert torch.equal(single(X), before)
    wrapped.note = "kept"
    assert wrapped.model.note == "kept"
    wrapped(X)


def test_one_written_past_the_wrapper_is_noticed(wrap):
    wrapped = wrap(Scaled())
    wrapped.model.gain = 2.0
    for use in (lambda: wrapped(X), lambda: setattr(wrapped, "note", 1)):
        with pytest.raises(ModelError, match=r"attribute changed: Scaled\.gain"):
            use()


def test_what_a_model_is_made_of_cannot_be_replaced(wrap):
    wrapped = wrap(Scaled())
    for name, value in (("linear", nn.Linear(3, 3)), ("linear", None), ("extra", nn.ReLU()),
                        ("model", nn.ReLU()), ("shift", torch.ones(3))):  # fmt: skip
        with pytest.raises(ModelError, match=f"cannot be replaced: {name}"):
            setattr(wrapped, name, value)
    with pytest.raises(ModelError, match="cannot be replaced: linear"):
        del wrapped.linear
    with pytest.raises(AttributeError):
        wrapped.nothing  # noqa: B018
    with pytest.raises(AttributeError):
        del wrapped.nothing


def test_an_original_model_gives_and_takes_attributes(wrap):
    wrapped, original = wrap(nn.Sequential(Scaled())), Scaled(gain=5.0)
    original.config = {"vocab_size": 3}
    wrapped.set_original_model(original)
    assert wrapped.config["vocab_size"] == 3
    assert wrapped.gain == 5.0
    wrapped.gain = 6.0
    assert original.gain == 6.0
    assert [n for n, _ in wrapped.named_parameters()] == ["0.linear.weight", "0.linear.bias"]
    assert wrapped[0].gain == 1.0
    wrapped(X)


def test_a_closed_wrapper_is_only_a_view_of_the_model(wrap):
    wrapped = wrap(Scaled())
    wrapped.close()
    wrapped.gain = 4.0
    assert wrapped.model.gain == 4.0
    with pytest.raises(ConfigError, match="closed"):
        wrapped(X)


def test_initialising_in_place_reaches_the_masters(wrap):
    wrapped = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).bfloat16())
    masters = wrapped.optim_parameters()

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    assert wrapped.apply(init) is wrapped
    assert torch.equal(masters[0], torch.full((3, 3), 0.5))
    assert torch.equal(wrapped.state_dict()["1.weight"], torch.full((3, 3), 0.5).bfloat16())


class Pair:
    def __init__(self, one, two):
        self.one, self.two = one, two


class Splits(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return Pair(out, out)


def test_tensors_in_an_unknown_class_are_refused_rather_than_cut_off(wrap):
    wrapped = wrap(nn.Sequential(Splits(3, 3), nn.Identity()))
    with pytest.raises(roundpipe.StepError, match=r"Splits returns tensors(.|\n)*: Pair\nhint"):
        wrapped(X)
