"""One run of one schedule: everything that lives from a call to the end of its step.

A run is made anew for every call. Its handovers are set once; what fails in it is kept as the first
failure and wakes everyone who waits.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.engine.handover import Handover
from roundpipe.engine.program import HOST
from roundpipe.engine.weigh import Sizes
from roundpipe.errors import StepError
from roundpipe.plan.actions import OF_LAYERS, Op
from roundpipe.plan.timeline import Span, StepSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event, Timing
    from roundpipe.device.emulated_links import Load
    from roundpipe.engine.caller import CallerState
    from roundpipe.engine.microbatch import Microbatch
    from roundpipe.engine.program import Item, Program
    from roundpipe.engine.updates import LossScale, Update
    from roundpipe.models.spec import ModelSpec
    from roundpipe.plan.actions import Action
    from roundpipe.plan.footprint import Footprints
    from roundpipe.plan.schedule import Visit

_WORDS = {
    Op.UPLOAD: "upload of weights",
    Op.FORWARD: "forward",
    Op.FUSED: "forward, loss and backward",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD: "backward",
    Op.ACTIVATION_IN: "upload of activations",
    Op.ACTIVATION_OUT: "download of activations or loss",
    Op.GRADIENT_IN: "upload of the boundary gradient",
    Op.GRADIENT_OUT: "download of the boundary gradient",
    Op.DOWNLOAD: "download of gradients",
    Op.MERGE: "sum of partial gradients",
    Op.NORM: "gradient norm",
    Op.UPDATE: "optimizer update",
    Op.PUBLISH: "publishing of weights",
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the caller wants of a run."""

    microbatches: Sequence[Microbatch]
    caller: CallerState
    seed: int
    step: int
    # (outputs, label, microbatch) -> the loss to run backward from; None: forward only
    loss: Callable[[Any, Any, int], Tensor] | None = None
    keep_outputs: bool = False
    wants_logits: bool = True  # False: of outputs nobody reads more than the model's own loss
    loss_scale: LossScale | None = None  # multiplies the losses before backward
    newest: bool = False  # read master weights that are not published yet
    weighs: bool = False  # a microbatch of each visit, see ``roundpipe.engine.weigh``
    recompute_by_layer: bool = False
    continues: Continues | None = None  # the backward of a pass before


@dataclass(frozen=True)
class Continues:
    """What a backward whose forward ran as a pass of its own is given, by (boundary, microbatch).

    ``gradients``: of the floating tensors that the last layer returned, None where there is none.
    ``wanted``: which leaves of the inputs' pytree want a gradient, if any. ``kept``: what forward
    has kept for recompute.
    """

    boundaries: Mapping[tuple[int, int], Any]
    gradients: Mapping[tuple[int, int], Sequence[Tensor | None]]
    wanted: tuple[bool, ...] = ()
    kept: KeptData | None = None


@dataclass
class KeptData:
    """On the host, what forward keeps for recompute; let go when that takes it.

    ``begun``: by layer, buffers before the first microbatch that changed them.
    """

    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    begun: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def copy(self) -> KeptData:
        """The same for a run that takes it anew."""
        return KeptData(dict(self.held), dict(self.begun))

    def put(self, layer: int, microbatch: int, kept: Any) -> None:
        """Keep it for the one recompute of this layer and microbatch."""
        self.held[layer, microbatch] = kept

    def take(self, layers: range, microbatch: int) -> dict[int, Any]:
        """What was kept of a microbatch, by layer; most layers keep nothing."""
        found: dict[int, Any] = {}
        for layer in layers:
            kept = self.held.pop((layer, microbatch), {})
            if layer in self.begun:
                kept = {"buffers": self.begun[layer], **kept}
            if kept:
                found[layer] = kept
        return found


@dataclass
class Boundaries:
    """Boundary activations or their gradients on the host; each is let go after its last use."""

    uses: dict[tuple[int, int], int]
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, boundary: int, microbatch: int, value: Any) -> None:
        """Keep ``value`` for those who will read it."""
        self.held[boundary, microbatch] = value

    def take(self, boundary: int, microbatch: int) -> Any:
        """Read it; the last reader lets it go."""
        key = (boundary, microbatch)
        with self._lock:
            value = self.held[key]
            self.uses[key] = self.uses.get(key, 1) - 1
            if self.uses[key] <= 0:
                del self.held[key]
        return value


class Timings:
    """When a run's actions ran; all that is kept of a run for the timeline."""

    def __init__(self, step: int, visits: tuple[Visit, ...]) -> None:
        self._step, self._visits = step, visits
        self._kept: list[Span | tuple[int, Item, Timing]] = []

    def add(self, worker: int, item: Item, timing: Timing) -> None:
        """Keep when an action runs; called by the worker that issues it."""
        self._kept.append((worker, item, timing))

    def spans(self) -> list[Span]:
        """What ran when, as far as it is over; what is over is worked out once."""
        for place, kept in enumerate(self._kept):  # workers may append meanwhile
            if not isinstance(kept, Span):
                worker, item, timing = kept
                start, end = timing.start_seconds, timing.end_seconds
                if not (math.isnan(start) or math.isnan(end)):
                    stream = item.stream if worker == HOST else f"{worker}.{item.stream}"
                    self._kept[place] = Span(stream, item.action, start, end)
        return [kept for kept in self._kept if isinstance(kept, Span)]

    def as_step(self) -> StepSpans:
        """The same with what the actions' numbers mean."""
        return StepSpans(self._step, self._visits, tuple(self.spans()))


class Run:
    """See the module docstring. ``previous`` is the run it follows without a flush, if any."""

    def __init__(
        self, program: Program, call: Call, prints: Footprints, previous: Run | None
    ) -> None:
        self.program = program
        self.call = call
        self.prints = prints
        self._handovers = {action: Handover() for action in program.schedule.order}
        self._before = previous._handovers if previous is not None else None
        given = call.continues or Continues({}, {})
        self.boundaries = Boundaries(dict(program.boundary_uses), dict(given.boundaries))
        self.gradients = Boundaries({}, dict(given.gradients))
        self.kept = KeptData() if given.kept is None else given.kept.copy()
        num_microbatches = program.schedule.num_microbatches
        self.losses: list[Tensor | None] = [None] * num_microbatches
        self.outputs: list[Any] = [None] * num_microbatches
        self.received: dict[tuple[int, int], list[str]] = {}  # (visit, layer) -> parameters
        self.ready = threading.Event()  # all results are on the host, or the run was given up
        self.update: Update | None = None  # set when the optimizer steps
        self.failure: BaseException | None = None
        self.failed_at: Action | None = None
        self.timings = Timings(call.step, program.schedule.visits)
        self.layer_seconds: dict[int, list[float]] = {}  # each forward of one microbatch
        self.backward_seconds: dict[int, list[float]] = {}  # by visit, of the thread that issues
        self.sizes = Sizes() if call.weighs else None

    def publish(self, action: Action, event: Event) -> None:
        """Say that ``action`` is issued."""
        self._handovers[action].publish(event)

    def receive(self, action: Action) -> Event | None:
        """The event of an action of this run or of the one before; blocks until it is issued.

        None where there is no run before. Raises the failure of a run that was given up.
        """
        if not action.before:
            return self._handovers[action].receive()
        if self._before is None:
            return None
        handover = self._before.get(action.of_this_step())
        return None if handover is None else handover.receive()

    def load(self, action: Action) -> Load | None:
        """What an action takes where devices are emulated; nothing once the run was given up."""
        loads = self.program.loads
        if loads is None or self.failure is not None:
            return None
        return loads.of(action, by_layer=self.call.recompute_by_layer)

    def event(self, action: Action) -> Event:
        """The event of an action that this host thread has issued itself."""
        event = self._handovers[action].event
        assert event is not None, f"{action} is not issued"
        return event

    def fail(self, error: BaseException, action: Action | None = None) -> None:
        """Give up the run; only the first failure counts. Wakes everyone who waits for an issue."""
        if self.failure is None:
            self.failure = error
            self.failed_at = action
        reason = StepError("the step was given up")
        for handover in self._handovers.values():
            if handover.event is None:
                handover.abandon(reason)
        self.ready.set()

    def is_lost(self, update: Update | None) -> bool:
        """Whether it was to train, and ``update``, which followed it, has not committed."""
        return self.call.loss is not None and (update is None or not update.is_committed)

    def is_over(self) -> bool:
        """Whether all its actions have run."""
        lasts = [queue[-1] for queue in self.program.schedule.streams.values() if queue]
        events = [self._handovers[action].event for action in lasts]
        return all(event is not None and event.is_complete() for event in events)

    def as_step_error(self, spec: ModelSpec, devices: Sequence[str], note: str) -> StepError:
        """What to raise for its failure; ``note`` goes behind what is not an error of ours."""
        error = self.failure
        if isinstance(error, StepError):
            return error
        where = self.describe(self.failed_at, spec, devices)
        kind = type(error).__name__
        return StepError(f"step {self.call.step}: {where} failed: {kind}: {error}{note}")

    def describe(self, action: Action | None, spec: ModelSpec, devices: Sequence[str]) -> str:
        """Name an action for people: what, layers, microbatch, device."""
        if action is None:
            return "the call"
        if action.op in OF_LAYERS:
            return (
                f"{action} ({_WORDS[action.op]} of layer {spec.layers[action.index].name}) on host"
            )
        visit = self.program.schedule.visits[action.index]
        names = [spec.layers[layer].name for layer in (visit.layers[0], visit.layers[-1])]
        layers = (
            f"layer {names[0]}" if len(visit.layers) == 1 else f"layers {names[0]} to {names[1]}"
        )
        microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
        device = (
            "host" if action.op is Op.MERGE else f"device {visit.device} ({devices[visit.device]})"
        )
        return (
            f"{action} ({_WORDS[action.op]}, stage {visit.stage}, {layers}{microbatch}) on {device}"
        )
