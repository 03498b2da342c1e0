"""Samples per optimizer step, from the three numbers in which other trainers give them.

Where only the accumulation is given, the samples per device are what they are without a word where
the config comes from: 1 in axolotl, 8 in transformers and all that is made on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.finetune.settings.account import Account

BATCH = {"per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size"}
_OF_AXOLOTL, _OF_TRANSFORMERS = 1, 8  # samples per device where nothing is said
_TIMES = "\N{MULTIPLICATION SIGN}"


def derive_batch(
    values: dict[str, Any], account: Account, count_devices: Callable[[Any], int]
) -> None:
    """Put samples per optimizer step for samples per device, accumulation and devices."""
    accumulation = values.pop("gradient_accumulation_steps", None)
    per_device = values.pop("per_device_train_batch_size", None)
    if per_device is None and accumulation is not None and "batch_size" not in values:
        per_device = values.pop("micro_batch_size", None)  # what axolotl calls the same number
        account.sets("micro_batch_size", ["batch_size"])
    if per_device is None and accumulation is None:
        return
    if values.get("batch_size") is not None:
        raise ConfigError(
            f"batch_size: {values['batch_size']} stands beside "
            f"{'per_device_train_batch_size' if per_device else 'gradient_accumulation_steps'}"
            "\nhint: batch_size alone says how many samples an optimizer step takes"
        )
    usual = _OF_AXOLOTL if account.has("base_model", "sequence_len") else _OF_TRANSFORMERS
    given = ((per_device, usual), (accumulation, 1))
    numbers = [default if number is None else _whole(number) for number, default in given]
    if any(number < 1 for number in numbers):
        raise ConfigError(
            f"not a batch: {text_of(per_device)} per device, {text_of(accumulation)} accumulated"
            "\nhint: batch_size=16"
        )
    num_devices = count_devices(values.get("devices") or "auto")
    values["batch_size"] = numbers[0] * numbers[1] * num_devices
    factors = f" {_TIMES} ".join(str(number) for number in (*numbers, num_devices))
    account.sets("per_device_train_batch_size", ["batch_size"])
    account.sets("gradient_accumulation_steps", ["batch_size"])
    account.say(f"batch_size: {values['batch_size']} ({factors} devices)")


def _whole(number: Any) -> int:
    """A count as given, in digits too; 0 for what is none."""
    if isinstance(number, str) and number.strip().isdecimal():
        return int(number)
    if isinstance(number, float) and number == int(number):
        return int(number)
    return number if isinstance(number, int) and not isinstance(number, bool) else 0
