"""Tells what each layer took, step by step, for whoever looks for a slow one.

Devices are timed by visits, several layers at once; a visit's time goes to its layers in proportion
to what plans are made from, see `roundpipe.engine.measure`. Nothing here changes a plan.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar

from roundpipe.engine.measure import visit_seconds
from roundpipe.plan.actions import COMPUTE, Op

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.engine.run import Run
    from roundpipe.plan.costs import Costs

_KEPT = 0.8  # of an estimate, when a record is made
_KINDS: Mapping[Op, tuple[str, ...]] = {
    Op.FORWARD: ("fwd",),
    Op.RECOMPUTE: ("re",),
    Op.BACKWARD: ("bwd",),
    Op.FUSED: ("fwd", "bwd"),
}
_ORDER = ("fwd", "re", "bwd")


class ModelTimer:
    """The times of one model's layers: the last record and a moving average of each.

    ``ModelTimer.VERBOSE = True`` writes a line for each layer and each of forward (``fwd``),
    recompute (``re``) and backward (``bwd``) to stderr, in milliseconds of one microbatch, when
    devices are through with a run and the next call, or ``synchronize``, comes.
    """

    # A switch for the whole process, as scripts know it: set on the class, read for each run.
    VERBOSE: ClassVar[bool] = False

    def __init__(self) -> None:
        self.estimates: dict[tuple[int, str], float] = {}  # seconds
        self._runs: list[Run] = []

    def add(self, run: Run) -> None:
        """Tell about a run when it is over, if the switch is set now."""
        if ModelTimer.VERBOSE:
            self._runs.append(run)

    def tell(self, costs: Costs) -> None:
        """Write what is known of runs that are over; blocks on nothing."""
        waiting = self._runs
        self._runs = []
        for run in waiting:
            if run.failure is not None:
                continue
            if _has_computed(run):
                sys.stderr.write(self._lines(records(run, costs)))
            else:
                self._runs.append(run)

    def forget(self) -> None:
        """Let go of runs that will never be over."""
        self._runs.clear()

    def _lines(self, found: Mapping[tuple[int, str], float]) -> str:
        lines = []
        for layer, kind in sorted(found, key=lambda key: (key[0], _ORDER.index(key[1]))):
            seconds = found[layer, kind]
            before = self.estimates.get((layer, kind), seconds)
            now = _KEPT * before + (1 - _KEPT) * seconds
            self.estimates[layer, kind] = now
            record, estimate = seconds * 1e3, now * 1e3
            lines.append(
                f"Layer {layer} {kind:<3}  new record: {record:.3f} ms  "
                f"new estimate: {estimate:.3f} ms\n"
            )
        return "".join(lines)


def _has_computed(run: Run) -> bool:
    """Whether devices are through with a run; its updates may be still to come."""
    wanted = sum(action.op in COMPUTE for action in run.program.schedule.order)
    return sum(span.action.op in COMPUTE for span in run.timings.spans()) == wanted


def records(run: Run, costs: Costs) -> dict[tuple[int, str], float]:
    """Seconds of one microbatch, by layer and kind of work, of a run that is over."""
    share = {
        "fwd": [cost.forward_seconds for cost in costs.layers],
        "re": [cost.forward_seconds for cost in costs.layers],
        "bwd": [cost.backward_seconds for cost in costs.layers],
    }
    found: dict[tuple[int, str], float] = {}
    for (number, op), took in visit_seconds(run.timings).items():
        layers = run.program.schedule.visits[number].layers
        total = sum(share[kind][layer] for kind in _KINDS[op] for layer in layers)
        for kind in _KINDS[op]:
            for layer in layers:
                part = share[kind][layer] / total if total else 1 / len(layers)
                found[layer, kind] = found.get((layer, kind), 0.0) + took * part
    return found
