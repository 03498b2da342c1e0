"""What goes up to a device as one run of bytes, outside of any schedule: for generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from roundpipe.plan.actions import Op
from roundpipe.store.frozen import Stored, UploadPiece, pieces
from roundpipe.store.packed import PackedTensor
from roundpipe.store.segment import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roundpipe.engine.device_model import DeviceModel
    from roundpipe.store.layer import HostLayer
    from roundpipe.store.packed import Packed


@dataclass(frozen=True)
class Upload:
    """Copies that fill ``layout``. ``trained``: which of its tensors have masters, and whose."""

    label: str
    layout: Layout
    pieces: Sequence[UploadPiece]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    trained: Sequence[tuple[HostLayer, str]] = ()

    @classmethod
    def of_layer(cls, layer: HostLayer) -> Upload:
        """All that one layer reads."""
        lent = [(owner, name) for owner, name in layer.borrowed if name in owner.trainable]
        return cls(
            layer.name,
            layer.slot_layout,
            layer.upload_pieces(),
            layer.packed,
            [*((layer, name) for name in layer.trainable), *lent],
        )

    @classmethod
    def of_tensors(
        cls, label: str, tensors: Mapping[str, Tensor], layers: Sequence[HostLayer]
    ) -> Upload:
        """Single tensors by name: from the layers that own them, or as they are; each once."""
        every = {name: layer for layer in layers for name in layer.tensors}
        owners = {name: every[name] for name in tensors if name in every}
        stored = [entry for name, layer in owners.items() for entry in layer.stored(name)]
        stored += [_where(name, t) for name, t in tensors.items() if name not in owners]
        layout = Layout.of((entry.name, entry.shape, entry.dtype) for entry in stored)
        return cls(
            label,
            layout,
            list(pieces(stored, layout.by_name)),
            {name: owner.packed[name] for name, owner in owners.items() if name in owner.packed},
            [(owner, name) for name, owner in owners.items() if name in owner.trainable],
        )

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return self.layout.num_bytes

    @property
    def unpacked_bytes(self) -> int:
        """What its packed tensors take when unpacked."""
        return sum(packed.num_bytes for packed in self.packed.values())

    def views(self, buffer: Tensor) -> dict[str, Tensor | PackedTensor]:
        """The tensors in a device's ``buffer``, by name."""
        views = self.layout.view(buffer)
        return {**views, **{name: PackedTensor(how, views) for name, how in self.packed.items()}}

    def fill(self, model: DeviceModel, buffer: Tensor, *, newest: bool) -> None:
        """Copy everything into ``buffer``; run by the weights stream.

        ``newest``: then write what masters say over the working weights.
        """
        buffer = buffer.narrow(0, 0, self.num_bytes)
        model.device.poison(buffer)
        for piece in self.pieces:
            model.staging.up(buffer.narrow(0, piece.offset, piece.num_bytes), piece.source)
            if piece.let_go is not None:
                piece.let_go(0, piece.num_bytes)
        model.traffic.add(Op.UPLOAD, self.num_bytes, len(self.pieces))
        views = self.layout.view(buffer) if newest else {}
        for owner, name in self.trained if newest else ():
            views[name].copy_(owner.newest(name))


def _where(name: str, tensor: Tensor) -> Stored:
    """A tensor of the user's module that no layer has, as an entry."""
    tensor = tensor.detach().contiguous()
    data = tensor.reshape(-1).view(torch.uint8)
    return Stored(name, tuple(tensor.shape), tensor.dtype, data, 0, data.numel(), None)
