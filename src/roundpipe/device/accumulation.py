"""Sums of fp16 products in fp16, for as long as a run lasts.

Consumer cards of NVIDIA add products of fp16 up in fp16 at twice the rate of fp32. Torch has one
switch for all of a process; it counts for plain matrix products, not for attention.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roundpipe.device.api import Device

_KEY = "fp16_accumulation"


@contextlib.contextmanager
def fp16_accumulation(devices: Sequence[Device], dtype: torch.dtype) -> Iterator[None]:
    """Have matrix products of fp16 added up in fp16 while the block runs; then as before.

    ``dtype``: what the model computes in. Raises ConfigError, by the key's name, for another dtype
    than fp16, and for devices that have no such sums.
    """
    if dtype != torch.float16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{_KEY} adds up products of fp16, not of {name}\nhint: dtype=fp16")
    for device in devices:
        if device.torch_device.type != "cuda" or torch.version.hip is not None:
            raise ConfigError(
                f"{_KEY} is of NVIDIA's cards, not of {device.name}\nhint: {_KEY}=false"
            )
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    try:
        matmul.allow_fp16_accumulation = True
    except (AttributeError, RuntimeError) as error:  # of a torch that has none
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{_KEY}: torch refuses it: {reason}\nhint: {_KEY}=false") from error
    try:
        yield
    finally:
        matmul.allow_fp16_accumulation = before


def adds_up_in_fp16() -> bool:
    """Whether the process does now."""
    return bool(torch.backends.cuda.matmul.allow_fp16_accumulation)
