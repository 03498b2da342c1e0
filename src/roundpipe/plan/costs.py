"""What running and keeping each layer costs: the planner's only view of a model.

Seconds are for one microbatch on one device; bytes are of one layer, activations of one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer: seconds and activations of one microbatch. ``backward_seconds`` without recompute.

    Over the link: ``weight_bytes`` go up, ``download_bytes`` of a gradient come down (None: as
    ``gradient_bytes``), ``boundary_bytes`` are what the layer reads from the one below. On the
    device: ``gradient_bytes`` are the fp32 sums of what is trained, 0 where nothing is;
    ``activation_bytes`` stay from forward to backward, and ``peak_bytes`` come on top of them at
    the layer's worst moment. ``host_forward_seconds`` and ``host_backward_seconds`` are the Python
    that issues the work: one process runs one at a time, whatever the device.

    Of the host's memory, ``update_bytes`` are read and written by an update and its publishing,
    ``publish_bytes`` by publishing alone; ``pinned_bytes`` hold working weights and gradients,
    ``pageable_bytes`` masters and moments. ``borrows``: layers that own a parameter it reads too.
    Raises ValueError for a number below zero.
    """

    forward_seconds: float
    backward_seconds: float
    weight_bytes: int = 0  # what an upload of the layer moves, borrowed tensors included
    gradient_bytes: int = 0  # fp32 sums of its trainable parameters on the device
    download_bytes: int | None = None  # of a gradient that comes whole; None: as gradient_bytes
    boundary_bytes: int = 0  # what the layer reads from the layer below
    activation_bytes: int = 0  # kept between forward and backward
    peak_bytes: int = 0  # beside them at the worst moment of forward or backward
    host_forward_seconds: float = 0.0
    host_backward_seconds: float = 0.0
    update_bytes: int = 0  # host memory traffic of update and publish in one pass
    publish_bytes: int = 0  # host memory traffic of publishing alone: master read, working written
    pinned_bytes: int = 0  # host memory for working weights and gradients, of what it owns
    pageable_bytes: int = 0  # host memory for master weights and moments, of what it owns
    borrows: tuple[int, ...] = ()  # layers that own a parameter this layer reads too

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not value >= 0:
                raise ValueError(f"{each.name} must not be negative: {value}")

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter that the layer reads gets a gradient."""
        return self.gradient_bytes > 0

    @property
    def whole_download_bytes(self) -> int:
        """What comes down of a gradient to which one visit adds all."""
        return self.gradient_bytes if self.download_bytes is None else self.download_bytes


@dataclass(frozen=True)
class Costs:
    """The layers in order. ``owners``: those that own a parameter which the optimizer updates."""

    layers: tuple[LayerCost, ...]
    owners: frozenset[int]  # layers that own a trainable parameter

    @property
    def num_layers(self) -> int:
        """How many layers the chain has."""
        return len(self.layers)

    @property
    def first_trainable(self) -> int | None:
        """The lowest layer that needs a backward; None when nothing is trained."""
        return next((i for i, layer in enumerate(self.layers) if layer.is_trainable), None)

    def owners_read(self, layer: int) -> tuple[int, ...]:
        """The layers whose weights running ``layer`` reads: itself, then those it borrows from."""
        return (layer, *self.layers[layer].borrows)

    def owners_trained(self, layer: int) -> tuple[int, ...]:
        """The layers whose gradient a backward of ``layer`` adds to."""
        if not self.layers[layer].is_trainable:
            return ()
        return tuple(owner for owner in self.owners_read(layer) if owner in self.owners)
