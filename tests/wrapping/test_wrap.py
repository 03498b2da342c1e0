"""What `wrap_model_to_roundpipe` makes of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.errors import ConfigError, ModelError
from roundpipe.models import choose


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("preset", [None, True])
def test_a_causal_lm_becomes_one_chain(preset, wrap, llama):
    ours = wrap(llama, use_sequential_preset=preset)
    assert isinstance(ours, roundpipe.RoundPipe)
    assert len(ours._layers) == 4
    assert ours.config is llama.config


def test_a_sequential_becomes_a_chain_of_its_children(wrap):
    ours = wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert isinstance(ours, roundpipe.RoundPipe)
    assert len(ours._layers) == 3


def test_a_model_of_large_parameters_of_its_own_is_one_layer(wrap):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(64, 64))
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return self.inner(x @ self.weight)

    assert isinstance(wrap(Wide()), roundpipe.RoundPipe)
    assert isinstance(wrap(Wide(), lower_threshold=1 << 20), roundpipe.AutoRoundPipe)
    small = wrap(Wide(), lower_threshold=1 << 20, upper_threshold=1 << 20)
    assert isinstance(small, roundpipe.RoundPipe)


def test_a_causal_lm_that_is_no_chain_is_wrapped_part_by_part(wrap, llama, monkeypatch, caplog):
    def refuse(*_):
        raise ModelError("blocks are called backwards\nhint: no way out")

    ids = torch.randint(0, 64, (4, 7))
    labels = ids.clone()
    labels[0, 3:] = -100
    batch = {"input_ids": ids, "labels": labels}
    expected = llama(**batch, use_cache=False)
    expected.loss.backward()
    gradients = {n: p.grad.clone() for n, p in llama.named_parameters()}
    llama.zero_grad()
    monkeypatch.setattr("roundpipe.models.causal_lm.causal_lm_spec", refuse)
    with pytest.raises(ModelError, match="backwards"):
        wrap(llama, use_sequential_preset=True)
    ours = wrap(llama)
    assert "blocks are called backwards" in caplog.text
    assert "model.layers.1" in ours.parts
    out = ours(**batch)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=0)
    out.loss.backward()
    for name, gradient in ours.gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-6)


def test_no_other_model_is_split_by_structure(wrap, mlp):
    with pytest.raises(ModelError, match="use_sequential_preset=None"):
        wrap(mlp(), use_sequential_preset=True)
    with pytest.raises(NotImplementedError):  # what scripts that try it first expect
        wrap(mlp(), use_sequential_preset=True)


def test_skipped_modules_run_on_the_host(wrap, mlp):
    model = mlp()
    assert wrap_nothing(model) is model
    ours = wrap(model, skip_modules=[model.two])
    assert list(ours.parts) == ["one", "three"]
    ours(torch.randn(4, 6)).sum().backward()
    assert ours.gradients().keys() == dict(model.named_parameters()).keys()


def wrap_nothing(model):
    return roundpipe.wrap_model_to_roundpipe(model, skip_modules=[model])


def test_an_override_says_how_a_part_runs_and_not_how_a_batch_is_cut(wrap, mlp):
    model = mlp()
    config = roundpipe.RoundPipeRunConfig(recompute_grain="layer", num_microbatch=1)
    ours = wrap(model, override_config={model.two: config})
    assert ours.parts["two"]._config.recompute_grain == "layer"
    assert ours.parts["two"]._config.num_microbatch is None
    assert ours.parts["one"]._config.recompute_grain is None


def test_settings_of_a_chain_alone_are_refused(wrap, mlp, tmp_path):
    with pytest.raises(ConfigError, match="optim_state_dir"):
        wrap(mlp(), optim_state_dir=tmp_path)
    with pytest.raises(ConfigError, match="eager"):
        wrap(mlp(), commit="eager")


def test_a_part_that_cannot_run_is_named_with_the_way_out(wrap, mlp):
    class Peering(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.peers[0](x)

    model = mlp()
    model.three = Peering(16, 2)
    model.four = nn.Linear(16, 2)
    model.three.peers = [model.four]
    with pytest.raises(ModelError, match=r"three: it reaches[\s\S]*skip_modules="):
        wrap(model)
    x = torch.randn(4, 6)
    expected = model(x)
    ours = wrap(model, skip_modules=[model.three])
    torch.testing.assert_close(ours(x), expected, rtol=1e-6, atol=1e-6)
    ours(x).sum().backward()
    assert ours.gradients().keys() == dict(model.named_parameters()).keys()


def test_a_lazy_module_is_refused(wrap, mlp):
    model = mlp()
    model.two = nn.Sequential(nn.LazyLinear(16))
    with pytest.raises(ModelError, match="run it once before wrapping"):
        wrap(model)


def test_a_model_without_parameters_has_nothing_to_wrap(wrap):
    with pytest.raises(ModelError, match="nothing to run"):
        wrap(nn.ReLU())


def test_an_encoder_with_a_decoder_is_no_causal_lm(tiny_t5, tiny_bart, llama):
    assert choose.is_causal_lm(llama)
    assert not choose.is_causal_lm(tiny_t5())
    assert not choose.is_causal_lm(tiny_bart())
