"""What running and keeping each layer costs: the planner's only view of a model.

Seconds are for one microbatch on one device; bytes are of one layer, activations of one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer. ``backward_seconds`` is without recompute."""

    forward_seconds: float
    backward_seconds: float
    weight_bytes: int = 0  # what an upload of the layer moves, borrowed tensors included
    gradient_bytes: int = 0  # fp32 sums of its trainable parameters on the device
    activation_bytes: int = 0  # kept between forward and backward
    borrows: tuple[int, ...] = ()  # layers that own a parameter this layer reads too

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "backward_seconds", "weight_bytes", "gradient_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")

    @property
    def is_trainable(self) -> bool:
        """Whether any parameter that the layer reads gets a gradient."""
        return self.gradient_bytes > 0


@dataclass(frozen=True)
class Costs:
    """The layers in order. ``trainable`` owners are those an optimizer updates."""

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
