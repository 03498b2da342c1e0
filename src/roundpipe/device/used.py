"""How much of a device's memory a run has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.device.api import Device


def peak_used_bytes(device: Device) -> int:
    """The most bytes that were in use at once: of a card all that torch had, activations too."""
    if device.torch_device.type == "cuda":
        from roundpipe.device.cuda import peak_bytes_of  # noqa: PLC0415 (only where there is one)

        return max(peak_bytes_of(device.torch_device), device.peak_bytes)
    return device.peak_bytes
