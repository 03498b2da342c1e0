"""The buffers of a shell: where they hang, which of them a forward changes, which it has changed.

Most buffers are read and never written. Those that a forward writes to (running statistics, the
vectors of spectral norm) carry something from microbatch to microbatch, which whoever runs the
layer has to keep. A change shows in the version counter that torch keeps of every tensor, or in
another tensor that hangs in the place; only torch's own norms write past that counter, so for them
it is known beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    Place = tuple[dict[str, Tensor | None], str]  # a module's buffers, the name there

# What torch's norms update in training, by operations that leave version counters alone.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics_in(root: nn.Module) -> list[nn.Module]:
    """The modules of a tree that keep running statistics, in whatever mode they are now."""
    return [module for module in root.modules() if _statistics(module)]


def _statistics(module: nn.Module) -> list[str]:
    if not (isinstance(module, _NormBase) and module.track_running_stats):
        return []
    return [name for name in _STATISTICS if module._buffers.get(name) is not None]


class ShellBuffers:
    """See the module docstring. ``places``: where each buffer hangs, by full name."""

    def __init__(self, places: Mapping[str, Sequence[Place]], modules: Iterable[nn.Module]) -> None:
        self._places = places
        names = {(id(held), local): name for name, at in places.items() for held, local in at}
        self._norms = [
            (module, [names[id(module._buffers), local] for local in _statistics(module)])
            for module in modules
            if _statistics(module)
        ]
        self._hung: dict[str, tuple[Tensor, int]] = {}

    @property
    def changing(self) -> set[str]:
        """Those that are known to be written to in the modes that the modules are in."""
        return {name for module, names in self._norms if module.training for name in names}

    def hang(self, tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> None:
        """Put ``tensors`` in the places of the buffers ``names``, by default of all of theirs."""
        for name in tensors if names is None else names:
            tensor = tensors[name]
            assert isinstance(tensor, Tensor), name
            # .data: a version counter of its own, not that of the memory it is a view of
            view = tensor.data
            for held, local in self._places[name]:
                held[local] = view
            self._hung[name] = (view, view._version)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Put each buffer's tensor in its places; ``tensors`` may hold other names too."""
        self.hang(tensors, self._places)

    @property
    def values(self) -> dict[str, Tensor]:
        """What hangs there now, by full name.

        Raises ModelError where a forward has replaced a buffer in one of its places only.
        """
        return {name: self._value(name) for name in self._places}

    def _value(self, name: str) -> Tensor:
        found = {id(held[local]): held[local] for held, local in self._places[name]}
        values = list(found.values())
        if len(values) != 1 or values[0] is None:
            raise ModelError(
                f"a buffer that hangs in several places was changed in one of them: {name}\n"
                "hint: write to it in place"
            )
        return values[0]

    def changed(self) -> list[str]:
        """Those that were written to or replaced since they were hung there."""
        return [
            name
            for name, (view, version) in self._hung.items()
            if view._version != version
            or any(held[local] is not view for held, local in self._places[name])
        ]
