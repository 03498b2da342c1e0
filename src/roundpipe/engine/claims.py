"""Tells the fake device which memory each buffer of a schedule is.

Only the fake device asks: it then sees a work that touches memory it did not declare, and two
buffers that share bytes. On any other device nothing here is made. Several engines may share a
pool, so each one's buffers have names of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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


class Claims:
    """One engine's buffers. ``host`` shares its ledger with the devices."""

    def __init__(
        self, host: Device, models: Sequence[DeviceModel], layers: Sequence[HostLayer]
    ) -> None:
        self._host, self._models, self._layers = host, models, layers

    def claim_host(self, schedule: Schedule, partials: Mapping[int, Tensor]) -> None:
        """Name the host's memory anew before a schedule runs; nothing may be in flight."""
        trained = {action.index for _, action in schedule.actions() if action.op is Op.UPDATE}
        merged = {
            owner
            for action, owners in schedule.owners.items()
            if action.op is Op.MERGE
            for owner in owners
        }
        for layer in self._layers:
            held = [layer.held.base.segment.buffer] if layer.held is not None else []
            self._claim(("weights", layer.index), [layer.weights.buffer, *held])
            if layer.index in trained:
                masters = [master.detach() for master in layer.masters.values()]
                self._claim(("master", layer.index), masters)
                gradients = layer.gradients(partial_sums=layer.index in merged)
                self._claim(("gradient", layer.index), [gradients.buffer])
        for place, buffer in partials.items():
            self._claim(("partial", place), [buffer])

    def footprint(self, run: Run, action: Action) -> Footprint:
        """What ``action`` touches, by this engine's names; claims the slot it is first to fill."""
        prints = run.prints.of(action)
        if action.op is Op.UPDATE and run.update is not None and not run.update.is_layered:
            is_first = action.index == run.program.updated[0]
            prints = self._whole_update(run) if is_first else Footprint()
        if action.op is Op.UPLOAD and action.chunk == 0:
            visit = run.program.schedule.visits[action.index]
            turn = run.prints.slot[visit.number]
            slot = self._models[visit.device].slot(visit, turn)
            self._claim(("slot", visit.device, turn), [slot])
        elif action.op in (Op.FUSED, Op.BACKWARD):
            visit = run.program.schedule.visits[action.index]
            if run.program.schedule.trains(visit) and action.microbatch == visit.microbatches[0]:
                turn = run.prints.sums[visit.number]
                sums = self._models[visit.device].sums_slot(visit, turn)
                self._claim(("sums", visit.device, turn), [sums])
        return Footprint(
            tuple(self._named(buffer) for buffer in prints.reads),
            tuple(self._named(buffer) for buffer in prints.writes),
        )

    def _whole_update(self, run: Run) -> Footprint:
        """All that an optimizer touches that steps as a whole, at the first layer's turn.

        Others wait for each layer's own update, which comes later. It may scale gradients.
        """
        every = [run.prints.of(Action(Op.UPDATE, layer)) for layer in run.program.updated]
        reads = dict.fromkeys(buffer for each in every for buffer in each.reads)
        writes = dict.fromkeys(buffer for each in every for buffer in each.writes)
        used_up = [buffer for buffer in reads if buffer[0] == "gradient"]
        return Footprint(tuple(reads), (*writes, *used_up))

    def _claim(self, buffer: Buffer, memory: Sequence[Tensor]) -> None:
        name = self._named(buffer)
        self._host.disown(name)
        for tensor in memory or [torch.empty(0)]:
            self._host.own(name, tensor)

    def _named(self, buffer: Buffer) -> Buffer:
        return (*buffer, id(self))
