"""Half a billion parameters in bf16 on two CPU devices: what wrapping costs, what training holds.

    python benchmarks/_half_billion.py [LAYERS]

Prints one line of JSON: seconds and bytes that ``RoundPipe(model)`` takes beside the model that is
there already, and the most that the process has held after three steps of AdamW. 30 layers are half
a billion parameters; the vocabulary is tiny, so that nearly all of them are in the blocks.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe.plan.schedule_memory import schedule_bytes

NUM_DEVICES, NUM_STEPS, NUM_MICROBATCHES = 2, 3, 4
BATCH, LENGTH, VOCABULARY = 4, 32, 2048


def held_bytes(key: str = "VmHWM") -> int:
    """The most that this process has held in memory; VmRSS: that it does."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{key}:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> int:
    """Let the peak begin anew, and return what is held now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return held_bytes("VmRSS")


def a_model(num_layers: int) -> LlamaForCausalLM:
    """A decoder with random bf16 weights: 16.8 million of them in each layer."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    return model.train()


def planned_bytes(pipe: roundpipe.RoundPipe) -> int:
    """What the plan of the last call takes of all devices together."""
    planner, kind = pipe.planner, pipe._chain._kind
    assert kind is not None
    schedule = planner.training(kind, 0).schedule
    turn = schedule.next_start_device - schedule.start_device
    costs = planner.costs
    return NUM_DEVICES * schedule_bytes(costs, schedule.visits, devices=NUM_DEVICES, turn=turn)


def main() -> None:
    """Run it and print."""
    num_layers = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    torch.set_num_threads(1)
    with roundpipe.RoundPipe(a_model(1), devices="cpu"):  # what is imported late is there now
        pass
    imported = held_bytes("VmRSS")
    model = a_model(num_layers)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    before = forget_peak()
    begin, used = time.perf_counter(), time.process_time()
    pipe = roundpipe.RoundPipe(model, devices=["cpu"] * NUM_DEVICES)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    grown, kept = held_bytes() - before, held_bytes("VmRSS") - before
    adamw = roundpipe.optim.AdamW(pipe.optim_parameters(), lr=1e-5)
    losses, lasted, planned = [], [], 0
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        begin = time.perf_counter()
        loss = pipe.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids},
            run_config=roundpipe.RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES),
        )
        planned = max(planned, planned_bytes(pipe))
        pipe.step(adamw)
        pipe.synchronize()
        losses.append(loss.item())
        lasted.append(time.perf_counter() - begin)
    pipe.close()
    found = {
        "parameters": num_parameters,
        "imported": imported,
        "wrap_seconds": seconds,
        "wrap_cpu_seconds": used,
        "wrap_peak": grown,
        "wrap_kept": kept,
        "device_bytes": planned,
        "peak": held_bytes(),
        "losses": losses,
        "step_seconds": lasted,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
