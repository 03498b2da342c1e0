"""What of a model no part owns: parameters that the code between parts reads, and what is lent.

They lie in a host layer, with masters like any other. The outer code reads them where they are, and
autograd leaves their gradients in ``.grad``, from where a step takes them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ModelError
from roundpipe.store.build import build_store, relayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from roundpipe.models.parts import Part
    from roundpipe.store.layer import HostLayer
    from roundpipe.store.pages import HostPages


class Outside:
    """See the module docstring. ``layers`` is one host layer."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        *,
        optim_dtype: torch.dtype | None,
        pages: HostPages,
    ) -> None:
        self._model = model
        self._guards: dict[int, Any] = {}
        names = [type(model).__name__]
        self.layers = build_store(
            [_stays(model, parts)], names=names, optim_dtype=optim_dtype, pages=pages
        )

    def names(self) -> dict[int, str]:
        """The first name of every parameter of the model, by the parameter's ``id``."""
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    def take_gradients(self) -> None:
        """Bring what autograd left in ``.grad`` to the host layer."""
        for layer in self.layers:
            for name in layer.trainable:
                gradient = layer.tensors[name].grad
                if gradient is not None:
                    layer.gradients(partial_sums=False).views[name].copy_(gradient)
                    layer.mark_received([name])

    def forget_gradients(self) -> None:
        """Let go of them, in both places."""
        for layer in self.layers:
            for tensor in layer.tensors.values():
                tensor.grad = None
            layer.clear_gradients()

    def relayout(self) -> None:
        """Follow what is trained now."""
        relayout(self.layers)

    def guard(self, layers: Sequence[HostLayer]) -> None:
        """Raise from backward where the host makes a gradient for a weight of a part's ``layers``.

        Nothing would read it.
        """
        trained = [layer.tensors[name] for layer in layers for name in layer.trainable]
        new = [t for t in trained if id(t) not in self._guards and t.requires_grad]
        names = self.names() if new else {}
        for tensor in new:
            refuse = functools.partial(_refuse_gradient, names[id(tensor)])
            added = tensor.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]
            self._guards[id(tensor)] = added

    def close(self) -> None:
        """Leave the module with the newest weights and nothing of ours on it."""
        for guard in self._guards.values():
            guard.remove()
        self._guards.clear()
        for layer in self.layers:
            layer.publish()


def _stays(model: nn.Module, parts: Sequence[Part]) -> dict[str, Tensor]:
    lent = {id(loan.tensor) for part in parts for loan in part.loans}
    owned = {
        id(tensor)
        for part in parts
        for tensor in (*part.module.parameters(), *part.module.buffers())
    }
    every = (*model.named_parameters(), *model.named_buffers())
    return {name: t for name, t in every if id(t) not in owned or id(t) in lent}


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise ModelError(
        f"the code outside a part computes with its weight, whose gradient would be lost: {name}\n"
        f"hint: leave its module out: skip_modules=[model.get_submodule("
        f"{name.rpartition('.')[0]!r})]"
    )
