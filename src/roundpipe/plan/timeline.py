"""When what ran: the common record of the engine and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.actions import Action


@dataclass(frozen=True, slots=True)
class Span:
    """An action's place in time, in seconds."""

    stream: str
    action: Action
    start: float
    end: float


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
