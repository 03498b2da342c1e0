"""Measure one device through the same Protocol as the engine: launch, record, wait.

    rates of matrix products by arithmetic      of the compute stream
    bandwidth of its memory                     of the compute stream
    copies up and down, both at once            of two streams, pinned and pageable
    what comes back of what went there          bit for bit

Every figure is a median over repeated works after one that is not counted: the first of a kind
loads code and touches memory. Works are timed by the device, so host Python is not in them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device, Timing

Answer = TypeVar("Answer")
_COMPUTE, _UP, _DOWN = "compute", "weights", "gradients"
_LEAST_TIMES = 3
_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp16_fp16": torch.float16,
}


@dataclass(frozen=True)
class Effort:
    """How much one figure may take: long enough for a card to reach its steady power."""

    seconds: float  # of one figure
    copy_bytes: int  # of one copy
    matrix_size: int  # at most
    product_seconds: float  # that one product should last


CARD_EFFORT = Effort(0.4, 256 * 2**20, 8192, 5e-3)
CPU_EFFORT = Effort(0.25, 64 * 2**20, 2048, 20e-3)


def effort_for(device: Device) -> Effort:
    """What the figures of ``device`` should take."""
    return CPU_EFFORT if device.torch_device.type == "cpu" else CARD_EFFORT


def effort_within(effort: Effort, num_bytes: int) -> Effort:
    """``effort`` with copies of which several have room in ``num_bytes``."""
    return replace(effort, copy_bytes=max(2**20, min(effort.copy_bytes, num_bytes // 16)))


@dataclass(frozen=True)
class LinkRates:
    """Bytes per second between host and device; ``both`` while the other way runs too."""

    up: float
    down: float
    up_both: float
    down_both: float

    @property
    def duplex(self) -> float:
        """What is left of a rate when both ways run."""
        return min(1.0, (self.up_both / self.up + self.down_both / self.down) / 2)


class Probe:
    """Measurements of one device. Raises what the device raised."""

    def __init__(self, device: Device, effort: Effort | None = None) -> None:
        self.device = device
        self.effort = effort or effort_for(device)
        self._failure: BaseException | None = None

    @property
    def arithmetics(self) -> tuple[str, ...]:
        """The keys of `matrix_rate` that this device can have."""
        if self.device.torch_device.type == "cpu":
            return ("fp32", "bf16", "fp16")
        if torch.version.hip is not None:
            return ("fp32", "bf16", "fp16")
        return tuple(_DTYPES)

    def matrix_rate(self, arithmetic: str) -> float | None:
        """FLOP/s of square matrix products; None where the device cannot do them."""
        size = 256
        work, seconds = self._product(arithmetic, size)
        if work is None:
            return None
        while seconds < self.effort.product_seconds and size < self.effort.matrix_size:
            try:
                larger, seconds = self._product(arithmetic, 2 * size)
            except torch.OutOfMemoryError:  # what fits tells enough
                break
            work, size = larger or work, 2 * size
        return 2.0 * size**3 / self.median_seconds(work)

    def bandwidth(self) -> float:
        """Bytes per second read and written while its memory is copied within it."""
        place = self.device.torch_device
        source = torch.zeros(self.effort.copy_bytes, dtype=torch.uint8, device=place)
        target = torch.ones_like(source)
        seconds = self.median_seconds(lambda: target.copy_(source))
        return 2 * source.numel() / seconds

    def link(self, *, pinned: bool) -> LinkRates:
        """Copies between the host and the device, one way at a time and both at once."""
        ups, downs = self._copies(pinned=pinned)
        num_bytes = self.effort.copy_bytes
        up = num_bytes / self.median_seconds(ups, stream=_UP)
        down = num_bytes / self.median_seconds(downs, stream=_DOWN)
        both = self._both_ways(ups, downs)
        return LinkRates(up, down, *(num_bytes / seconds for seconds in both))

    def busy_while(self, question: Callable[[], Answer], *, seconds: float = 2.0) -> Answer:
        """The answer to ``question`` while the device computes, at least ``seconds`` of work.

        Of long products: a card takes only so many works ahead of what it does.
        """
        try:
            work, each = self._product("fp32", self.effort.matrix_size)
        except torch.OutOfMemoryError:
            work, each = self._product("fp32", 256)
        assert work is not None, "every device has fp32"
        for _ in range(math.ceil(seconds / each)):
            self._do(_COMPUTE, work)
        try:
            return question()
        finally:
            self._finish(_COMPUTE)

    def round_trip_is_intact(self, *, times: int = 3) -> bool:
        """Whether random bytes come back from the device as they went, every time."""
        num_bytes = self.effort.copy_bytes // 4
        generator = torch.Generator("cpu").manual_seed(1)
        sent = self._host(num_bytes, pinned=True)
        back = self._host(num_bytes, pinned=True)
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self.device.torch_device)
        for _ in range(times):
            torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator, out=sent)
            back.zero_()
            self._do(_UP, lambda: there.copy_(sent, non_blocking=True))
            self.device.wait(_DOWN, self.device.record(_UP))
            self._do(_DOWN, lambda: back.copy_(there, non_blocking=True))
            self._finish(_DOWN)
            if not torch.equal(sent, back):
                return False
        return True

    def _product(self, arithmetic: str, size: int) -> tuple[Callable[[], object] | None, float]:
        """A product of two square matrices and the seconds of one; None if it cannot be done."""
        dtype, place = _DTYPES[arithmetic], self.device.torch_device
        left = torch.full((size, size), 0.5, dtype=dtype, device=place)
        right = torch.full((size, size), 0.25, dtype=dtype, device=place)
        out = torch.empty_like(left)
        left[::2], right[1::3] = -0.75, 0.125  # of one value all over it would draw less power
        switches = {} if place.type == "cpu" else _switches(arithmetic)

        def product() -> None:
            with _switched(switches):
                torch.mm(left, right, out=out)

        try:
            self._seconds(_COMPUTE, product)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            if "not implemented" in str(problem) or "not supported" in str(problem).lower():
                return None, 0.0
            raise
        return product, self._seconds(_COMPUTE, product)

    def _copies(self, *, pinned: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        num_bytes = self.effort.copy_bytes
        place = self.device.torch_device
        sent, back = (self._host(num_bytes, pinned=pinned) for _ in range(2))
        above, below = (torch.zeros(num_bytes, dtype=torch.uint8, device=place) for _ in range(2))
        return (
            lambda: above.copy_(sent, non_blocking=pinned),
            lambda: back.copy_(below, non_blocking=pinned),
        )

    def _host(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Host memory whose pages are there. On the CPU nothing is page-locked."""
        is_card = self.device.torch_device.type != "cpu"
        buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned and is_card)
        return buffer.fill_(1)

    def _both_ways(self, up: Callable[[], object], down: Callable[[], object]) -> list[float]:
        """Seconds of a copy each way, of those copies beside which the other way ran."""
        timings: dict[str, list[Timing]] = {_UP: [], _DOWN: []}
        alone = max(self._seconds(_UP, up), self._seconds(_DOWN, down))
        times = max(_LEAST_TIMES, min(50, int(self.effort.seconds / alone / 2)))
        for _ in range(times):
            timings[_UP].append(self._do(_UP, up))
            timings[_DOWN].append(self._do(_DOWN, down))
        self._finish(_UP, _DOWN)
        return [
            _median_beside(timings[mine], timings[other])
            for mine, other in ((_UP, _DOWN), (_DOWN, _UP))
        ]

    def median_seconds(self, work: Callable[[], object], *, stream: str = _COMPUTE) -> float:
        """Seconds of ``work``, the first time left out."""
        self._seconds(stream, work)
        taken = [self._seconds(stream, work)]
        times = min(1000, max(_LEAST_TIMES, int(self.effort.seconds / max(taken[0], 1e-6))))
        pending = [self._do(stream, work) for _ in range(times - 1)]
        self._finish(stream)
        taken += [each.end_seconds - each.start_seconds for each in pending]
        return max(statistics.median(taken), 1e-9)

    def _seconds(self, stream: str, work: Callable[[], object]) -> float:
        timing = self._do(stream, work)
        self._finish(stream)
        return max(timing.end_seconds - timing.start_seconds, 1e-9)

    def _do(self, stream: str, work: Callable[[], object]) -> Timing:
        self._failure = None
        timing = self.device.launch(
            stream, work, timed=True, label="probe", on_error=self._remember
        )
        if self._failure is not None:  # a card runs the Python of a work now
            raise self._failure
        assert timing is not None
        return timing

    def _remember(self, failure: BaseException) -> None:
        self._failure = failure

    def _finish(self, *streams: str) -> None:
        for event in [self.device.record(stream) for stream in streams]:
            event.wait()
        if self._failure is not None:
            raise self._failure


def rate_of_all_links(probes: Sequence[Probe]) -> float:
    """Bytes per second up over the links of all devices at once, pinned."""
    works = [probe._copies(pinned=True)[0] for probe in probes]
    for probe, work in zip(probes, works, strict=True):
        probe._seconds(_UP, work)
    timings: list[Timing] = []
    for _ in range(4):
        timings += [probe._do(_UP, work) for probe, work in zip(probes, works, strict=True)]
    for probe in probes:
        probe._finish(_UP)
    moved = sum(probe.effort.copy_bytes for probe in probes) * 4
    start = min(timing.start_seconds for timing in timings)
    return moved / max(max(timing.end_seconds for timing in timings) - start, 1e-9)


def _switches(arithmetic: str) -> dict[str, object]:
    return {
        "fp32_precision": "tf32" if arithmetic == "tf32" else "ieee",
        "allow_fp16_accumulation": arithmetic == "fp16_fp16",
    }


@contextlib.contextmanager
def _switched(switches: Mapping[str, object]) -> Iterator[None]:
    """Torch's switches for how products are added up, put back afterwards.

    They belong to the process; works that set them run one at a time here.
    """
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in switches}
    try:
        for name, value in switches.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _median_beside(mine: Sequence[Timing], others: Sequence[Timing]) -> float:
    """Median seconds of the works of ``mine`` during which some work of ``others`` ran throughout.

    Where none is wholly covered (a device that runs one at a time), of all of them.
    """
    start = min(each.start_seconds for each in others)
    end = max(each.end_seconds for each in others)
    covered = [each for each in mine if start <= each.start_seconds and each.end_seconds <= end]
    return max(
        statistics.median(each.end_seconds - each.start_seconds for each in covered or mine), 1e-9
    )
