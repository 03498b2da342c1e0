"""Buffers that layers change in forward: running statistics, the vectors of spectral norm.

In plain PyTorch such a buffer goes from microbatch to microbatch. So here, on whatever devices:

1. The forward of a layer takes microbatches in order, in one visit, on one device. There the
   buffers go from each to the next, in memory of their own: a slot is only read.
2. What a call leaves in them is written to the host when nothing is under way any more, and the
   next call begins after that. A step that fails leaves them as the step before left them.
3. A recompute begins with the buffers as they were before its microbatch's forward; what it does to
   them counts for nothing, because that forward was counted.

Layers with torch's running statistics are known beforehand. Others are found the first time that
a buffer is written to. Up to then it was as on the host, so the layer is run again from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.plan.schedule import Schedule, Visit
    from roundpipe.store.layer import HostLayer

    Values = Mapping[str, Tensor]  # by full name


class BufferState:
    """One model's changing buffers; shared by its devices. See the module docstring.

    ``statistics``: the user's modules that are known to change theirs in training.
    """

    def __init__(self, layers: Sequence[HostLayer], statistics: Sequence[nn.Module] = ()) -> None:
        self._layers, self._statistics = layers, statistics
        self._names: dict[int, frozenset[str]] = {}
        self._made: dict[int, Values] = {}  # by layer, on a device, what a call left
        self._before: dict[tuple[int, str], Tensor] = {}  # what a step in making has changed
        self._is_stepped = False

    @property
    def is_in_order(self) -> bool:
        """Whether calls must follow each other: a layer is known to change a buffer."""
        return bool(self._names) or any(module.training for module in self._statistics)

    def names(self, layer: int) -> frozenset[str]:
        """The buffers that a layer was seen to change."""
        return self._names.get(layer, frozenset())

    def found(self, layer: int, names: Iterable[str]) -> None:
        """A layer changes these. Raises ModelError if another layer reads one of them."""
        new = frozenset(names) - self.names(layer)
        if not new:
            return
        lent = [borrowed for each in self._layers for borrowed in each.borrowed]
        for owner, name in lent:
            if name in new:
                raise ModelError(
                    f"a buffer that several layers read changes in forward: {name}, of {owner.name}"
                    "\nhint: give each layer a module of its own"
                )
        for name in new:
            self._place(layer, name)
        self._names[layer] = self.names(layer) | new

    def require_in_order(self, visit: Visit, schedule: Schedule, layer: int) -> None:
        """Raise ModelError if a visit that changes buffers does not take all microbatches."""
        if visit.microbatches != tuple(range(schedule.num_microbatches)):
            name = min(self.names(layer), default="")
            raise ModelError(
                f"a buffer changes in forward, from microbatch to microbatch: {name}; but the "
                "schedule runs its layer on several devices or in rounds"
                "\nhint: schedule='round_robin'"
            )

    def on_host(self, layer: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Buffers as the last call left them."""
        return {name: self._layers[layer].newest(name) for name in names}

    def leave(self, layer: int, values: Values) -> None:
        """What a microbatch has left in a layer's buffers; the last one's is kept.

        Raises ModelError for one that does not fit into its place any more.
        """
        for name, value in values.items():
            there = self._place(layer, name)
            if there.shape != value.shape or there.dtype != value.dtype:
                raise ModelError(
                    f"a buffer has another shape or dtype after forward: {name}: "
                    f"{tuple(there.shape)} {there.dtype} -> {tuple(value.shape)} {value.dtype}"
                    "\nhint: keep it as it is, or in an attribute that is no buffer"
                )
        self._made[layer] = {**self._made.get(layer, {}), **values}

    # ---- with nothing under way

    def stepped(self) -> None:
        """An update was begun: what calls have left until now stays, if that commits."""
        self._is_stepped = True

    @torch.no_grad()
    def write(self) -> None:
        """Write to the host what calls have left; without a step it can still be taken back."""
        for layer, values in self._made.items():
            for name, value in values.items():
                there = self._place(layer, name)
                self._layers[layer].wait_unread()
                if (layer, name) not in self._before:
                    self._before[layer, name] = there.clone()
                there.copy_(value)
        self._made.clear()
        if self._is_stepped:
            self.commit()

    def commit(self) -> None:
        """What was written stays."""
        self._before.clear()
        self._is_stepped = False

    @torch.no_grad()
    def take_back(self) -> None:
        """The step in making has failed: all is as the last step left it."""
        for (layer, name), value in self._before.items():
            self._layers[layer].wait_unread()
            self._place(layer, name).copy_(value)
        self._made.clear()
        self.commit()

    def _place(self, layer: int, name: str) -> Tensor:
        host = self._layers[layer]
        if host.held is not None and name in host.held:
            raise ModelError(
                f"a buffer that lies in a mapped file changes in forward: {name}"
                "\nhint: load the model by transformers and wrap it"
            )
        return host.weights.views[name]
