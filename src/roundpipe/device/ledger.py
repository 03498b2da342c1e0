"""Who has surely seen what: vector clocks over streams, and the accesses to every shared buffer.

A stream's clock says up to which of its own works, and of every other stream's, all is surely
done when its next work starts. An event is a copy of a clock; a wait takes the greater of both,
entry by entry. An access is in order when the clock of its stream covers the last write of the
buffer and, for a write, every read since:

    upload   writes w3 (upload 1)  ── event {upload: 1} ─┐
    compute                                wait ─ {upload: 1, compute: 1} reads w3: in order

Buffers are named by keys. ``own`` ties a key to memory; keys whose memory overlaps are one buffer
where they do, so a slot that is used again under another name is still one slot. One ledger is
shared by all fake devices of a pool and by the host's, so races between them are found too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe.errors import RaceError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

    from torch import Tensor

Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """One work that touches shared buffers: on which stream, as which of its works, called what."""

    stream: str
    time: int
    label: object
    verb: Literal["reads", "writes"]

    def __str__(self) -> str:
        return f"{self.stream} {self.label}".rstrip()


@dataclass
class _Buffer:
    """The last write and, for each stream, its last read since."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)

    def conflicts(self, *, writing: bool) -> Iterator[Access]:
        """What an access must come after."""
        if self.write is not None:
            yield self.write
        if writing:
            yield from self.reads.values()


@dataclass(frozen=True)
class Span:
    """Bytes ``start`` to ``end`` of one storage."""

    storage: int  # its address
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span | None:
        """The bytes from a tensor's first to its last element; None if it has none."""
        if tensor.numel() == 0:
            return None
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps)
        start = int(tensor.storage_offset()) * tensor.element_size()
        storage = tensor.untyped_storage().data_ptr()
        return cls(storage, start, start + int(extent) * tensor.element_size())

    def overlaps(self, other: Span) -> bool:
        """Whether the two share a byte."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end

    def without(self, others: Iterable[Span]) -> list[Span]:
        """What is left of it when ``others`` are cut out."""
        left = [self]
        for other in others:
            left = [
                Span(self.storage, start, end)
                for piece in left
                for start, end in (
                    ((piece.start, other.start), (other.end, piece.end))
                    if piece.overlaps(other)
                    else ((piece.start, piece.end),)
                )
                if start < end
            ]
        return left


@dataclass(frozen=True, eq=False)
class _Gone:
    """What a disowned key stood for: its accesses still count where its memory is used again."""

    key: Hashable

    def __repr__(self) -> str:
        return f"{self.key!r} (disowned)"


@dataclass
class _Owned:
    """The keys that own memory of one storage, as long as that storage lives."""

    storage: StorageWeakRef
    spans: list[tuple[Hashable, Span]] = field(default_factory=list)


class Ledger:
    """Clocks, buffers and owned memory of all streams that can meet. Used from any thread."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._buffers: defaultdict[Hashable, _Buffer] = defaultdict(_Buffer)
        self._owned: dict[int, _Owned] = {}
        self._spans: defaultdict[Hashable, list[Span]] = defaultdict(list)
        self._gone: set[Hashable] = set()
        self._lock = threading.RLock()

    def access(
        self, stream: str, label: object, *, reads: Iterable[Hashable], writes: Iterable[Hashable]
    ) -> RaceError | None:
        """Count one work of ``stream`` and enter what it touches.

        Returns the first thing out of order, if any; then the work must not run, and nothing is
        entered.
        """
        with self._lock:
            clock = self._clocks[stream]
            clock[stream] = now = clock.get(stream, 0) + 1
            read = Access(stream, now, label, "reads")
            write = Access(stream, now, label, "writes")
            touched = [*((read, key) for key in reads), *((write, key) for key in writes)]
            for access, key in touched:
                error = self._out_of_order(access, key, clock)
                if error is not None:
                    return error
            for access, key in touched:
                self._enter(access, key)
            return None

    def clock(self, stream: str) -> Clock:
        """A copy of what ``stream`` has surely seen."""
        with self._lock:
            return dict(self._clocks[stream])

    def merge(self, stream: str, seen: Mapping[str, int]) -> None:
        """Let ``stream`` wait for what ``seen`` stands for."""
        with self._lock:
            clock = self._clocks[stream]
            for other, time in seen.items():
                clock[other] = max(clock.get(other, 0), time)

    def own(self, key: Hashable, tensor: Tensor) -> None:
        """``key`` is (also) the memory of ``tensor``, as long as its storage lives."""
        span = Span.of(tensor)
        with self._lock:
            self._gone.discard(key)
            if span is None:
                return
            owned = self._live(span.storage)
            if owned is None:
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                owned = self._owned[span.storage] = _Owned(reference)
            if (key, span) not in owned.spans:
                owned.spans.append((key, span))
                self._spans[key].append(span)

    def disown(self, key: Hashable) -> None:
        """``key`` must not be touched until it is owned again, and then starts anew.

        Its accesses stay known with its memory: who gets that next must come after them.
        """
        gone = _Gone(key)
        with self._lock:
            self._gone.add(key)
            buffer = self._buffers.pop(key, None)
            spans = self._spans.pop(key, [])
            for owned in filter(None, (self._live(span.storage) for span in spans)):
                owned.spans = [(gone if k == key else k, span) for k, span in owned.spans]
            if buffer is not None and spans:
                self._buffers[gone] = buffer
                self._spans[gone] = spans

    def owners(self, span: Span) -> list[tuple[Hashable, Span]]:
        """The keys in use that own some of ``span``, with what they own of its storage."""
        with self._lock:
            owned = self._live(span.storage)
            if owned is None:
                return []
            return [
                (key, own)
                for key, own in owned.spans
                if own.overlaps(span) and not isinstance(key, _Gone)
            ]

    def _live(self, storage: int) -> _Owned | None:
        """What is owned of the storage at this address; forgets a storage that is no more."""
        owned = self._owned.get(storage)
        if owned is not None and owned.storage.expired():  # type: ignore[no-untyped-call]
            del self._owned[storage]
            for key, span in owned.spans:
                self._forget(key, span)
            return None
        return owned

    def _aliases(self, key: Hashable) -> Iterable[Hashable]:
        """``key`` and every key whose memory overlaps with its memory, disowned ones too."""
        found = {key: None}  # a dict, for its order
        for span in tuple(self._spans.get(key, ())):
            owned = self._live(span.storage)
            if owned is not None:
                found.update((other, None) for other, own in owned.spans if own.overlaps(span))
        return found

    def _out_of_order(self, access: Access, key: Hashable, clock: Clock) -> RaceError | None:
        if key in self._gone:
            return RaceError(f"{access} {access.verb} {key!r}, which was disowned")
        for alias in self._aliases(key):
            for earlier in self._buffers[alias].conflicts(writing=access.verb == "writes"):
                if clock.get(earlier.stream, 0) < earlier.time:
                    where = "it" if alias == key else f"the same memory as {alias!r}"
                    return RaceError(
                        f"{access} {access.verb} {key!r} without waiting for {earlier}, which "
                        f"{earlier.verb} {where}\n"
                        f"hint: record an event on {earlier.stream} after that work and let "
                        f"{access.stream} wait for it"
                    )
        return None

    def _enter(self, access: Access, key: Hashable) -> None:
        if access.verb == "reads":
            self._buffers[key].reads[access.stream] = access
            return
        self._buffers[key] = _Buffer(write=access)
        for span in self._spans.get(key, ()):
            self._forget_covered(span)

    def _forget_covered(self, span: Span) -> None:
        """Drop disowned keys that a write covers: who comes after the write came after them."""
        owned = self._live(span.storage)
        if owned is None:
            return
        for key, own in tuple(owned.spans):
            if isinstance(key, _Gone) and not own.without([span]):
                owned.spans.remove((key, own))
                self._forget(key, own)

    def _forget(self, key: Hashable, span: Span) -> None:
        """``key`` does not own ``span`` any more; a disowned key without memory is nothing."""
        spans = self._spans.get(key, [])
        if span in spans:
            spans.remove(span)
        if isinstance(key, _Gone) and not spans:
            self._spans.pop(key, None)
            self._buffers.pop(key, None)
