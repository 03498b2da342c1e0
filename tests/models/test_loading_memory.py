"""Loading holds the model once: measured in a process of its own, on files of some 400 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_LIMITS = {  # times the bytes of the loaded model, and how many bytes more
    "bf16": (1.15, 40e6),
    "cast to bf16": (1.15, 60e6),  # pieces of 16 MB, read and cast
    "experts": (1.15, 40e6),
}
_CHILD = """
import gc, json, pathlib, re, sys
import torch, transformers
from roundpipe.models.loading.load import open_causal_lm

folder = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)

def status(key):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{key}:\\s+(\\d+)", text)[1]) * 1024

def write(name, config, dtype):
    # Files of zeros that take no room on the disk: a header, and a hole.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    place = folder / name
    place.mkdir()
    config.save_pretrained(place)
    word = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    header, end = {}, 0
    def add(key, shape):
        nonlocal end
        size = torch.Size(shape).numel() * dtype.itemsize
        header[key] = {"dtype": word, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    for key, tensor in model.state_dict().items():
        if "experts" in key:  # as files have them: one by one
            stem, experts = key.rpartition(".")[0], tensor.shape[0]
            parts = ["gate_proj", "up_proj"] if "gate_up" in key else ["down_proj"]
            for e in range(experts):
                for part in parts:
                    rows = tensor.shape[1] // len(parts)
                    add(f"{stem}.{e}.{part}.weight", (rows, tensor.shape[2]))
        else:
            add(key, tensor.shape)
    text = json.dumps(header).encode()
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return place

def measured(load):
    gc.collect()
    before = status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    loaded = load()
    found = {"peak": status("VmHWM") - before, "kept": status("VmRSS") - before}
    found["bytes"] = sum(base.segment.layout.num_bytes for base in loaded.bases)
    found["largest"] = max(base.segment.layout.num_bytes for base in loaded.bases)
    return found

sizes = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=8,
             num_key_value_heads=8, vocab_size=12000, tie_word_embeddings=False)
def llama(layers):
    return transformers.LlamaConfig(**sizes, num_hidden_layers=layers)
moe = transformers.Qwen3MoeConfig(**sizes, num_hidden_layers=4, num_experts=16,
                                  num_experts_per_tok=2, moe_intermediate_size=768)
tiny = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=4,
                                num_hidden_layers=1, vocab_size=64)
warm = write("warm", tiny, torch.bfloat16)
for quantization in (None, "nf4"):
    open_causal_lm(warm, quantization=quantization).load()
open_causal_lm(write("warm_moe", transformers.Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=1, num_experts=2, moe_intermediate_size=32,
    intermediate_size=64, vocab_size=64, num_attention_heads=4), torch.bfloat16)).load()

results = {}
big, small = write("big", llama(11), torch.bfloat16), write("small", llama(3), torch.bfloat16)
wide, experts = write("wide", llama(3), torch.float32), write("experts", moe, torch.bfloat16)
results["bf16"] = measured(lambda: open_causal_lm(big).load())
results["cast to bf16"] = measured(lambda: open_causal_lm(wide, dtype="bfloat16").load())
results["experts"] = measured(lambda: open_causal_lm(experts).load())
results["nf4"] = measured(lambda: open_causal_lm(small, quantization="nf4").load())
cache = folder / "cache"
for name in ("written", "mapped"):
    results[name] = measured(lambda: open_causal_lm(small).load_mapped(cache_folder=cache))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Bytes at the peak, kept, and of the model, by what was loaded."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process can be measured on Linux only")
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-c", _CHILD, str(folder)]
    # So that glibc gives back at once what is freed, and does not keep up to 32 MB a piece.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", _LIMITS)
def test_loading_takes_the_memory_of_the_model_once(measured, case):
    found, (factor, more) = measured[case], _LIMITS[case]
    assert found["bytes"] > 1e8
    assert 0.95 * found["bytes"] < found["peak"] < factor * found["bytes"] + more, found


@pytest.mark.slow
def test_mapped_weights_take_a_layer_while_they_are_written_and_nothing_afterwards(measured):
    assert measured["written"]["peak"] < 1.2 * measured["written"]["largest"] + 40e6, measured
    assert measured["mapped"]["peak"] < 5e6, measured
    assert measured["mapped"]["bytes"] > 1.4e8


@pytest.mark.slow
def test_packing_takes_the_packed_model_and_no_more_than_a_layer(measured):
    found = measured["nf4"]
    assert found["bytes"] < 0.9e8  # in 16 bits 150 MB
    assert found["peak"] < 1.05 * found["bytes"] + 34e6 + 40e6, found
