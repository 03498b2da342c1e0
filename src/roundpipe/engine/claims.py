"""Tells the fake device which memory each buffer of a schedule is.

Only the fake device asks: it then sees a work that touches memory it did not declare, and two
buffers that share bytes. On any other device nothing here is made. Several engines may share a
pool, so each one's buffers have names of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.footprint import Footprint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roundpipe.device.api import Device
    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.engine.run import Run
    from roundpipe.plan.footprint import Buffer
    from roundpipe.plan.schedule import Schedule
    from roundpipe.store.layer import HostLayer


@dataclass(frozen=True)
class _Name:
    """A buffer of one engine."""

    engine: int
    buffer: Buffer

    def __repr__(self) -> str:
        return repr(self.buffer)


class Claims:
    """What one engine's buffers are. ``host`` and the devices share one ledger."""

    def __init__(
        self, host: Device, models: Sequence[DeviceModel], layers: Sequence[HostLayer]
    ) -> None:
        self._host, self._models, self._layers = host, models, layers

    def claim_host(self, schedule: Schedule, partials: Mapping[tuple[int, int], Tensor]) -> None:
        """Name the host's memory anew before a schedule runs; nothing may be in flight."""
        trained = {action.index for _, action in schedule.actions() if action.op is Op.UPDATE}
        for layer in self._layers:
            self._claim(("weights", layer.index), layer.weights.buffer)
            if layer.index in trained:
                masters = [master.detach() for master in layer.masters.values()]
                self._claim(("master", layer.index), *masters)
                gradients = layer.gradient_segment
                held = [] if gradients is None else [gradients.buffer]
                self._claim(("gradient", layer.index), *held)
        for visit in schedule.visits:
            of_visit = [partials[key] for key in partials if key[0] == visit.number]
            self._claim(("partial", visit.number), *of_visit)

    def footprint(self, run: Run, action: Action) -> Footprint:
        """What ``action`` touches, by this engine's names; claims what it is the first to fill."""
        prints = run.prints.of(action)
        if action.op is Op.UPLOAD and action.chunk == 0:
            visit = run.program.schedule.visits[action.index]
            slot = self._models[visit.device].slot(visit, run.prints.slot[visit.number])
            self._claim(prints.writes[0], slot)
        elif action.op in (Op.FUSED, Op.BACKWARD):
            visit = run.program.schedule.visits[action.index]
            if run.program.schedule.trains(visit) and action.microbatch == visit.microbatches[0]:
                turn = run.prints.sums[visit.number]
                sums = self._models[visit.device].sums_slot(visit, turn)
                self._claim(("sums", visit.device, turn), sums)
        return Footprint(self._named(prints.reads), self._named(prints.writes))

    def _claim(self, buffer: Buffer, *memory: Tensor) -> None:
        name = _Name(id(self), buffer)
        self._host.disown(name)
        for tensor in memory:
            self._host.own(name, tensor)
        if not memory:
            self._host.own(name, self._models[0].weights.nothing)

    def _named(self, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        return tuple((_Name(id(self), buffer),) for buffer in buffers)
