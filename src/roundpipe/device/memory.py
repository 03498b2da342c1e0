"""What a device whose memory is the host's gives out: aligned, counted, limited, poisoned.

Poison is the byte 0xFF: every float dtype reads it as NaN, so a value that was used after its
buffer went back (or before it was filled) spoils a loss instead of looking plausible.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256
_POISON = 0xFF


def poison_(buffer: Tensor) -> None:
    """Fill a contiguous tensor of any dtype with the byte 0xFF."""
    with torch.no_grad():
        buffer.detach().view(-1).view(torch.uint8).fill_(_POISON)


class Accounts:
    """How many bytes of one device are given out. Used from any thread.

    A buffer is known by the address of its storage, which stays while anyone can see the buffer.
    """

    def __init__(self, device: str, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.capacity_bytes = capacity_bytes
        self._device = device
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> None:
        """Count ``num_bytes`` before they exist; raises torch.OutOfMemoryError over capacity."""
        with self._lock:
            total = self.allocated_bytes + num_bytes
            if self.capacity_bytes is not None and total > self.capacity_bytes:
                raise torch.OutOfMemoryError(
                    f"out of memory on {self._device}: {num_bytes:,} bytes asked for, "
                    f"{self.allocated_bytes:,} of {self.capacity_bytes:,} in use"
                )
            self.allocated_bytes = total
            self.peak_bytes = max(self.peak_bytes, total)

    def unreserve(self, num_bytes: int) -> None:
        """Take back a reservation that came to nothing."""
        with self._lock:
            self.allocated_bytes -= num_bytes

    def enter(self, buffer: Tensor, num_bytes: int | None = None) -> None:
        """Remember a buffer whose bytes are reserved; ``num_bytes`` if not its own size."""
        size = buffer.numel() if num_bytes is None else num_bytes
        with self._lock:
            self._sizes[buffer.untyped_storage().data_ptr()] = size

    def leave(self, buffer: Tensor) -> None:
        """Forget a buffer; raises ValueError if it is not one of ours."""
        with self._lock:
            size = self._sizes.pop(buffer.untyped_storage().data_ptr(), None)
            if size is None:
                raise ValueError(f"not a buffer of {self._device}, or freed already")
            self.allocated_bytes -= size


class HostMemory:
    """``allocate`` and ``free`` of a device that computes on the CPU."""

    def __init__(self, accounts: Accounts, *, poison: bool) -> None:
        self.accounts = accounts
        self._poison = poison

    def allocate(self, num_bytes: int, *, counts_as: int | None = None) -> Tensor:
        """An aligned uint8 tensor; each page is written once, so no step pays for that.

        ``counts_as``: what it takes of the account, if not its own size.
        """
        if num_bytes < 0:
            raise ValueError(f"a buffer cannot have a negative size: {num_bytes}")
        counted = num_bytes if counts_as is None else counts_as
        self.accounts.reserve(counted)
        try:
            whole = torch.empty(num_bytes + ALIGNMENT - 1, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # what the CPU allocator raises; CUDA's is its subclass
            self.accounts.unreserve(counted)
            raise torch.OutOfMemoryError(f"out of host memory: {num_bytes:,} bytes") from error
        skip = -whole.data_ptr() % ALIGNMENT
        buffer = whole[skip : skip + num_bytes]
        buffer.fill_(_POISON if self._poison else 0)
        self.accounts.enter(buffer, counted)
        return buffer

    def free(self, buffer: Tensor) -> None:
        """Take a buffer back; the memory goes when its last view does."""
        self.accounts.leave(buffer)
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        """Poison ``buffer`` if this memory was made to."""
        if self._poison:
            poison_(buffer)
