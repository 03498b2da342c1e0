"""Master weights: what the optimizer updates, in ``optim_dtype``.

A 16-bit working weight has an fp32 master: a weight of 1.0 in bf16 does not move by 1e-4, its
master does. A parameter that already has the optimizer's dtype needs no second copy: its master is
the working weight itself (an *alias*), until `split` gives it storage of its own. That is what
staleness 1 needs, where the next step still reads the old weights while the optimizer writes.

The `nn.Parameter` objects stay the same, whatever moves underneath: optimizers hold them. The one
of a parameter that is frozen meanwhile is *retired*: it holds no memory and takes its value from
the working weight when the parameter is trained again.

[Note: masters that are away] Masters with storage of their own may be *away*, in files for example,
between an update and the next. They then keep shape and dtype (optimizers ask for them) but hold no
memory: one NaN, seen everywhere, which torch refuses to write to. An away master is published, so
whoever wants its value in the working dtype is given the working weight.
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

    def __init__(
        self,
        working: Mapping[str, Tensor],
        optim_dtype: torch.dtype | None,
        *,
        start_away: bool = False,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.retired: dict[str, nn.Parameter] = {}
        self._optim_dtype = optim_dtype
        self._working = dict(working)
        self._aliases: set[str] = set()
        self._start_away = start_away
        # Which are away, and whether the value that was taken still counts: where it does not, the
        # working weight is the truth (nothing was ever taken, or weights were loaded since).
        self._away: dict[str, bool] = {}
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
        own = [name for name in new if name not in aliases]
        values = {name: working[name] for name in aliases}
        self._away = {name: counts for name, counts in self._away.items() if name in working}
        if self._start_away:
            values |= {n: _stand_in(tuple(working[n].shape), dtypes[n]) for n in own}
            self._away |= dict.fromkeys(own, False)
        else:
            values |= self._cast({name: dtypes[name] for name in own})
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

    def _cast(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Casts of working weights, all in one segment."""
        shapes = {name: tuple(self._working[name].shape) for name in dtypes}
        own = Segment(Layout.of((name, shapes[name], dtype) for name, dtype in dtypes.items()))
        for name, view in own.views.items():
            view.copy_(self._working[name])
        return own.views

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
            if name not in self._aliases and name not in self._away:
                self._working[name].copy_(self.parameters[name])

    @torch.no_grad()
    def reload(self, names: Iterable[str] | None = None) -> None:
        """Take the working weights as the truth: the reverse of `publish`, after a load."""
        for name in self.parameters if names is None else names:
            if name in self._away:
                self._away[name] = False
            elif name not in self._aliases:
                self.parameters[name].copy_(self._working[name])

    @torch.no_grad()
    def newest(self, name: str) -> Tensor:
        """The master's value in the working dtype; a view where that needs no cast."""
        if name in self._away:
            return self._working[name]
        return self.parameters[name].detach().to(self._working[name].dtype)

    @torch.no_grad()
    def value(self, name: str, taken: Mapping[str, Tensor]) -> Tensor:
        """The master's value, wherever it is: a view, or where it is nowhere a cast of the weight.

        ``taken``: what `take_away` handed out, of masters that are away.
        """
        if name not in self._away:
            return self.parameters[name].detach()
        if self._away[name]:
            return taken[name]
        return self._working[name].to(self.parameters[name].dtype)

    @property
    def away(self) -> frozenset[str]:
        """The masters that hold no memory. See [Note: masters that are away]."""
        return frozenset(self._away)

    @torch.no_grad()
    def take_away(self) -> dict[str, Tensor]:
        """Hand out all masters with storage of their own, which must be published, and drop them.

        Whoever takes them keeps them until `bring_back`.
        """
        taken: dict[str, Tensor] = {}
        for name, master in self.parameters.items():
            if name in self._aliases or name in self._away:
                continue
            taken[name] = master.detach()
            master.data = _stand_in(tuple(master.shape), master.dtype)
            self._away[name] = True
        return taken

    @torch.no_grad()
    def bring_back(self, taken: Mapping[str, Tensor]) -> None:
        """Put all masters in memory again: from ``taken``, or from the working weight.

        ``taken``: what `take_away` handed out, in other memory perhaps; which of it still counts is
        known here. Takes memory before it changes anything. Nothing to do if none is away.
        """
        lost = [name for name, counts in self._away.items() if not counts]
        values = self._cast({name: self.parameters[name].dtype for name in lost})
        values |= {name: taken[name] for name, counts in self._away.items() if counts}
        for name in self._away:
            self.parameters[name].data = values[name]
        self._away.clear()


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of ``shape`` without memory of its own."""
    return torch.full((), torch.nan, dtype=dtype, device="cpu").expand(shape)
