"""A device for tests: runs work at once in the caller's thread and checks that events order it.

Three things real streams need, and that no run on real streams can show for sure:

1. *Order*: two accesses to one buffer, at least one of them a write, are ordered by events (see
   ``ledger``). A missing wait is a RaceError here, every time, not a wrong loss once a week.
2. *Honesty*: with ``watch_storage`` a dispatch mode compares the memory that every op of the work
   touches, inside backward too, with the buffers it declared. Memory that nobody owns is private.
3. *Failure*: ``fail`` is asked for every label, and what it returns is what the work "raised".

A RaceError and a failure take the way an exception out of ``work`` takes: to ``on_error``, and the
work does not run. Without an ``on_error`` a RaceError is raised by ``launch``.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.device.ledger import Ledger, Span
from roundpipe.device.memory import Accounts, HostMemory
from roundpipe.device.untold import Untold
from roundpipe.errors import DeviceError, RaceError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event

__all__ = ["FakeDevice", "FakeEvent", "FakeTiming", "Ledger"]

# Ops that take a tensor for its shape and dtype alone, by the name before the overload.
_LOOKS_AT_SHAPE = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "_unsafe_view"),
    )
)
# Arguments that an op changes though its schema does not say so.
_WRITTEN_UNMARKED = {
    "aten::native_batch_norm": frozenset(("running_mean", "running_var")),
    "aten::cudnn_batch_norm": frozenset(("running_mean", "running_var")),
}


@dataclass(frozen=True)
class FakeEvent:
    """What a stream had surely seen when the event was recorded. It has happened already."""

    stream: str
    clock: Mapping[str, int]

    def is_complete(self) -> bool:
        """Always: work has run when ``launch`` returns."""
        return True

    def wait(self) -> None:
        """Return. Orders nothing: ``FakeDevice.wait`` does."""


@dataclass
class FakeTiming:
    """When the work ran."""

    start_seconds: float = math.nan
    end_seconds: float = math.nan


@dataclass(frozen=True)
class _Declared:
    """What a work says it touches, and who it is."""

    stream: str
    label: object
    reads: frozenset[Hashable]
    writes: frozenset[Hashable]

    def __str__(self) -> str:
        return f"{self.stream} {self.label}".rstrip()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class hook
    """Raises RaceError at the op that touches owned memory the work did not declare."""

    def __init__(self, ledger: Ledger, declared: _Declared) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._declared = declared

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the method as it is: torch 2.13 else imports its compiler at the first op (2 s)."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check every tensor the op reads or writes, then run it."""
        for tensor, writing in _touched(func, args, kwargs or {}):
            self._check(func, tensor, writing=writing)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: Tensor, *, writing: bool) -> None:
        if tensor.layout is not torch.strided:
            return
        touched = Span.of(tensor)
        if touched is None:
            return
        declared = self._declared
        allowed = declared.writes if writing else declared.reads | declared.writes
        owners = self._ledger.owners(touched)
        covered = [span for key, span in owners if key in allowed]
        for key, span in owners:
            shared = Span(span.storage, max(span.start, touched.start), min(span.end, touched.end))
            if key not in allowed and shared.without(covered):
                verb = "writes" if writing else "reads"
                raise RaceError(
                    f"{declared} {verb} {key!r} by {func} without saying so\n"
                    f"hint: name it among what the work {verb}"
                )


def _touched(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """The tensors an op reads or writes, and which. An alias made (a view) touches no memory."""
    name = func._schema.name
    if name in _LOOKS_AT_SHAPE:
        return
    unmarked = _WRITTEN_UNMARKED.get(name, frozenset())
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        writing = alias is not None or argument.name in unmarked
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield item, writing


class FakeDevice:
    """A device whose streams are clocks. Its tensors are on the CPU.

    ``ledger`` is shared by every device (and the host) whose streams can meet; ``fail(label)``
    returns what the work of that label shall raise, or None; ``watch_storage`` compares the memory
    that work touches with what it declares. ``pinned_bytes``: host memory it page-locks at most,
    as a driver with a limit; None: it does not. Freed and new buffers are filled with NaN.
    """

    def __init__(
        self,
        name: str = "fake",
        *,
        ledger: Ledger | None = None,
        fail: Callable[[object], BaseException | None] | None = None,
        capacity_bytes: int | None = None,
        watch_storage: bool = False,
        pinned_bytes: int | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.fail = fail
        self._name = name
        self.watch_storage = watch_storage
        self.registered: dict[int, int] = {}  # address -> bytes
        self._pinned_bytes = pinned_bytes
        self._accounts = Accounts(name, capacity_bytes)
        self._memory = HostMemory(self._accounts, poison=True)
        self._untold = Untold()
        self._doing: dict[str, object] = {}  # stream -> label, None when idle
        self._closed = False

    def __repr__(self) -> str:
        return f"FakeDevice({self._name!r})"

    @property
    def name(self) -> str:
        """See Device."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """See Device."""
        return torch.device("cpu")

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
    ) -> FakeTiming | None:
        """See Device. Raises RaceError where there is no ``on_error`` to tell."""
        self._check_open()
        full = f"{self._name}.{stream}"
        timing = FakeTiming()
        self._doing[stream] = label or "work without a label"
        timing.start_seconds = time.perf_counter()
        try:
            self._refuse(full, label, reads, writes)
            with self._watch(_Declared(full, label, frozenset(reads), frozenset(writes))):
                work()
        except BaseException as error:
            if on_error is None and (
                isinstance(error, RaceError) or not isinstance(error, Exception)
            ):
                raise
            self._untold.tell(error, on_error)
        finally:
            timing.end_seconds = time.perf_counter()
            self._doing[stream] = None
        return timing if timed else None

    def record(self, stream: str) -> FakeEvent:
        """See Device."""
        self._check_open()
        full = f"{self._name}.{stream}"
        return FakeEvent(full, self.ledger.clock(full))

    def wait(self, stream: str, event: Event) -> None:
        """See Device. An event of another kind of device is waited for, and orders nothing."""
        self._check_open()
        if isinstance(event, FakeEvent):
            self.ledger.merge(f"{self._name}.{stream}", event.clock)
        else:
            event.wait()

    def allocate(self, num_bytes: int) -> Tensor:
        """See Device. Filled with NaN."""
        return self._memory.allocate(num_bytes)

    def free(self, buffer: Tensor) -> None:
        """See Device. Fills it with NaN."""
        self._memory.free(buffer)

    def poison(self, buffer: Tensor) -> None:
        """See Device. Always fills."""
        self._memory.poison(buffer)

    @property
    def pins(self) -> bool:
        """See Device."""
        return self._pinned_bytes is not None

    def register(self, address: int, num_bytes: int) -> None:
        """See Device. What overlaps, or exceeds the limit, is refused as a driver does."""
        ends = address + num_bytes
        taken = self.registered.items()
        if any(start < ends and address < start + size for start, size in taken):
            raise DeviceError("part or all of the requested memory range is already mapped")
        if sum(self.registered.values()) + num_bytes > (self._pinned_bytes or 0):
            raise DeviceError("out of memory")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        """See Device. Raises KeyError for what is not registered."""
        del self.registered[address]

    def hold(self, stream: str, *tensors: Tensor) -> None:
        """See Device. Work has run already."""

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """See Device and ``Ledger.own``."""
        self.ledger.own(key, tensor)

    def disown(self, key: Hashable) -> None:
        """See Device and ``Ledger.disown``."""
        self.ledger.disown(key)

    def describe(self) -> dict[str, str]:
        """See Device."""
        doing = tuple(self._doing.items())
        return {stream: "idle" if label is None else str(label) for stream, label in doing}

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """See Device. Nothing is ever under way."""
        self._closed = True
        self._untold.raise_first()

    def _refuse(
        self, full: str, label: object, reads: Sequence[Hashable], writes: Sequence[Hashable]
    ) -> None:
        """Raise what this work shall fail with: a race it is part of, or what ``fail`` says."""
        error: BaseException | None
        error = self.ledger.access(full, label, reads=reads, writes=writes)
        if error is None and self.fail is not None:
            error = self.fail(label)
        if error is not None:
            raise error

    def _watch(self, declared: _Declared) -> contextlib.AbstractContextManager[object]:
        return _Watch(self.ledger, declared) if self.watch_storage else contextlib.nullcontext()

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"device is closed: {self._name}")
