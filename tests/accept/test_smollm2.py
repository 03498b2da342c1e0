"""SmolLM2-135M on GSM8K for ten steps: losses equal plain PyTorch's, on any number of devices.

Batches of 8 in 8 microbatches, fp32, one thread for each device. Prints the figures that belong in
docs/acceptance.md.
"""

from __future__ import annotations

import time

import pytest
import torch

pytestmark = [
    pytest.mark.accept,
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]

STEPS = 10
DEVICES = (1, 2, 3)


@pytest.fixture(scope="module")
def whole(smollm2):
    """The model and ten batches of the shortest questions with their answers."""
    smollm2.skip_if_absent()
    model, tokenizer = smollm2.whole_model()
    return model, smollm2.batches(tokenizer, steps=STEPS, max_length=64)


@pytest.mark.parametrize("name", ["LORA", "FULL", "LATE_FULL"])
def test_ten_steps_equal_plain_pytorch_and_devices_agree_bit_for_bit(smollm2, whole, name):
    case = getattr(smollm2, name)
    model, steps = whole
    since = time.monotonic()
    expected = smollm2.plain_losses(case, model, steps)
    times = [time.monotonic() - since]
    found = []
    for num_devices in DEVICES:
        since = time.monotonic()
        found.append(smollm2.losses_on(num_devices, case, model, steps))
        times.append(time.monotonic() - since)
    difference = max(smollm2.largest_difference(losses, expected) for losses in found)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in steps)
    print(  # noqa: T201 - the figures
        f"\n{name}: {STEPS} steps, {tokens} tokens, loss {expected[0]:.4f} to {expected[-1]:.4f}; "
        f"largest relative difference from plain {difference:.1e}; "
        f"{' = '.join(map(str, DEVICES))} devices: {found.count(found[0]) == len(found)}; "
        f"seconds plain {times[0]:.0f}, "
        + ", ".join(f"{n}: {t:.0f}" for n, t in zip(DEVICES, times[1:], strict=True))
    )
    assert difference <= 1e-5
    assert found.count(found[0]) == len(found)
    assert sum(expected[-3:]) < sum(expected[:3])  # it does learn


def test_the_layers_that_the_suite_reads_from_the_file_are_the_models(smollm2, whole):
    model, _ = whole
    first, tokenizer = smollm2.first_layers(4)
    ours, theirs = first.state_dict(), model.state_dict()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different
    text = "Nora had 31 stickers, and gave 9 away.\nHow many are left?"
    _, whole_tokenizer = smollm2.whole_model()
    assert tokenizer(text).input_ids == whole_tokenizer(text).input_ids
