"""Issues the actions of a run to the streams of one device after the other's order allows it.

One host thread a device goes through its items: wait until what an item waits for is *issued*, tell
the stream to wait for its events, put the work on the stream, publish its own event. Whatever fails
in a work or in here ends the run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roundpipe.device.fake import FakeDevice
from roundpipe.engine.claims import Claims
from roundpipe.engine.compute import Compute
from roundpipe.engine.program import HOST
from roundpipe.engine.staging import wait_for
from roundpipe.engine.transfer import TRANSFERS, download_gradients
from roundpipe.plan.actions import COMPUTE, Op
from roundpipe.plan.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roundpipe.device.api import Event
    from roundpipe.device.emulated_links import Load
    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.layer_run import Known
    from roundpipe.engine.partials import Partials
    from roundpipe.engine.pool import DevicePool
    from roundpipe.engine.program import Item
    from roundpipe.engine.run import Run
    from roundpipe.engine.state import BufferState
    from roundpipe.plan.actions import Action
    from roundpipe.store.layer import HostLayer

    Fail = Callable[[Run, BaseException, "Action | None"], None]

_UNSEEN = Footprint()  # real devices do not look


class Issuer:
    """See the module docstring. ``fail`` ends a run; called from any thread."""

    def __init__(
        self,
        pool: DevicePool,
        models: Sequence[DeviceModel],
        layers: Sequence[HostLayer],
        partials: Partials,
        fail: Fail,
    ) -> None:
        self._pool, self._layers, self._partials, self._fail = pool, layers, partials, fail
        self._models = models
        self._computes: list[Compute] = []
        is_fake = isinstance(pool.host, FakeDevice)
        self.claims = Claims(pool.host, models, layers) if is_fake else None

    def share(self, known: Known, state: BufferState) -> None:
        """Let all devices know the same of the model's layers."""
        self._computes = [Compute(model, known, state) for model in self._models]

    def issue(self, run: Run, worker: int, items: Sequence[Item]) -> None:
        """Put ``items`` on the worker's streams; blocks while others have not issued yet."""
        try:
            device = self._pool.device(worker)
            for item in items:
                if run.failure is not None:
                    return
                if item.throttle is not None:
                    run.event(item.throttle).wait()
                action, stream = item.action, item.stream
                for wait in item.waits:
                    event = run.receive(wait)
                    if event is not None:
                        wait_for(device, stream, event, on_host=worker == HOST)
                prints = self.claims.footprint(run, action) if self.claims else _UNSEEN
                timing = device.launch(
                    stream,
                    partial(self._execute, run, worker, action),
                    reads=prints.reads,
                    writes=prints.writes,
                    timed=True,
                    label=action,
                    on_error=partial(self._on_error, run, action),
                )
                if timing is not None:
                    run.timings.add(worker, item, timing)
                event = device.record(stream)
                if worker != HOST:
                    event = self._models[worker].staging.landed(stream, event)
                run.publish(action, event)
        except BaseException as error:  # a bug of ours, or a run that was given up
            if run.failure is None:
                self._fail(run, error, None)

    def begin_anew(self, worker: int, streams: Sequence[str], idle: Event) -> None:
        """Order all streams behind a drain. Real devices know; a fake one only believes events."""
        for stream in streams:
            self._pool.device(worker).wait(stream, idle)

    def _on_error(self, run: Run, action: Action, error: BaseException) -> None:
        self._fail(run, error, action)

    def _execute(self, run: Run, worker: int, action: Action) -> Load | None:
        """What a stream runs for an action; what that takes where devices are emulated."""
        if run.failure is None:
            op = action.op
            if op in COMPUTE:
                run.call.caller.run(partial(self._computes[worker].run, run, action))
            elif op in TRANSFERS:
                TRANSFERS[op](run, self._models[worker], action)
            elif op is Op.DOWNLOAD:
                download_gradients(run, self._models[worker], action, self._partials)
            elif op is Op.MERGE:
                self._partials.merge(run, action)
            elif op is Op.PUBLISH:
                self._layers[action.index].publish()
            else:
                assert run.update is not None
                if op is Op.NORM:
                    run.update.norm(action.index)
                else:
                    run.update.update(action.index, run.program.updated)
        self._pool.num_finished += 1
        return run.load(action) if self._pool.is_emulated else None
