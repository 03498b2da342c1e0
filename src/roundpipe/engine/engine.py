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

from roundpipe.engine.device_model import DeviceModel
from roundpipe.engine.handover import Handover
from roundpipe.engine.issue import Issuer
from roundpipe.engine.layer_run import Known
from roundpipe.engine.partials import Partials
from roundpipe.engine.passing import PassingBlocks
from roundpipe.engine.pool import RESULTS
from roundpipe.engine.program import HOST, Program
from roundpipe.engine.run import Call, Run
from roundpipe.engine.staging import Staging
from roundpipe.engine.state import BufferState
from roundpipe.engine.traffic import Traffic
from roundpipe.engine.updates import LossScale, Update
from roundpipe.engine.watchdog import Watchdog
from roundpipe.errors import DeviceError, StallError, StepError
from roundpipe.models.buffers import statistics_in
from roundpipe.plan.actions import OF_LAYERS, Action
from roundpipe.plan.footprint import Footprints, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.device.api import Event
    from roundpipe.engine.pool import DevicePool
    from roundpipe.models.spec import ModelSpec
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.store.layer import HostLayer
    from roundpipe.store.pages import HostPages

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 2.0
_STILL_UNDER_WAY = "\nhint: some of its work is still under way; the next call waits for that"
_FINISHED = "\nhint: the step was committed; its remaining updates were made after all"
_MIXED = (
    "\nhint: the weights are mixed: some may be a step ahead of others; load the last checkpoint"
)


class Engine:
    """One model on a pool. Used from one thread at a time.

    ``stall_seconds``: how long nothing may finish before a step is given up. ``pages``: page-locks
    what devices copy to and from, by default as the pool does.
    """

    def __init__(
        self,
        pool: DevicePool,
        spec: ModelSpec,
        layers: Sequence[HostLayer],
        *,
        stall_seconds: float = 600.0,
        pages: HostPages | None = None,
    ) -> None:
        self.pool, self.spec, self.layers = pool, spec, layers
        self._watchdog = Watchdog(pool, stall_seconds)
        self.known = Known()
        self.state = BufferState(layers, statistics_in(spec.module))
        pages = pages or pool.pages
        passing = PassingBlocks(pages)
        self.models = [
            DeviceModel(device, index, spec, layers, staging=Staging(device, pages, passing))
            for index, device in enumerate(pool.devices)
        ]
        self._partials = Partials(layers, pages)
        self._issuer = Issuer(pool, self.models, layers, self._partials, self.fail)
        self._issuer.share(self.known, self.state)
        self._turns = Turns()
        self._active: list[tuple[Run, Update | None]] = []
        self._last: Run | None = None
        self._last_update: Update | None = None
        self.last_checkpoint = ""  # what to load where a failure leaves weights mixed, for people
        self.is_mixed = False  # weights are of two versions; until others are loaded
        self._failed: Run | None = None
        self._is_told = False  # whether the failure was raised, though something still hangs
        self.num_recovered = 0  # failures whose steps have been forgotten
        self.first_lost: int | None = None  # the number of the first call that the last took along
        self._streams: dict[int, set[str]] = {}
        self._idle: Event | None = None  # everything before the last drain

    @property
    def traffic(self) -> Traffic:
        """What has crossed the devices' links so far, all devices together."""
        return Traffic.sum(model.traffic for model in self.models)

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
                    task = functools.partial(
                        self._issuer.begin_anew, worker, tuple(streams), self._idle
                    )
                    self.pool.worker(worker).put(task)
            for worker, items in program.during_call.items():
                self.pool.worker(worker).put(
                    functools.partial(self._issuer.issue, run, worker, items)
                )
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
        """Begin the updates that follow ``run``; returns at once.

        Blocks until they are made where ``run`` was started for an eager step and this is none.
        """
        self._last_update = update
        if run.program.schedule.is_eager and not update.is_eager:
            self._step_whole(run, update)
            return
        self.state.stepped()
        run.update = update  # before the look at its failure: `fail` looks the other way round
        others = [pair for pair in self._active if pair[0] is not run]
        self._active = [*others, (run, update)]  # a drain since the call has taken it out
        if run.failure is not None:
            update.fail(run.failure)
        if not (items := run.program.at_step):  # nothing is trained
            update.nothing_to_do()
        self.pool.worker(HOST).put(functools.partial(self._issuer.issue, run, HOST, items))

    def _step_whole(self, run: Run, update: Update) -> None:
        """Commit, as a whole, a run whose schedule takes no norms: when all gradients are there."""
        try:
            self.drain()
            self._active.append((run, update))
            update.run(run.program.updated)
            self.state.commit()
        except BaseException as error:
            update.fail(error)  # whoever waits for it must not wait for ever
            if not self._active:  # the run itself had failed
                raise
            self.fail(run, error)
        self.raise_failure()
        self._active.clear()

    def loss_scale(self, scaler: GradScaler) -> LossScale:
        """What the losses of the step in making are multiplied by, for its calls."""
        return LossScale(scaler, self._last_update)

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
        self._land()
        self.state.write()
        self._last = None
        self._active.clear()

    def _land(self) -> None:
        """Bring down to the host what devices have copied; nothing is under way."""
        for model in self.models:
            model.staging.land()

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
            if is_told and not note.startswith(_MIXED):
                return
        else:
            note, self._is_told = _STILL_UNDER_WAY, True
        error = run.failure if run is not None else None
        if run is None or error is None:
            raise StepError(f"the call before was interrupted{note}")
        if isinstance(error, Exception) or is_told:
            names = [device.name for device in self.pool.devices]
            told = run.as_step_error(self.spec, names, note)
            if note.startswith(_MIXED) and note not in str(told):
                told = type(told)(f"{told}{note}")
            raise told from _cause(error)
        raise error

    def _recover(self) -> str:
        """Bring the state to the last committed step's; what there is to tell of it."""
        self._land()
        last = self._active[-1][1] if self._active else None  # what buffers hold is of the last run
        if last is not None and last.is_committed:
            self.state.write()  # the calls of a step that committed had ended well
        else:
            self.state.take_back()
        note = self._finish_updates()
        lost = (run.call.step for run, update in self._active if run.is_lost(update))
        self.first_lost = min(lost, default=None)
        self._forget_in_flight()
        self._failed, self._is_told = None, False
        self.num_recovered += 1
        return note

    @property
    def is_whole(self) -> bool:
        """Whether all weights and all state are of one step, and nothing writes to them any more.

        To be asked after a `drain`, whether or not that raised.
        """
        return not self.is_mixed and not self._is_told

    def close(self) -> None:
        """Finish what is under way, unless it hangs, and give the devices' memory back.

        Host memory too that a pool would go on locking, unless something hangs that copies there.
        The pool is its owner's to close.
        """
        if not self._is_told and self._settle(patient=False):
            if self._failed is None:
                self.state.write()
                self.state.commit()
            self._recover()
            for model in self.models:
                model.staging.close()
                model.let_go()
            self._partials.clear()
        for model in self.models:
            model.close()

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
        self._partials.prepare(schedule)
        if self._issuer.claims is not None:
            self._issuer.claims.claim_host(schedule, self._partials.buffers)
        for _, action in schedule.actions():
            if action.op in OF_LAYERS:
                self._streams.setdefault(HOST, set()).add("host")
        for name in schedule.streams:
            device, _, stream = name.rpartition(".")
            self._streams.setdefault(int(device) if device else HOST, set()).add(stream)

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
            if update.is_eager and run.failure is not None:  # gradients will never be there
                note, self.is_mixed = self._mixed, True
                continue
            try:
                update.finish()
                note = note or _FINISHED
            except Exception:
                logger.exception("finishing the updates of step %s", run.call.step)
                note, self.is_mixed = self._mixed, True
        return note

    @property
    def _mixed(self) -> str:
        return _MIXED + (f": {self.last_checkpoint}" if self.last_checkpoint else "")

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
