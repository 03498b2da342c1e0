"""QLoRA on SmolLM2-135M and GSM8K for ten steps: the losses of bitsandbytes with peft, to 1e-3.

Batches of 8 in 2 microbatches, NF4 with scales quantised once more, products in fp32. Prints the
figures that belong in docs/acceptance.md.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.accept,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

STEPS, RATE = 10, 1e-3


def theirs(folder, start, batches):
    """The losses of an ordinary loop over the model as bitsandbytes packs it."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=in_4_bits, dtype=torch.float32
    )
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)
    _, unexpected = model.load_state_dict(start, strict=False)
    assert unexpected == []
    model.train()  # in evaluation bitsandbytes computes in bf16 where the CPU has that
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ours(folder, batches):
    """The losses of the engine, and the adapter's first values."""
    from roundpipe import RoundPipe
    from roundpipe.config import RoundPipeRunConfig
    from roundpipe.finetune.model.base_model import load_base
    from roundpipe.finetune.model.methods import prepare_method
    from roundpipe.finetune.model.source import locate_model
    from roundpipe.finetune.settings.config import make_config
    from roundpipe.optim import AdamW

    given = {"model": str(folder), "dataset": "none.jsonl", "finetuning_type": "qlora"}
    config = make_config({**given, "lora_r": 8, "dtype": "fp32"})[0]
    source = locate_model(str(folder))
    base = load_base(source, "qlora", dtype=torch.float32)
    assert base.is_packed
    model = prepare_method(base, config, source, say=lambda _: None)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    losses = []
    with RoundPipe(model, devices=["cpu"], bases=base.bases) as trainer:
        optimizer = AdamW(trainer.optim_parameters(), lr=RATE, weight_decay=0.0)
        for batch in batches:
            loss = trainer.forward_backward(
                input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2)
            )
            trainer.step(optimizer)
            losses.append(loss.item())
    return losses, start


def test_ten_steps_are_those_of_bitsandbytes_with_peft(smollm2, tmp_path):
    smollm2.skip_if_absent()
    model, tokenizer = smollm2.whole_model()
    model.save_pretrained(tmp_path / "whole")
    del model
    batches = smollm2.batches(tokenizer, steps=STEPS, max_length=64)
    found, start = ours(tmp_path / "whole", batches)
    expected = theirs(tmp_path / "whole", start, batches)
    worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    print(  # noqa: T201 - the figures
        f"\nQLoRA: {STEPS} steps, loss {expected[0]:.4f} to {expected[-1]:.4f}; "
        f"largest relative difference from bitsandbytes and peft {worst:.1e}"
    )
    assert worst <= 1e-3
    assert sum(expected[-3:]) < sum(expected[:3])
