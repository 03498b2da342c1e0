"""The first four layers of a real model on real text: losses of two steps equal plain PyTorch's.

LoRA to the bit; full fine-tuning to 1e-5, as the two uses of the tied embedding add up in another
order. The whole model for ten steps is in tests/accept.
"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def four_layers(smollm2):
    """The model and batches of three steps, made once."""
    smollm2.skip_if_absent()
    model, tokenizer = smollm2.first_layers(4)
    return model, smollm2.batches(tokenizer, steps=3, max_length=16)


@pytest.fixture(scope="module")
def plain_lora(smollm2, four_layers):
    model, steps = four_layers
    return smollm2.plain_losses(smollm2.LORA, model, steps[:2])


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_lora_on_gsm8k_equals_plain_pytorch_and_peft(smollm2, four_layers, plain_lora, num_devices):
    model, steps = four_layers
    assert smollm2.losses_on(num_devices, smollm2.LORA, model, steps[:2]) == plain_lora


def test_full_fine_tuning_with_clipping_equals_plain_pytorch(smollm2, four_layers):
    model, steps = four_layers
    expected = smollm2.plain_losses(smollm2.FULL, model, steps[:2])
    found = smollm2.losses_on(2, smollm2.FULL, model, steps[:2])
    assert smollm2.largest_difference(found, expected) <= 1e-5


def test_a_step_late_equals_the_delayed_recurrence(smollm2, four_layers):
    model, steps = four_layers
    expected = smollm2.plain_losses(smollm2.LATE_LORA, model, steps)
    assert smollm2.losses_on(2, smollm2.LATE_LORA, model, steps) == expected
