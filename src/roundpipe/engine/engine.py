"""Runs schedules on a pool of devices, one after the other without a flush, and survives failures.

Rules
1. A run follows another without a drain only if its schedule was lowered as that one's successor
   and a step lies between. Otherwise the devices are idle in between, so nothing is to be awaited.
2. The first failure ends its step and every later one. It is raised in the caller's thread, by the
   call that waits or by the next; by then nothing of these steps is under way and the state is that
   of the last committed step.
3. No wait has a timeout of its own. The caller's thread watches: when nothing finishes for
   ``stall_seconds``, it gives up the step and tells what every stream is doing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

from roundpipe.device.fake import FakeDevice
from roundpipe.engine.claims import Claims
from roundpipe.engine.compute import Compute
from roundpipe.engine.device_model import DeviceModel
from roundpipe.engine.handover import Handover
from roundpipe.engine.pool import RESULTS
from roundpipe.engine.program import HOST, Item, Program
from roundpipe.engine.random import LayerRandom
from roundpipe.engine.run import Call, Run
from roundpipe.engine.transfer import TRANSFERS, download_gradients
from roundpipe.engine.updates import Update, merge_partials
from roundpipe.engine.watchdog import Watchdog
from roundpipe.errors import DeviceError, StallError, StepError
from roundpipe.plan.actions import COMPUTE, OF_LAYERS, Action, Op
from roundpipe.plan.footprint import Footprint, Footprints, Turns
from roundpipe.store.segment import allocate_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roundpipe.device.api import Event
    from roundpipe.device.emulated_links import Load
    from roundpipe.engine.pool import DevicePool
    from roundpipe.models.spec import ModelSpec
    from roundpipe.plan.schedule import Visit
    from roundpipe.store.layer import HostLayer

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0
_STILL_UNDER_WAY = "\nhint: some of its work is still under way; the next call waits for that"
_FINISHED = "\nhint: the step was committed; its remaining updates were made after all"
_MIXED = (
    "\nhint: the weights are mixed: some may be a step ahead of others; load the last checkpoint"
)
_UNSEEN = Footprint()  # real devices do not look


class Engine:
    """One model on a pool. Used from one thread at a time.

    ``stall_seconds``: how long nothing may finish before a step is given up.
    """

    def __init__(
        self,
        pool: DevicePool,
        spec: ModelSpec,
        layers: Sequence[HostLayer],
        *,
        stall_seconds: float = 600.0,
    ) -> None:
        self.pool, self.spec, self.layers = pool, spec, layers
        self._watchdog = Watchdog(pool, stall_seconds)
        self.draws = LayerRandom()
        self.models = [
            DeviceModel(device, index, spec, layers) for index, device in enumerate(pool.devices)
        ]
        self._computes = [Compute(model, self.draws) for model in self.models]
        self._partials: dict[tuple[int, int], Tensor] = {}
        is_fake = isinstance(pool.host, FakeDevice)
        self._claims = Claims(pool.host, self.models, layers) if is_fake else None
        self._turns = Turns()
        self._active: list[tuple[Run, Update | None]] = []
        self._last: Run | None = None
        self._failed: Run | None = None
        self._is_told = False  # whether the failure was raised, though something still hangs
        self.num_recovered = 0  # failures whose steps have been forgotten
        self._streams: dict[int, set[str]] = {}
        self._idle: Event | None = None  # everything before the last drain

    # ---- what the caller's thread does

    def start(self, program: Program, call: Call, *, follows: bool) -> Run:
        """Begin a run and return at once; ``follows``: see rule 1, else the devices are drained."""
        previous = self._last if follows else None
        if previous is None:
            self.drain()
        prints = Footprints(program.schedule, self._turns)
        if previous is None:
            self._prepare(program)
        run = Run(program, call, prints, previous)
        self._turns = prints.turns_after
        self._active = [pair for pair in self._active if not _is_over(*pair)]
        self._active.append((run, None))
        self._last = run
        with self.pool.lock:  # each worker gets the runs of several engines in the same order
            if previous is None and self._idle is not None:
                for worker, streams in self._streams.items():
                    task = functools.partial(self._begin_anew, worker, tuple(streams), self._idle)
                    self.pool.worker(worker).put(task)
            for worker, items in program.during_call.items():
                self.pool.worker(worker).put(functools.partial(self._issue, run, worker, items))
            self.pool.worker(RESULTS).put(functools.partial(self._bring_results, run))
        return run

    def wait_results(self, run: Run) -> None:
        """Block until every microbatch's loss or output is on the host; raises what failed."""
        try:
            self.watch(run.ready)
        except BaseException as error:
            self.fail(run, error)
        self.raise_failure()

    def step(self, run: Run, update: Update) -> None:
        """Begin the updates that follow ``run``; returns at once."""
        run.update = update  # before the look at its failure: `fail` looks the other way round
        others = [pair for pair in self._active if pair[0] is not run]
        self._active = [*others, (run, update)]  # a drain since the call has taken it out
        if run.failure is not None:
            update.fail(run.failure)
        items = run.program.at_step
        if not items:  # nothing is trained
            update.nothing_to_do()
        self.pool.worker(HOST).put(functools.partial(self._issue, run, HOST, items))

    def drain(self, *, patient: bool = True) -> None:
        """Block until nothing is under way; raises what failed. ``patient``: with what hangs."""
        self.raise_failure(patient=patient)
        try:
            self.watch(self._fence())
        except StallError as error:
            if self._last is None:
                raise
            self.fail(self._last, error)
        self.raise_failure()
        self._last = None
        self._active.clear()

    def fail(self, run: Run, error: BaseException, action: Action | None = None) -> None:
        """End ``run`` and every later one; called from any thread."""
        runs = [each for each, _ in self._active]
        later = runs[runs.index(run) :] if run in runs else [run]
        if self._failed is None or self._failed in later:  # known before anyone wakes up
            self._failed = run
        for each in later:
            each.fail(error, action)
            if each.update is not None:
                each.update.fail(error)

    def give_up(self, error: BaseException) -> None:
        """Drop the step in making because the caller was interrupted, who knows why.

        Steps whose update has begun go on.
        """
        run = self._last
        if run is not None and run.update is None and self._failed is None:
            self.fail(run, error)
        self._is_told = True

    def raise_failure(self, *, patient: bool = True) -> None:
        """Raise what failed, once nothing is under way and the state is the last committed one.

        What hangs is left alone after a moment and the failure raised all the same. The next call
        waits for it, for ``stall_seconds`` if ``patient``, and says nothing if that helps.
        """
        run, is_told = self._failed, self._is_told
        if run is None and not is_told:
            return
        if self._settle(patient=patient and is_told):
            note = self._recover()
            if is_told and note != _MIXED:
                return
        else:
            note, self._is_told = _STILL_UNDER_WAY, True
        error = run.failure if run is not None else None
        if run is None or error is None:
            raise StepError(f"the call before was interrupted{note}")
        if isinstance(error, Exception) or is_told:
            names = [device.name for device in self.pool.devices]
            raise run.as_step_error(self.spec, names, note) from _cause(error)
        raise error

    def _recover(self) -> str:
        """Bring the state to the last committed step's; what there is to tell of it."""
        note = self._finish_updates()
        self._forget_in_flight()
        self._failed, self._is_told = None, False
        self.num_recovered += 1
        return note

    def close(self) -> None:
        """Finish what is under way, unless it hangs, and give the devices' memory back.

        The pool is its owner's to close.
        """
        if not self._is_told and self._settle(patient=False):
            self._recover()
        for model in self.models:
            model.close()
        self._partials.clear()

    # ---- issuing, in the workers' threads

    def _issue(self, run: Run, worker: int, items: Sequence[Item]) -> None:
        try:
            device = self.pool.device(worker)
            for item in items:
                if run.failure is not None:
                    return
                if item.throttle is not None:
                    run.event(item.throttle).wait()
                for wait in item.waits:
                    event = run.receive(wait)
                    if event is not None:
                        device.wait(item.stream, event)
                prints = self._footprint(run, item.action)
                timing = device.launch(
                    item.stream,
                    functools.partial(self._execute, run, worker, item.action),
                    reads=prints.reads,
                    writes=prints.writes,
                    timed=True,
                    label=item.action,
                    on_error=functools.partial(self._on_error, run, item.action),
                )
                if timing is not None:
                    run.timings.add(worker, item, timing)
                run.publish(item.action, device.record(item.stream))
        except BaseException as error:  # a bug of ours, or a run that was given up
            if run.failure is None:
                self.fail(run, error)

    def _footprint(self, run: Run, action: Action) -> Footprint:
        return self._claims.footprint(run, action) if self._claims else _UNSEEN

    def _begin_anew(self, worker: int, streams: Sequence[str], idle: Event) -> None:
        """Order all streams behind a drain. Real devices know; a fake one only believes events."""
        for stream in streams:
            self.pool.device(worker).wait(stream, idle)

    def _on_error(self, run: Run, action: Action, error: BaseException) -> None:
        self.fail(run, error, action)

    def _execute(self, run: Run, worker: int, action: Action) -> Load | None:
        """What a stream runs for an action; what that takes where devices are emulated."""
        if run.failure is None:
            if action.op in COMPUTE:
                run.call.caller.run(functools.partial(self._computes[worker].run, run, action))
            elif action.op in TRANSFERS:
                TRANSFERS[action.op](run, self.models[worker], action)
            elif action.op is Op.DOWNLOAD:
                download_gradients(run, self.models[worker], action, self._partials)
            elif action.op is Op.MERGE:
                merge_partials(run, self.layers, action, self._partials)
            else:
                self._execute_host(run, action)
        self.pool.num_finished += 1
        return run.load(action) if self.pool.is_emulated else None

    def _execute_host(self, run: Run, action: Action) -> None:
        layer = self.layers[action.index]
        if action.op is Op.PUBLISH:
            layer.publish()
            return
        assert run.update is not None
        if action.op is Op.NORM:
            run.update.norm(action.index)
        else:
            run.update.update(action.index, run.program.updated)

    def _bring_results(self, run: Run) -> None:
        """Set ``run.ready`` when all results have come down."""
        host = self.pool.host
        try:
            for action in run.program.fused:
                event = run.receive(action)
                assert event is not None
                host.wait("results", event)
            host.launch("results", run.ready.set, label="results")
        except StepError:  # given up: fail has set it
            run.ready.set()

    # ---- waiting and recovering, in the caller's thread

    def _prepare(self, program: Program) -> None:
        """Make memory for a program; the devices are idle."""
        for model in self.models:
            model.prepare(program)
        schedule = program.schedule
        for visit in schedule.visits:
            if schedule.trains(visit):
                action = Action(Op.DOWNLOAD, visit.number, chunk=0)
                self._prepare_gradients(visit, schedule.owners[action])
        if self._claims is not None:
            self._claims.claim_host(schedule, self._partials)
        for _, action in schedule.actions():
            if action.op in OF_LAYERS:
                self._streams.setdefault(HOST, set()).add("host")
        for name in schedule.streams:
            device, _, stream = name.rpartition(".")
            self._streams.setdefault(int(device) if device else HOST, set()).add(stream)

    def _prepare_gradients(self, visit: Visit, direct: Sequence[int]) -> None:
        """Make what a visit's gradients come down into: the segments, or partial sums."""
        for index in visit.layers:
            if index in direct:
                self.layers[index].gradients(partial_sums=False)
                continue
            size = self.layers[index].slot_gradient_layout.num_bytes
            held = self._partials.get((visit.number, index))
            if held is None or held.numel() != size:
                self._partials[visit.number, index] = allocate_host(size)

    def _fence(self) -> threading.Event:
        """An event that is set when all that was put before has run."""
        idle = threading.Event()
        if not self._streams or self.pool.is_closed:  # a pool ends when all has run
            idle.set()
            return idle
        marks: list[Handover] = []
        for worker, streams in self._streams.items():
            for stream in streams:
                mark = Handover()
                marks.append(mark)
                device = self.pool.device(worker)
                self.pool.worker(worker).put(
                    functools.partial(_mark, mark, functools.partial(device.record, stream))
                )

        def collect() -> None:
            with contextlib.suppress(DeviceError):  # closed: nobody waits for it
                for mark in marks:
                    self.pool.host.wait("results", mark.receive())
                self._idle = self.pool.host.record("results")
                self.pool.host.launch("results", idle.set, label="idle")

        self.pool.worker(RESULTS).put(collect)
        return idle

    def watch(self, ready: threading.Event) -> None:
        """Wait for ``ready`` in the caller's thread; raises StallError when nothing finishes."""
        self._watchdog.watch(ready)

    def _settle(self, *, patient: bool) -> bool:
        """Wait until nothing of a failed step is under way; False if something hangs."""
        stall = self._watchdog.stall_seconds
        limit = stall if patient else min(stall, _GRACE_SECONDS)
        return self._watchdog.is_set(self._fence(), limit)

    def _finish_updates(self) -> str:
        """Bring committed updates to their end, in order of steps; what to tell of it."""
        note = ""
        for run, update in self._active:
            if update is None or not update.is_half_done:
                continue
            try:
                update.finish()
                note = note or _FINISHED
            except Exception:
                logger.exception("finishing the updates of step %s", run.call.step)
                note = _MIXED
        return note

    def _forget_in_flight(self) -> None:
        for model in self.models:
            model.drop_in_flight()
        for layer in self.layers:
            layer.clear_gradients()
            layer.publish()  # at staleness 1 the step may have published some layers, not others
        self._active.clear()
        self._last = None


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, StepError) else error


def _mark(mark: Handover, record: Callable[[], Any]) -> None:
    try:
        mark.publish(record())
    except DeviceError as error:  # closed around work that hung
        mark.abandon(error)


def _is_over(run: Run, update: Update | None) -> bool:
    """Whether everything of a run, its updates included, has run."""
    return update is not None and update.is_committed and not update.is_half_done and run.is_over()
