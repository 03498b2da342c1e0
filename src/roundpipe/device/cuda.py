"""A CUDA (or ROCm) card: streams are CUDA streams, and ``launch`` runs the Python of a work now.

The only file that touches ``torch.cuda``. Nothing here waits for a whole stream or card while a
step runs: the host waits for single events, and only where it is asked to.

[Note: who owns a tensor]
The caching allocator gives memory back to the stream that was current when it was allocated, the
moment the last reference goes, whatever other streams still do with it. So a tensor belongs to the
stream whose work made it, and three rules follow.

1. A buffer of ``allocate`` belongs to ``compute``. It is ready for every stream when ``allocate``
   returns, and its users are ordered by events, like those of any buffer. ``free`` records every
   stream of the device on it, so its memory goes to nobody before what they have now has run.
2. A tensor made inside a work belongs to that work's stream. Used on another, it must be ``hold``
   there (``record_stream``) before the last reference goes: the closure of a launched work is gone
   when ``launch`` returns, unlike on the CPU device.
3. A tensor and the event behind which it may be read travel together.
"""

# mypy: disallow-untyped-calls=False
# (torch.cuda's own classes have no annotations)
from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roundpipe.device.cuda_times import CudaTiming, Origin
from roundpipe.device.memory import Accounts, poison_
from roundpipe.device.untold import Untold
from roundpipe.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event

logger = logging.getLogger(__name__)

_OWNER = "compute"  # the stream that buffers belong to
# CUDA tells times as float32 milliseconds: good to 4 us a minute from the origin, 0.25 ms an hour.
_ORIGIN_SECONDS = 60.0
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every card


@dataclass(frozen=True)
class CudaState:
    """What torch has to say about cards. ``cards`` are torch's indices in the system's order."""

    torch_version: str
    cuda_version: str | None
    hip_version: str | None
    cards: tuple[int, ...]
    error: str = ""  # why there are none, in torch's words


def cuda_state(*, keep_torch_order: bool = False) -> CudaState:
    """Ask torch which cards it can use; starts its CUDA runtime.

    CUDA counts cards fastest first, the system's tool by their place on the bus. The latter is
    used here, unless ``keep_torch_order`` says that the environment chose an order already.
    """
    cards: tuple[int, ...] = ()
    error = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns about is the error below
            torch.cuda.init()
            cards = tuple(range(torch.cuda.device_count()))
    except (AssertionError, RuntimeError) as failure:
        error = str(failure).strip().splitlines()[0]
    if not keep_torch_order:
        cards = tuple(sorted(cards, key=_place_on_the_bus))
    return CudaState(torch.__version__, torch.version.cuda, torch.version.hip, cards, error)


def _place_on_the_bus(index: int) -> tuple[int, ...]:
    properties = torch.cuda.get_device_properties(index)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")  # absent in older torch
    return (*(int(getattr(properties, name, 0)) for name in names), index)


@dataclass(frozen=True)
class CardFacts:
    """What torch says of one card. ``bus`` is its place on the PCI bus, or "" where unknown."""

    name: str  # as its driver calls it
    total_bytes: int
    free_bytes: int  # now, after this process's context
    bus: str
    multiprocessors: int


def card_facts(device: torch.device) -> CardFacts:
    """Ask the card's driver; makes a context on the card if there is none."""
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    domain, bus, place, _ = _place_on_the_bus(device.index or 0)
    known = hasattr(properties, "pci_bus_id")
    where = f"{domain:04x}:{bus:02x}:{place:02x}.0" if known else ""
    return CardFacts(properties.name, total, free, where, properties.multi_processor_count)


def peak_bytes_of(device: torch.device) -> int:
    """The most that torch's allocator has had in use on a card since the process began."""
    return int(torch.cuda.max_memory_allocated(device))


class CudaEvent:
    """A CUDA event; ``event`` has been recorded."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_complete(self) -> bool:
        """Whether the card has passed it."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block the calling thread, asleep and without the GIL."""
        self.event.synchronize()


class CudaDevice:
    """One card as a device; several may be made for one card and share nothing but it.

    ``index`` is torch's own index. Raises DeviceError, naming the cause, where torch cannot use it.
    """

    def __init__(
        self,
        index: int | str | torch.device = 0,
        name: str | None = None,
        *,
        poison_released: bool = False,
        capacity_bytes: int | None = None,
    ) -> None:
        self._torch_device = torch.device("cuda", index) if isinstance(index, int) else _card(index)
        self._name = name or str(self._torch_device)
        _try(self._name, self._torch_device)
        self._poisons = poison_released
        self._accounts = Accounts(self._name, capacity_bytes)
        self._untold = Untold()
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._labels: dict[str, object] = {}
        self._making = threading.Lock()
        self._closed = self._left_behind = False
        self._origin = self._first_origin()
        self._coming_origin: torch.cuda.Event | None = None

    def __repr__(self) -> str:
        return f"CudaDevice({str(self._torch_device)!r}, {self._name!r})"

    @property
    def name(self) -> str:
        """See Device."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return self._torch_device

    @property
    def allocated_bytes(self) -> int:
        """See Device."""
        return self._accounts.allocated_bytes

    @property
    def peak_bytes(self) -> int:
        """See Device."""
        return self._accounts.peak_bytes

    def launch(  # noqa: PLR0913 - see Device
        self,
        stream: str,
        work: Callable[[], object],
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Hashable] = (),
        timed: bool = False,
        label: object = "",
        on_error: Callable[[BaseException], None] | None = None,
    ) -> CudaTiming | None:
        """See Device. Runs ``work`` now, with ``stream`` and its card current."""
        target = self._stream(stream)
        self._labels[stream] = label
        with torch.cuda.stream(target):
            start = self._timestamp(target) if timed else None
            try:
                work()
            except BaseException as error:
                if on_error is None and not isinstance(error, Exception):
                    raise  # a key was pressed, and nobody else will say so
                self._untold.tell(error, on_error)
            if start is None:
                return None
            return CudaTiming(self._current_origin(target), start, self._timestamp(target))

    def record(self, stream: str) -> CudaEvent:
        """See Device."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream(stream))
        return CudaEvent(event)

    def wait(self, stream: str, event: Event) -> None:
        """See Device. Blocks the caller for an event that is not CUDA's."""
        target = self._stream(stream)
        if isinstance(event, CudaEvent):
            target.wait_event(event.event)
        else:
            event.wait()

    def allocate(self, num_bytes: int) -> Tensor:
        """See Device and [Note: who owns a tensor]. Blocks until every stream may use it."""
        if num_bytes < 0:
            raise ValueError(f"a buffer cannot have a negative size: {num_bytes}")
        owner = self._stream(_OWNER)
        self._accounts.reserve(num_bytes)
        try:
            with torch.cuda.stream(owner):
                # One byte at least: a buffer is known by its address.
                whole = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=self._torch_device)
                buffer = whole[:num_bytes]
                self.poison(buffer)
        except BaseException:
            self._accounts.unreserve(num_bytes)
            raise
        self.record(_OWNER).wait()
        self._accounts.enter(buffer)
        return buffer

    def free(self, buffer: Tensor) -> None:
        """See Device and [Note: who owns a tensor]."""
        self._accounts.leave(buffer)
        if self._poisons:
            owner = self._stream(_OWNER)
            for stream in tuple(self._streams):
                self.wait(_OWNER, self.record(stream))
            with torch.cuda.stream(owner):
                self.poison(buffer)
        for stream in tuple(self._streams):
            self.hold(stream, buffer)

    def poison(self, buffer: Tensor) -> None:
        """See Device."""
        if self._poisons:
            poison_(buffer)

    @property
    def pins(self) -> bool:
        """See Device."""
        return True

    def register(self, address: int, num_bytes: int) -> None:
        """See Device. At exactly this size, for all cards of the process."""
        self._host_call("cudaHostRegister", address, num_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        """See Device. Leaves alone what a copy left behind at `close` may still use."""
        if not self._left_behind:
            self._host_call("cudaHostUnregister", address)

    def _host_call(self, name: str, *arguments: int) -> None:
        """Call CUDA's runtime. What it refuses it also remembers, and the next kernel is blamed.

        So one is launched here to take the blame: torch has no call that forgets. The card is made
        current, or the call would make a context on the first one.
        """
        with torch.cuda.device(self._torch_device):
            runtime = torch.cuda.cudart()
            error = getattr(runtime, name)(*arguments)
            if int(error) == 0:
                return
            with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream()):
                torch.zeros(1, device=self._torch_device)
        raise DeviceError(str(runtime.cudaGetErrorString(error)))

    def hold(self, stream: str, *tensors: Tensor) -> None:
        """See Device and [Note: who owns a tensor]."""
        target = self._stream(stream)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(target)

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """See Device. Nothing is checked here."""

    def disown(self, key: Hashable) -> None:
        """See Device. Nothing is checked here."""

    def describe(self) -> dict[str, str]:
        """See Device. The last work launched is named; the card may be at an earlier one."""
        return {
            name: "idle"
            if stream.query()
            else f"under way, last launched: {self._labels.get(name)}"
            for name, stream in tuple(self._streams.items())
        }

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """See Device. There are no threads to end; the allocator keeps its cache."""
        if not self._closed:
            self._closed = True
            self._drain(timeout_seconds)
            self._streams.clear()
        self._untold.raise_first()

    def _drain(self, timeout_seconds: float | None) -> None:
        """Wait for what was launched, at most so long."""
        if timeout_seconds is None:
            for stream in self._streams.values():
                stream.synchronize()
            return
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if all(stream.query() for stream in self._streams.values()):
                return
            time.sleep(0.001)
        self._left_behind = True
        logger.warning("%s: work is left behind at close", self._name)

    def _stream(self, name: str) -> torch.cuda.Stream:
        stream = self._streams.get(name)
        if stream is not None:
            return stream
        with self._making:
            if self._closed:
                raise DeviceError(f"device is closed: {self._name}")
            if name not in self._streams:
                self._streams[name] = torch.cuda.Stream(self._torch_device)
            return self._streams[name]

    def _timestamp(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _first_origin(self) -> Origin:
        """Tie the card's clock to the host's: an event of an idle stream, between two readings."""
        stream = self._stream(_OWNER)
        self._timestamp(stream).synchronize()  # the first event of a card takes long
        before = time.perf_counter()
        event = self._timestamp(stream)
        event.synchronize()
        return Origin(event, (before + time.perf_counter()) / 2)

    def _current_origin(self, stream: torch.cuda.Stream) -> Origin:
        """The origin to count from; a new one each minute, as soon as the card has passed it."""
        origin, coming = self._origin, self._coming_origin
        if coming is not None:
            if coming.query():
                self._origin = Origin(coming, origin.seconds_of(coming))
                self._coming_origin = None
        elif time.perf_counter() - origin.seconds > _ORIGIN_SECONDS:
            self._coming_origin = self._timestamp(stream)
        return origin


def _card(index: str | torch.device) -> torch.device:
    device = torch.device(index)
    if device.type != "cuda":
        raise DeviceError(f"not a CUDA device: {device}")
    return torch.device("cuda", device.index or 0)


def _try(name: str, device: torch.device) -> None:
    """Run one op on the card, so that what is wrong with it is told here and by name."""
    state = cuda_state(keep_torch_order=True)
    cause = cause_of_none(state) if not state.cards else ""
    if not cause and device.index not in state.cards:
        cause = f"torch sees {len(state.cards)} card{'s' * (len(state.cards) > 1)}, counted from 0"
    if not cause:
        try:
            torch.zeros(1, device=device).add_(1).item()
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
    if cause:
        raise DeviceError(f"cannot use {name}: {cause}\nhint: devices=cpu trains without a card")


def cause_of_none(state: CudaState) -> str:
    """Why torch can use no card, in a few words."""
    if state.cuda_version is None and state.hip_version is None:
        return f"this torch is a build for the CPU alone ({state.torch_version})"
    return state.error or "torch sees none"
