"""One layer's tensors on the host: working weights, masters, gradients.

        own weights segment                              borrowed
    +-----------------+--------------------+     +---------------------+
    | trainable       | frozen and buffers |     | a tied head's table |      slot_layout
    +-----------------+--------------------+     +---------------------+
    '---- one copy uploads all of this ----'     '- one copy for each -'

All dtypes of a layer share one segment. Trainable parameters come first, so the same offsets serve
the gradients. Moving a model in re-points each of the user's tensors to its view, one at a time:
the old storage is released before the next is copied, the model never exists twice.

Frozen weights may lie in a segment of their own, mapped from a file or packed: the layer's *base*
(`roundpipe.store.base`). It is uploaded behind the own segment, by one more copy.

A parameter that several layers read has one owner, the first of them. The others *borrow* it: they
upload the owner's bytes behind their own, and what they compute for it is added to the owner's
gradient. It is stored, updated and counted once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from roundpipe.store.gradients import Gradients, partial_sum_dtype
from roundpipe.store.masters import Masters
from roundpipe.store.segment import Entry, Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from torch import Tensor, nn

    from roundpipe.store.base import Base
    from roundpipe.store.packed import Packed


class UploadPiece(NamedTuple):
    """``num_bytes`` of ``source`` (uint8, host) go to byte ``offset`` of the layer's slot."""

    source: Tensor
    offset: int
    num_bytes: int


class HostLayer:
    """Where one layer lives between steps. Not locked: the schedule orders who reads and writes."""

    def __init__(
        self,
        index: int,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        trainable: Set[str],
        optim_dtype: torch.dtype | None = None,
        borrowed: Sequence[tuple[HostLayer, str]] = (),
        base: Base | None = None,
    ) -> None:
        self.index, self.name = index, name
        self.tensors = dict(tensors)
        self.base = base
        self.borrowed = tuple(borrowed)
        self.trainable = tuple(n for n in self.tensors if n in trainable)
        self.weights = self._move_in()
        self._optim_dtype = optim_dtype
        self._masters: Masters | None = None
        self._gradients = Gradients(self.trainable_layout)
        self._borrowers: list[HostLayer] = []
        for owner in self.owners:
            owner._borrowers.append(self)
        self._link()

    def __repr__(self) -> str:
        return f"HostLayer({self.index}, {self.name}, {self.weights.layout.num_bytes} bytes)"

    # ---- what it consists of

    @property
    def trainable_layout(self) -> Layout:
        """The layout of the trainable parameters, in working dtype: a prefix of the segment."""
        return self.weights.layout.prefix(len(self.trainable))

    @property
    def owners(self) -> tuple[HostLayer, ...]:
        """The layers whose tensors this one borrows, each once."""
        return tuple(dict.fromkeys(owner for owner, _ in self.borrowed))

    @property
    def shares_parameters(self) -> bool:
        """Whether gradients of several layers meet here or leave here: they need partial sums."""
        lent = {n for borrower in self._borrowers for o, n in borrower.borrowed if o is self}
        mine = not lent.isdisjoint(self.trainable)
        return mine or any(name in owner.trainable for owner, name in self.borrowed)

    # ---- weights

    def upload_pieces(self) -> list[UploadPiece]:
        """The copies, 1 + one for each borrowed tensor, that fill a slot as ``slot_layout`` says.

        An own segment without bytes makes no piece. The same list until `relayout`.
        """
        return self._pieces

    def relayout(self, trainable: Set[str]) -> bool:
        """Follow a change of ``requires_grad``; return whether anything changed.

        Values are kept, so are masters and gradients of parameters that stay trainable. Copies the
        layer once. To be called when nothing of this layer is in flight.
        """
        names = tuple(n for n in self.tensors if n in trainable)
        if names == self.trainable:
            return False
        self.publish()
        self.trainable = names
        self.weights = self._move_in()
        self._gradients = self._gradients.relaid(self.trainable_layout)
        if self._masters is not None:
            self._masters.rebind(self._working())
        self._link()
        for borrower in self._borrowers:
            borrower._link()
        return True

    # ---- masters

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """Master weights by name, in parameter order; made when first asked for."""
        return self._made_masters().parameters

    @property
    def retired_masters(self) -> dict[str, nn.Parameter]:
        """Masters of parameters that are frozen now: an optimizer may go on holding them."""
        return self._made_masters().retired

    def split_masters(self) -> None:
        """Give masters that alias their working weight storage of their own (staleness 1)."""
        self._made_masters().split()

    def is_alias(self, name: str) -> bool:
        """Whether an update of the master of ``name`` is one of the working weight at once."""
        return self._made_masters().is_alias(name)

    def publish(self, names: Iterable[str] | None = None) -> None:
        """Cast masters into working weights (of all, by default); nothing to do for aliases."""
        if self._masters is not None:
            self._masters.publish(names)

    def reload_masters(self, names: Iterable[str] | None = None) -> None:
        """Take the working weights as the truth: after loading into the user's tensors."""
        if self._masters is not None:
            self._masters.reload(names)

    def newest(self, name: str) -> Tensor:
        """The newest value of one of the layer's own tensors, in the working dtype.

        A cast of the master where there is one; may be a view of live memory.
        """
        if self._masters is not None and name in self._masters.parameters:
            return self._masters.newest(name)
        return self.weights.views[name]

    # ---- gradients

    def gradient_layout(self, *, partial_sums: bool) -> Layout:
        """Where the layer's own gradients lie: fp32 for partial sums, else working dtype."""
        return self._gradients.layout(partial_sums=partial_sums)

    def gradients(self, *, partial_sums: bool) -> Segment:
        """The host segment to download gradients into; allocated on first use, then the same.

        See `Gradients.allocate` for a change of ``partial_sums`` within a step.
        """
        return self._gradients.allocate(partial_sums=partial_sums)

    @property
    def received(self) -> Set[str]:
        """Own trainable parameters that have a gradient in this step."""
        return self._gradients.received

    def mark_received(self, names: Iterable[str]) -> None:
        """Note that gradients of ``names`` were downloaded straight into the segment."""
        self._gradients.mark_received(names)

    def partials(self, names: Iterable[str], buffer: Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """For each of ``names`` its owner's index, the name and a view of one visit's sum for it.

        ``buffer``: host, uint8, laid out as ``slot_gradient_layout``.
        """
        views = self.slot_gradient_layout.view(buffer)
        for name in names:
            yield self.gradient_owners[name].index, name, views[name]

    def add_partials_(self, partials: Mapping[str, Sequence[Tensor]]) -> None:
        """Add to the gradient of each name all that visits brought for it, in this order.

        Tensors are fp32 (at least), of the parameter's shape; each is read once.
        """
        for name, tensors in partials.items():
            self._gradients.add_(name, tensors)

    def gradient(self, name: str) -> Tensor | None:
        """What has arrived for ``name`` so far, a view; None if nothing has."""
        segment = self._gradients.segment
        return segment.views[name] if segment is not None and name in self.received else None

    def take_gradients(self) -> dict[str, Tensor]:
        """Views of what arrived, in parameter order; nothing may arrive until `clear_gradients`."""
        taken = self._gradients.take()
        return {name: taken[name] for name in self.trainable if name in taken}

    def clear_gradients(self) -> None:
        """Forget this step's gradients; their memory is kept for the next step."""
        self._gradients.clear()

    # ---- inside

    @torch.no_grad()
    def _move_in(self) -> Segment:
        """Copy the tensors into a new segment and re-point the user's, one at a time."""
        trainable = [self.tensors[name] for name in self.trainable]
        dtypes = list(dict.fromkeys(t.dtype for t in trainable))
        first = sorted(self.trainable, key=lambda n: dtypes.index(self.tensors[n].dtype))
        rest = [name for name in self.tensors if name not in self.trainable]
        segment = Segment(Layout.of(_entry(n, self.tensors[n]) for n in [*first, *rest]))
        for name, view in segment.views.items():
            view.copy_(self.tensors[name])
            self.tensors[name].data = view
        return segment

    def _made_masters(self) -> Masters:
        if self._masters is None:
            self._masters = Masters(self._working(), self._optim_dtype)
        return self._masters

    def _working(self) -> dict[str, Tensor]:
        return {name: self.weights.views[name] for name in self.trainable}

    def _link(self) -> None:
        """Work out what depends on the owners' layouts too: slot, pieces, gradients of a visit."""
        lent = [(owner, owner.weights.layout.by_name[name]) for owner, name in self.borrowed]
        self.slot_layout = self.weights.layout.followed_by(
            (s.name, s.shape, s.dtype) for _, s in lent
        )
        own = UploadPiece(self.weights.buffer, 0, self.weights.layout.num_bytes)
        self._pieces = [own] if own.num_bytes else []
        for owner, s in lent:
            source = owner.weights.buffer.narrow(0, s.offset, s.num_bytes)
            place = self.slot_layout.by_name[s.name]
            self._pieces.append(UploadPiece(source, place.offset, s.num_bytes))
        trained = [(owner, s) for owner, s in lent if s.name in owner.trainable]
        self.slot_gradient_layout = self.gradient_layout(partial_sums=True).followed_by(
            (s.name, s.shape, partial_sum_dtype(s.dtype)) for _, s in trained
        )
        self.gradient_owners: dict[str, HostLayer] = {
            **dict.fromkeys(self.trainable, self),
            **{s.name: owner for owner, s in trained},
        }


def _entry(name: str, tensor: Tensor) -> Entry:
    return name, tuple(tensor.shape), tensor.dtype
