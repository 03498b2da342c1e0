"""Real models' last layers: the loss in chunks of tokens equals that of all logits at once."""

from __future__ import annotations

import logging
from types import MethodType

import pytest
import torch
from torch import nn

from roundpipe.models import causal_layers, chunked_loss
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.lazy_logits import ChunkedHead, LazyLogits
from roundpipe.models.spec import Inputs

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.7},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi3": {},
    "phi": {},  # a bias at the head
    "olmo2": {},
    "falcon_h1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4},
}
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def inputs_of(length=13, **more):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 96, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100  # a whole chunk, and more
    return {"input_ids": ids, "labels": labels, **more}


def run(spec, kwargs, *, rows, seed=0):
    """The last layer's loss, and the gradients of what it reads and of its parameters."""
    suffix = spec.layers[-1]
    shell = suffix.make_shell(CPU, rows=rows)
    shell.bind(suffix.tensors)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*kwargs["input_ids"].shape, 32, generator=generator).to(
        next(iter(suffix.tensors.values())).dtype
    )
    hidden.requires_grad_()
    output = shell(hidden, Inputs((), kwargs, wants_logits=rows is None), None)
    output.loss.backward()
    gradients = {name: leaf.grad for name, leaf in shell.parameters.items() if leaf.requires_grad}
    return output, {"hidden": hidden.grad, **gradients}


def assert_equal(spec, kwargs, tolerance=1e-6):
    plain, wanted = run(spec, kwargs, rows=None)
    ours, found = run(spec, kwargs, rows=4)
    assert ours.logits is None
    torch.testing.assert_close(ours.loss, plain.loss, rtol=tolerance, atol=0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert found[name].dtype == gradient.dtype
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= tolerance, f"{name}: {error:.1e}"


def make(tiny, kind):
    return tiny.make(kind.split()[0], **{"num_hidden_layers": 2, **KINDS[kind]})


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_those_of_all_logits(kind, tiny):
    spec = causal_lm_spec(make(tiny, kind))
    assert spec.layers[-1].in_chunks
    for more in ({}, {"num_items_in_batch": 31}):
        assert_equal(spec, inputs_of(**more))


def lora(model, **settings):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, **settings}))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at first
            parameter.data.normal_(std=0.1, generator=generator)
    return wrapped


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"]},  # nothing at the head is trained
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["frozen", "adapter", "saved"],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_with_adapters_too(kind, settings, tiny):
    more = EXPERTS if kind == "qwen3_moe" else {}
    model = lora(tiny.make(kind, num_hidden_layers=2, **more), **settings)
    spec = causal_lm_spec(model)
    assert spec.layers[-1].in_chunks
    assert_equal(spec, inputs_of(), tolerance=2e-6)


def test_in_bfloat16_weights_get_fp32_gradients(tiny):
    spec = causal_lm_spec(tiny.make("llama", num_hidden_layers=2).bfloat16())
    _, found = run(spec, inputs_of(), rows=4)
    assert found["lm_head.weight"].dtype == torch.float32
    assert_equal(spec, inputs_of(), tolerance=0.01)


def test_few_logits_are_made_at_once_with_the_bits_of_the_plain_model(tiny):
    spec = causal_lm_spec(tiny.make("llama", num_hidden_layers=2))
    suffix = spec.layers[-1]
    shell = suffix.make_shell(CPU)
    shell.bind(suffix.tensors)
    inputs = Inputs((), inputs_of(), wants_logits=False)
    assert shell(torch.randn(2, 13, 32), inputs, None).logits is not None


@pytest.mark.parametrize("without", ["wants_logits", "labels"])
def test_logits_that_somebody_wants_are_there(without, tiny, monkeypatch):
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 0)
    spec = causal_lm_spec(tiny.make("llama", num_hidden_layers=2))
    suffix = spec.layers[-1]
    shell = suffix.make_shell(CPU)
    shell.bind(suffix.tensors)
    kwargs = inputs_of()
    if without == "labels":
        del kwargs["labels"]
    hidden = torch.randn(2, 13, 32)
    wanted = shell(hidden, Inputs((), kwargs, wants_logits=without == "wants_logits"), None)
    assert wanted.logits.shape == (2, 13, 96)
    if without == "wants_logits":
        assert shell(hidden, Inputs((), kwargs, wants_logits=False), None).logits is None


def test_a_head_with_a_forward_of_its_own_keeps_it(tiny):
    """As a 4-bit head has in a shell."""
    model = tiny.make("llama", num_hidden_layers=2)
    head = model.lm_head
    head.forward = lambda hidden: nn.functional.linear(hidden * 0.5, head.weight)
    with ChunkedHead(head):
        assert isinstance(head(torch.randn(1, 3, 32)), LazyLogits)
    hidden = torch.randn(3, 32)
    assert torch.equal(head(hidden), nn.functional.linear(hidden * 0.5, head.weight))


@pytest.mark.parametrize("trained", [True, False])
def test_a_4_bit_head_is_run_by_chunks_too(trained, tiny):
    import bitsandbytes

    model = tiny.make("llama", hidden_size=64, num_hidden_layers=2)
    model.requires_grad_(trained)
    plain = model.lm_head
    model.lm_head = bitsandbytes.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float32)
    model.lm_head.load_state_dict(plain.state_dict())
    model.lm_head.to("cpu").requires_grad_(False)
    spec = causal_lm_spec(model)
    assert spec.layers[-1].in_chunks


def reading_logits_twice(self, **kwargs):
    output = type(self).forward(self, **kwargs)
    if output.loss is not None:
        output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
    return output


class Neighbours(nn.Module):
    """A head that looks at the token before."""

    def __init__(self, head):
        super().__init__()
        self.head = head
        self.weight = head.weight

    def forward(self, hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self.head((flat + flat.roll(1, 0)).view_as(hidden))


def test_a_loss_that_reads_logits_twice_is_made_with_all_of_them_and_says_so(tiny, caplog):
    model = tiny.make("llama", num_hidden_layers=2)
    model.forward = MethodType(reading_logits_twice, model)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        spec = causal_lm_spec(model)
    assert not spec.layers[-1].in_chunks
    (message,) = [r.getMessage() for r in caplog.records]
    assert "LlamaForCausalLM is made with all logits at once" in message
    assert "logsumexp" in message
    output, _ = run(spec, inputs_of(), rows=None)
    assert output.logits is not None


def test_a_head_that_mixes_tokens_is_found_out_when_the_model_is_wrapped(tiny, caplog):
    model = tiny.make("llama", num_hidden_layers=2)
    model.lm_head = Neighbours(model.lm_head)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        spec = causal_lm_spec(model)
    assert not spec.layers[-1].in_chunks
    assert "made in chunks of tokens it differs by" in caplog.text


def test_what_shows_only_in_training_falls_back_once_it_shows(tiny, caplog, monkeypatch):
    monkeypatch.setattr(chunked_loss, "WHOLE_BYTES", 0)
    model = tiny.make("llama", num_hidden_layers=2).eval()
    own = type(model).forward

    def forward(self, **kwargs):
        output = own(self, **kwargs)
        if self.training:
            output.loss = output.loss + output.logits.float().mean()
        return output

    model.forward = MethodType(forward, model)
    spec = causal_lm_spec(model)
    suffix = spec.layers[-1]
    assert suffix.in_chunks
    model.train()
    shell = suffix.make_shell(CPU)
    shell.bind(suffix.tensors)
    hidden, inputs = torch.randn(2, 13, 32), Inputs((), inputs_of(), wants_logits=False)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        losses = [shell(hidden, inputs, None).loss for _ in range(2)]
    assert torch.equal(*losses)
    assert caplog.text.count("mean") == 1
    assert shell.work_bytes == 0


def test_a_model_without_a_known_head_is_made_whole(tiny, caplog):
    model = tiny.make("llama", num_hidden_layers=2)
    model.get_output_embeddings = lambda: None
    assert causal_layers.head_of(model) is None
    with caplog.at_level(logging.WARNING, "roundpipe"):
        assert not causal_lm_spec(model).layers[-1].in_chunks
    assert "its head is not known" in caplog.text
