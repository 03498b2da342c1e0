"""Partial sums of gradients on the host: where visits bring them, and who adds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.plan.actions import Action, Op
from roundpipe.store.pages import HostPages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roundpipe.engine.run import Run
    from roundpipe.plan.schedule import Schedule, Visit
    from roundpipe.store.layer import HostLayer


def partial_layers(schedule: Schedule, visit: Visit) -> Iterator[int]:
    """The layers of a visit whose gradients are merged on the host."""
    direct = schedule.owners[Action(Op.DOWNLOAD, visit.number, chunk=0)]
    return (layer for layer in visit.layers if layer not in direct)


class Partials:
    """Host memory for the partial sums of an engine's programs.

    ``buffers``: by place; visits use places in turn, see ``Schedule.partial_places``.
    """

    def __init__(self, layers: Sequence[HostLayer], pages: HostPages | None = None) -> None:
        self._layers, self._pages = layers, pages or HostPages()
        self.buffers: dict[int, Tensor] = {}

    def prepare(self, schedule: Schedule) -> None:
        """Make what gradients come down into: segments, or places. Nothing may be in flight."""
        largest: dict[int, int] = {}
        for visit in schedule.visits:
            if not schedule.trains(visit):
                continue
            merged = set(partial_layers(schedule, visit))
            for index in set(visit.layers) - merged:
                self._layers[index].gradients(partial_sums=False)
            place = schedule.partial_places.get(visit.number)
            if place is not None:
                size = sum(map(self._size, merged))
                largest[place] = max(size, largest.get(place, 0))
        for place, size in largest.items():
            if place not in self.buffers or self.buffers[place].numel() < size:
                self.buffers.pop(place, None)  # goes before the larger one comes
                self.buffers[place] = self._pages.allocate(size)

    def of(self, schedule: Schedule, visit: Visit) -> dict[int, Tensor]:
        """Where the partial sums of a visit's layers come down, by layer."""
        found: dict[int, Tensor] = {}
        if visit.number in schedule.partial_places:
            buffer, at = self.buffers[schedule.partial_places[visit.number]], 0
            for index in partial_layers(schedule, visit):
                found[index] = buffer.narrow(0, at, self._size(index))
                at += self._size(index)
        return found

    def merge(self, run: Run, action: Action) -> None:
        """``M``: add up, in the order of visits, what the visits of a stage brought."""
        schedule = run.program.schedule
        found: dict[int, dict[str, list[Tensor]]] = {owner: {} for owner in schedule.owners[action]}
        for number in schedule.addends[action]:
            for index, buffer in self.of(schedule, schedule.visits[number]).items():
                names = run.received[number, index]
                for owner, name, view in self._layers[index].partials(names, buffer):
                    found[owner].setdefault(name, []).append(view)
        for owner, by_name in found.items():
            self._layers[owner].add_partials_(by_name)

    def clear(self) -> None:
        """Give the memory back."""
        self.buffers.clear()

    def _size(self, layer: int) -> int:
        return self._layers[layer].slot_gradient_layout.num_bytes
