"""Models wrapped by peft: every gradient is plain peft's, and what is saved is peft's to load."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe

# Of peft, where weights are tied.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOKENS = [9, 14, 5, 7]


def mixture():
    """A tiny Qwen3 of four stacked experts in each layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(config).train()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2)).train()


# What is asked of peft, and of which model (a plain Llama, one with tied embeddings, one with
# biases, a mixture of experts, GPT-2); with `also` a second adapter, which is the one trained.
CASES = {
    "DoRA": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "saved embeddings, tied": (
        "tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "embeddings": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "stacked experts": (
        "mixture",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "the second of two": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "also": True},
    ),
    "every bias": ("biased", {"target_modules": ["q_proj"], "bias": "all"}),
}
RARER = {
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "rank-stabilised": ("llama", {"target_modules": ["q_proj"], "use_rslora": True}),
    "own biases": ("biased", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "biases of adapters": ("biased", {"target_modules": ["q_proj"], "lora_bias": True}),
    "DoRA on embeddings": (
        "llama",
        {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    ),
    "embeddings and head, tied": (
        "tied",
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "a saved head that was tied": (
        "tied",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "saved and tied again": (
        "tied",
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "saved norms": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "single tokens": ("tied", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]}),
    "layers twice": (
        "llama",
        {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]},
    ),
    "a router": ("mixture", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
    "one stack only": (
        "mixture",
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "positions": ("gpt2", {"target_modules": ["c_attn", "wpe"], "fan_in_fan_out": True}),
}
ROUNDED = {"stacked experts", "one stack only", "saved and tied again"}  # see close_to below
EVERY = [*CASES, *(pytest.param(name, marks=pytest.mark.accept) for name in RARER)]


@pytest.fixture
def bare(tiny_llama):
    """``bare(kind)``: a tiny model of that kind, the same each time."""
    kinds = {
        "llama": lambda: tiny_llama(layers=2),
        "tied": lambda: tiny_llama(layers=2, tied=True),
        "biased": lambda: tiny_llama(layers=2, attention_bias=True),
        "mixture": mixture,
        "gpt2": gpt2,
    }
    return lambda kind: kinds[kind]()


@pytest.fixture
def adapted(bare):
    """``adapted(case)``: the model with its adapters, none of them zero, the same each time."""
    from peft import LoraConfig, get_peft_model

    def make(case):
        kind, settings = (CASES | RARER)[case]
        settings = dict(settings)
        is_second = settings.pop("also", False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            lora = LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
            model = get_peft_model(bare(kind), lora, autocast_adapter_dtype=False)
            if is_second:
                model.add_adapter("second", LoraConfig(r=2, task_type="CAUSAL_LM", **settings))
                model.set_adapter("second")
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:
                    nn.init.normal_(parameter, std=0.1)
        return model.train()

    return make


@pytest.mark.parametrize("case", EVERY)
def test_every_gradient_is_that_of_plain_peft(
    case, adapted, batches, plain, wrap, train_lm, same_bits, close_to
):
    """To 1e-6 where a sum runs in another order: tied weights, all experts in one product."""
    batch = batches.sequences(TOKENS)
    reference = plain(adapted(case))
    expected = reference.forward_backward(batch, 4)
    gradients = reference.gradients()
    for num_devices in (1, 3):
        wrapped = wrap(adapted(case), num_devices)

        found = train_lm(wrapped, batch, 4)

        assert found.item() == pytest.approx(expected.item(), rel=1e-6 if case in ROUNDED else 0)
        if case in ROUNDED:
            close_to(wrapped.gradients(), gradients, 2e-6)
        else:
            same_bits(wrapped.gradients(), gradients)
        wrapped.close()


@pytest.mark.parametrize("case", EVERY)
def test_what_was_trained_loads_in_plain_peft_and_can_be_merged(
    case, bare, adapted, batches, wrap, train_lm, tmp_path, monkeypatch
):
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for merging's bar
    from peft import PeftModel

    from roundpipe.finetune.model.from_transformers import quiet_transformers

    batch = batches.sequences(TOKENS)
    model = adapted(case)
    wrapped = wrap(model, 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    for _ in range(2):
        train_lm(wrapped, batch, 4)
        wrapped.step(adamw)
    asked = {key: batch[key] for key in ("input_ids", "attention_mask")}
    wrapped.eval()
    with torch.no_grad():
        expected = wrapped(**asked).logits
    wrapped.save_pretrained(tmp_path)
    wrapped.close()

    place = tmp_path / "second" if (tmp_path / "second").exists() else tmp_path
    with quiet_transformers():
        again = PeftModel.from_pretrained(bare((CASES | RARER)[case][0]), place).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**asked).logits, expected, rtol=1e-5, atol=1e-6)
        if "embeddings" not in case and case != "layers twice":  # merged they are in the head too
            merged = model.eval().merge_and_unload()
            torch.testing.assert_close(merged(**asked).logits, expected, rtol=1e-5, atol=1e-5)


def test_switching_adapters_off_after_wrapping_is_refused_with_the_way_out(
    adapted, batches, wrap, train_lm
):
    batch = batches.sequences(TOKENS)
    model = adapted("DoRA")
    wrapped = wrap(model, 2)
    before = train_lm(wrapped, batch, 4)

    with model.disable_adapter(), pytest.raises(roundpipe.errors.ModelError, match="hint: close"):
        wrapped(**batch)

    wrapped.zero_grad()
    assert torch.equal(train_lm(wrapped, batch, 4), before)
