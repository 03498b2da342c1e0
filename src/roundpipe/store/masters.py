"""Master weights: what the optimizer updates, in ``optim_dtype``.

A 16-bit working weight has an fp32 master: a weight of 1.0 in bf16 does not move by 1e-4, its
master does. A parameter that already has the optimizer's dtype needs no second copy: its master is
the working weight itself (an *alias*), until `split` gives it storage of its own. That is what
staleness 1 needs, where the next step still reads the old weights while the optimizer writes.

The `nn.Parameter` objects stay the same, whatever moves underneath: optimizers hold them. The one
of a parameter that is frozen meanwhile is *retired*: it holds no memory and takes its value from
the working weight when the parameter is trained again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roundpipe.store.segment import Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


def master_dtype(working: torch.dtype, optim_dtype: torch.dtype | None) -> torch.dtype:
    """The master's dtype: ``optim_dtype``, by default fp32 for 16-bit and unchanged for others."""
    if optim_dtype is not None:
        return optim_dtype
    return torch.float32 if working in {torch.bfloat16, torch.float16} else working


class Masters:
    """The masters of one layer over its working weights (trainable only, in parameter order)."""

    def __init__(self, working: Mapping[str, Tensor], optim_dtype: torch.dtype | None) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.retired: dict[str, nn.Parameter] = {}
        self._optim_dtype = optim_dtype
        self._working = dict(working)
        self._aliases: set[str] = set()
        self.rebind(working)

    @torch.no_grad()
    def rebind(self, working: Mapping[str, Tensor]) -> None:
        """Follow the working weights to new places, and a changed set of trainable ones.

        Masters still trainable keep object and value; new ones start as a cast of their weight;
        the others are retired.
        """
        kept, self._working = self.parameters, dict(working)
        for name in kept.keys() - working.keys():
            self.retired[name] = kept[name]
            kept[name].data = kept[name].new_empty(0)
        dtypes = {n: master_dtype(w.dtype, self._optim_dtype) for n, w in working.items()}
        new = [name for name in working if name not in kept]
        aliases = {name for name in new if dtypes[name] == working[name].dtype}
        own = Segment(Layout.of((n, tuple(working[n].shape), dtypes[n]) for n in new
                                if n not in aliases))  # fmt: skip
        for name, view in own.views.items():
            view.copy_(working[name])
        values = {**own.views, **{name: working[name] for name in aliases}}
        self.parameters = {
            name: kept[name] if name in kept else self._new(name, values[name]) for name in working
        }
        self._aliases = {name for name in self._aliases if name in working}
        for name in self._aliases:
            self.parameters[name].data = working[name]
        self._aliases |= aliases

    def _new(self, name: str, value: Tensor) -> nn.Parameter:
        parameter = self.retired.pop(name, None)
        if parameter is None:
            return nn.Parameter(value)
        parameter.data = value
        return parameter

    def is_alias(self, name: str) -> bool:
        """Whether the master of ``name`` is the working weight itself."""
        return name in self._aliases

    @torch.no_grad()
    def split(self) -> None:
        """Give every alias storage of its own, so that updates wait for `publish`."""
        own = Segment(
            Layout.of(
                (name, tuple(view.shape), view.dtype)
                for name, view in self._working.items()
                if name in self._aliases
            )
        )
        for name, view in own.views.items():
            view.copy_(self._working[name])
            self.parameters[name].data = view
        self._aliases.clear()

    @torch.no_grad()
    def publish(self, names: Iterable[str] | None = None) -> None:
        """Cast masters into the working weights; nothing to do for aliases."""
        for name in self.parameters if names is None else names:
            if name not in self._aliases:
                self._working[name].copy_(self.parameters[name])

    @torch.no_grad()
    def reload(self, names: Iterable[str] | None = None) -> None:
        """Take the working weights as the truth: the reverse of `publish`, after a load."""
        for name in self.parameters if names is None else names:
            if name not in self._aliases:
                self.parameters[name].copy_(self._working[name])

    @torch.no_grad()
    def newest(self, name: str) -> Tensor:
        """The master's value in the working dtype; a view where that needs no cast."""
        return self.parameters[name].detach().to(self._working[name].dtype)
