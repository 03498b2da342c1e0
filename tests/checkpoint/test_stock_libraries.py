"""The top level of a checkpoint opens with stock transformers and peft, and nothing of ours."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe.checkpoint.manifest import check

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
IDS = torch.arange(24).reshape(4, 6) % 17


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def trained(base, monkeypatch):
    """``trained(folder, **how)``: two steps, the second beside the saving of the first."""

    def run(folder, *, load=None, steps=2, **how):
        torch.manual_seed(3)
        with roundpipe.RoundPipe.from_pretrained(base, devices=1, **how) as pipe:
            optimizer = roundpipe.optim.AdamW(pipe.optim_parameters(), lr=1e-2)
            saved = None
            if load is not None:
                pipe.load_checkpoint(load, optimizer)
            for _ in range(steps):
                pipe.forward_backward(input_kwargs={"input_ids": IDS, "labels": IDS})
                pipe.step(optimizer, is_async=True)
                if folder is not None and saved is None:
                    at_save = pipe.trained_state_dict()
                    saved = pipe.save_checkpoint(folder, optimizer, is_async=True)
            if saved is not None:
                saved.wait()
                return at_save, pipe.trained_state_dict()
            return pipe.trained_state_dict()

    return run


def test_a_model_opens_with_stock_transformers(trained, tmp_path, same_bits):
    from transformers import AutoModelForCausalLM

    at_save, at_end = trained(tmp_path / "checkpoint-1")
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "manifest.json"}
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    same_bits({n: t.detach() for n, t in opened.named_parameters()},
              {n: at_save[n] for n, _ in opened.named_parameters()})  # fmt: skip
    same_bits(trained(None, load=tmp_path / "checkpoint-1", steps=1), at_end)


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.accept), "nf4"])
def test_an_adapter_opens_with_stock_peft(quantization, base, trained, tmp_path, same_bits):
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM

    how = {
        "quantization": quantization,
        "peft_config": LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2),
    }
    at_save, at_end = trained(tmp_path / "checkpoint-1", **how)
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "model.safetensors" not in names
    opened = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "checkpoint-1"
    )
    state = opened.state_dict()
    same_bits({name: state[name].to(t.dtype) for name, t in at_save.items()}, at_save)
    same_bits(trained(None, load=tmp_path / "checkpoint-1", steps=1, **how), at_end)
    check(tmp_path / "checkpoint-1")
