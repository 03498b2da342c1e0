"""What the engine needs of a device: streams, events, memory.

Streams are named (``"compute"``, ``"weights"``, ...) and made on first use. Work launched on one
stream runs in order; between streams only events order anything. Four rules hold for every kind:

1. ``launch``, ``record`` and ``wait`` return at once (``fake`` and ``cuda`` run the Python of
   ``work`` before they return; what it computes may still be under way on ``cuda``).
2. An exception out of ``work`` goes to ``on_error``, never into the stream: later work on it runs.
   It is handed over before the work counts as complete, so whoever waited for the work can see it.
   Without an ``on_error`` the device keeps the first one and raises it from ``close``.
3. ``work`` brings its own grad mode, autocast and context variables: it may run in a thread that
   has none of the caller's.
4. A device does not touch ``work`` once it has run: what the closure kept alive is let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch
    from torch import Tensor


class Event(Protocol):
    """A point in one stream; complete once everything before it on that stream has run."""

    def is_complete(self) -> bool:
        """Whether the point has been passed; never blocks."""
        ...

    def wait(self) -> None:
        """Block the calling host thread until the point has been passed."""
        ...


class Timing(Protocol):
    """When one launched work ran, in seconds of ``time.perf_counter``; NaN until it completed."""

    @property
    def start_seconds(self) -> float:
        """When the work began, after whatever it waited for."""
        ...

    @property
    def end_seconds(self) -> float:
        """When all it put on the stream had run."""
        ...


class Device(Protocol):
    """A worker with streams of its own; one host thread at a time calls for one stream."""

    @property
    def name(self) -> str:
        """As the user wrote it and as messages show it, e.g. ``cuda:0``."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device live."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """What ``allocate`` gave and ``free`` has not taken back."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most that ``allocated_bytes`` has been."""
        ...

    def launch(  # noqa: PLR0913 - one call per action; a dataclass per call would cost more than it says
        self,
        stream: str,
        work: Callable[[], object],
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Hashable] = (),
        timed: bool = False,
        label: object = "",
        on_error: Callable[[BaseException], None] | None = None,
    ) -> Timing | None:
        """Put ``work`` on ``stream``. ``reads`` and ``writes`` name every shared buffer it touches.

        Buffer names are agreed between launches, of this device and of others; only ``fake`` looks
        at them. A write may read too. ``label`` is what messages call the work; ``str`` is taken of
        it only when it is shown. Returns a Timing if ``timed``.
        """
        ...

    def record(self, stream: str) -> Event:
        """An event that completes when everything now on ``stream`` has run."""
        ...

    def wait(self, stream: str, event: Event) -> None:
        """Make later work on ``stream`` wait for ``event``, which may be another device's.

        Blocks the calling thread only where the stream cannot wait by itself (a CUDA stream for
        work of a host thread). ``event.wait()`` in a host thread orders nothing for ``fake``: work
        that relies on another's result says so here.
        """
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """A uint8 tensor of ``num_bytes`` on the device, aligned to at least 256 bytes.

        May block until the memory can be used from any stream. Raises torch.OutOfMemoryError when
        there is no room.
        """
        ...

    def free(self, buffer: Tensor) -> None:
        """Give back what ``allocate`` gave. Its content may be overwritten at once.

        Raises ValueError for a buffer that is not (or no longer) this device's.
        """
        ...

    def poison(self, buffer: Tensor) -> None:
        """Fill ``buffer``, any contiguous piece of memory whose use has ended, with NaN.

        Does nothing unless the device was made to poison. Called inside a ``work`` that writes it.
        """
        ...

    @property
    def pins(self) -> bool:
        """Whether copies gain from page-locked host memory: they then run beside the host thread.

        Only a device that runs ``work`` before ``launch`` returns says so.
        """
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory: whole pages that nothing else shares, for every card.

        Takes about a second for 4 GB. Raises DeviceError, with the driver's word, if it is refused.
        """
        ...

    def unregister(self, address: int) -> None:
        """Undo ``register``, before the memory goes; after ``close`` too. From any thread.

        Nothing may be copying to or from it.
        """
        ...

    def hold(self, stream: str, *tensors: Tensor) -> None:
        """Keep the memory of tensors made on another stream until what ``stream`` has now has run.

        For tensors whose last reference may go while work that was launched with them is under
        way. Free where the launched closure itself keeps them (every kind but ``cuda``).
        """
        ...

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """Say that the buffer called ``key`` is (also) the memory of ``tensor``.

        Only ``fake`` looks. Buffers whose memory overlaps are one buffer where they do.
        """
        ...

    def disown(self, key: Hashable) -> None:
        """Say that the buffer called ``key`` is no more; touching it before ``own`` is an error."""
        ...

    def describe(self) -> Mapping[str, str]:
        """What each stream is doing now, for people: a work's label, what it waits for, or idle."""
        ...

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Run what was launched, end the threads, release the memory. Idempotent.

        Raises the first exception that nobody was told of. A stream that does not end within
        ``timeout_seconds`` is left behind with a warning; it keeps no process alive.
        """
        ...
