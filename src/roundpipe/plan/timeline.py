"""When what ran: the common record of the engine and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roundpipe.plan.actions import Action
    from roundpipe.plan.schedule import Schedule, Visit


@dataclass(frozen=True, slots=True)
class Span:
    """An action's place in time, in seconds."""

    stream: str
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class StepSpans:
    """What ran when in one step, or in one call of it; ``visits`` are those of its schedule."""

    step: int
    visits: tuple[Visit, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Timeline:
    """Steps that follow each other, and what people call the devices and the layers.

    Seconds count from anywhere, the same for all steps.
    """

    steps: tuple[StepSpans, ...]
    devices: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """Of all steps, step by step."""
        return [span for step in self.steps for span in step.spans]

    @classmethod
    def of(
        cls,
        chain: Sequence[Schedule],
        spans: Iterable[Span],
        *,
        devices: Sequence[str] = (),
        layers: Sequence[str] = (),
        first_step: int = 0,
    ) -> Timeline:
        """Sort a simulated chain's spans by steps: an action's third span is of the third step."""
        seen: dict[Action, int] = {}
        sorted_spans: list[list[Span]] = [[] for _ in chain]
        for span in spans:
            step = seen.get(span.action, 0)
            seen[span.action] = step + 1
            sorted_spans[step].append(span)
        steps = (
            StepSpans(first_step + number, schedule.visits, tuple(mine))
            for number, (schedule, mine) in enumerate(zip(chain, sorted_spans, strict=True))
        )
        return cls(tuple(steps), tuple(devices), tuple(layers))


def busy_share(spans: Sequence[Span]) -> dict[str, float]:
    """Share of the time between the first start and the last end that each compute stream worked.

    One minus this is the stream's bubble. Empty without compute spans.
    """
    compute = [span for span in spans if span.stream.endswith(".compute")]
    if not compute:
        return {}
    length = max(span.end for span in compute) - min(span.start for span in compute)
    busy: dict[str, float] = {}
    for span in compute:
        busy[span.stream] = busy.get(span.stream, 0.0) + span.end - span.start
    return {name: seconds / length if length else 1.0 for name, seconds in sorted(busy.items())}
