"""What users do beside a plain call: an update, 16 bits, adapters, other settings of the model."""

from __future__ import annotations

import copy

import pytest
import torch

import roundpipe

# What transformers and peft warn of themselves.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def first_and_accepted(first, *others):
    """Parameters: the first in every run of the tests, the others with ``accept``."""
    return [first, *(pytest.param(each, marks=pytest.mark.accept) for each in others)]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def made(tiny_models):
    """``made(name)``: the tiny model of a row."""
    _, rows = tiny_models.catalogue()

    def make(name, **more):
        return rows[name], tiny_models.make_model(rows[name], **more)

    return make


def require_equal(comparing, tiny_models, row, model, *, num_devices=2, **more):
    """One training call of a model equals the plain loop, to the bit."""
    with comparing.wrap(model, num_devices) as wrapped:
        plain = comparing.Plain(row, model)
        assert comparing.trained(wrapped, plain, tiny_models.make_batch(), **more) == "bits"


@pytest.mark.parametrize("name", first_and_accepted("qwen3_moe", "mamba2", "deepseek_v3"))
def test_weights_after_two_adamw_steps_are_the_same_bits(
    name, made, comparing, tiny_models, bits_of_torch
):
    row, model = made(name)
    plain = comparing.Plain(row, model)
    adamw = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
    batch = tiny_models.make_batch()
    config = roundpipe.RoundPipeRunConfig(num_microbatch=comparing.NUM_MICROBATCHES)
    with comparing.wrap(model, 2) as wrapped:
        ours = torch.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
        for _ in range(2):
            _, _, gradients = plain.train(batch, {})
            for parameter_name, parameter in plain.model.named_parameters():
                parameter.grad = gradients.get(parameter_name)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            wrapped.forward_backward(input_kwargs=batch, run_config=config)
            wrapped.step(ours)
        state = wrapped.state_dict()
        expected = plain.model.state_dict()
        assert state.keys() == expected.keys()
        assert [n for n in expected if not torch.equal(state[n], expected[n])] == []


@pytest.mark.parametrize("name", first_and_accepted("qwen3", "glm4"))
def test_a_bf16_model_keeps_its_rotary_tables_in_fp32(name, made, comparing, tiny_models):
    _, model = made(name)
    tables = {n: b.clone() for n, b in model.named_buffers() if "inv_freq" in n}
    model = model.to(torch.bfloat16)
    for place, table in tables.items():  # as from_pretrained leaves them
        owner, _, leaf = place.rpartition(".")
        setattr(model.get_submodule(owner), leaf, table)
    assert tables
    assert {b.dtype for n, b in model.named_buffers() if n in tables} == {torch.float32}
    batch = tiny_models.make_batch()
    logits = {name: value for name, value in batch.items() if name != "labels"}
    with comparing.wrap(model, 2) as wrapped, torch.no_grad():
        config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
        assert torch.equal(
            wrapped(**logits, roundpipe_run_config=config).logits, model(**logits).logits
        )
        wrapped.forward_backward(input_kwargs=batch)
        assert {g.dtype for g in wrapped.gradients().values()} == {torch.bfloat16}


TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "qwen3": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "mamba2": ["in_proj"],
    "deepseek_v3": ["q_a_proj", "kv_b_proj", "o_proj"],
    "gemma4_text": ["q_proj", "k_proj", "per_layer_input_gate", "up_proj"],
    "gemma3": "all-linear",
}


def with_lora(model, targets):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at first: half of the gradients would be zero
            parameter.data.normal_(std=0.1, generator=generator)
    return wrapped


@pytest.mark.parametrize("name", first_and_accepted(*TARGETS))
def test_adapters_on_attention_and_mlp_get_the_plain_gradients(name, made, comparing, tiny_models):
    row, model = made(name)
    model = with_lora(model, TARGETS[name])
    with comparing.wrap(model, 2) as wrapped:
        plain = comparing.Plain(row, model)
        plain.quiet = {"use_cache": False}
        assert comparing.trained(wrapped, plain, tiny_models.make_batch()) == "bits"


@pytest.mark.accept
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt2"])
def test_both_ways_of_attention_are_equal(name, attention, made, comparing, tiny_models):
    row, model = made(name)
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    require_equal(comparing, tiny_models, row, model)


@pytest.mark.parametrize("name", first_and_accepted("llama", "gpt2", "mixtral"))
def test_gradient_checkpointing_of_the_model_changes_nothing(name, made, comparing, tiny_models):
    row, model = made(name)
    model.gradient_checkpointing_enable()
    require_equal(comparing, tiny_models, row, model)


@pytest.mark.accept
@pytest.mark.parametrize("name", ["llama", "mamba", "jamba"])
def test_a_cache_that_is_asked_for_changes_nothing_in_training(name, made, comparing, tiny_models):
    row, model = made(name)
    batch = tiny_models.make_batch()
    with comparing.wrap(model, 1) as wrapped:
        config = roundpipe.RoundPipeRunConfig(num_microbatch=comparing.NUM_MICROBATCHES)
        loss = wrapped.forward_backward(
            input_kwargs={**batch, "use_cache": True}, run_config=config
        )
        plain = comparing.Plain(row, model)
        expected, _, gradients = plain.train(batch, {})
        pairs = {n: (wrapped.gradients()[n], g) for n, g in gradients.items()}
        assert comparing.verdict({**pairs, "loss": (loss, expected)}, plain) == "bits"


@pytest.mark.accept
def test_a_tied_head_with_an_adapter_on_the_embedding(made, comparing, tiny_models):
    row, model = made("gemma2")
    model = with_lora(model, ["embed_tokens", "q_proj"])
    require_equal(comparing, tiny_models, row, model)


def test_a_subclass_of_the_users_own(made, comparing, tiny_models):
    from transformers import Qwen3ForCausalLM

    class Mine(Qwen3ForCausalLM):
        def forward(self, *args, temperature=2.0, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / temperature
            return output

    row, model = made("qwen3")
    mine = Mine(model.config).train()
    mine.load_state_dict(model.state_dict())
    with comparing.wrap(mine, 2) as wrapped:
        plain = comparing.Plain(row, mine)
        plain.quiet = {"use_cache": False}
        plain.divides = True
        assert comparing.trained(wrapped, plain, tiny_models.make_batch()) == "bits"


def test_a_hook_of_the_users_own_runs_in_each_layer(made, comparing, tiny_models):
    row, model = made("qwen3")
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _module, _args, output: output * 0.5)
    require_equal(comparing, tiny_models, row, model, num_devices=3)


@pytest.mark.accept  # to compile one takes seconds of imports
def test_a_compiled_model_is_refused_with_the_way_out(made):
    _, model = made("qwen3")
    compiled = torch.compile(copy.deepcopy(model))
    with pytest.raises(roundpipe.RoundPipeError, match=r"torch\.compile(.|\n)*hint: .*_orig_mod"):
        roundpipe.RoundPipe(compiled, devices=["cpu"])
