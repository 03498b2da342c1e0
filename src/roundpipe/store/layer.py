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
(`roundpipe.store.frozen`). It is uploaded behind the own segment, by one more copy.

A parameter that several layers read has one owner, the first of them. The others *borrow* it: they
upload the owner's bytes behind their own, and what they compute for it is added to the owner's
gradient. It is stored, updated and counted once.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from roundpipe.store.frozen import Holding, Stored, UploadPiece, pieces
from roundpipe.store.gradients import Gradients, partial_sum_dtype
from roundpipe.store.masters import Masters
from roundpipe.store.packed import cannot_train
from roundpipe.store.pages import HostPages
from roundpipe.store.segment import Entry, Layout, Segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from torch import Tensor, nn

    from roundpipe.store.frozen import Base
    from roundpipe.store.gradients import Run
    from roundpipe.store.packed import Packed
    from roundpipe.store.reading import Reading


class HostLayer:
    """Where one layer lives between steps. Not locked: the schedule orders who reads and writes."""

    def __init__(  # noqa: PLR0913 - what makes a layer
        self,
        index: int,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        trainable: Set[str],
        optim_dtype: torch.dtype | None = None,
        borrowed: Sequence[tuple[HostLayer, str]] = (),
        base: Base | None = None,
        pages: HostPages | None = None,
    ) -> None:
        self.index, self.name = index, name
        self.tensors = dict(tensors)
        self.held = Holding(base, self.tensors) if base is not None else None
        self.borrowed = tuple(borrowed)
        self.require_trainable(trainable)
        self._pages = pages or HostPages()
        if self.held is not None:
            self._pages.adopt(self.held.base.segment.block)
        names = tuple(n for n in self.tensors if n in trainable)
        self.trainable, self.held, self.weights = self._moved_in(names)
        self._optim_dtype = optim_dtype
        self._masters: Masters | None = None
        self.start_masters_away = False  # see Masters; to be set before they are first asked for
        self._gradients = Gradients(self.trainable_layout, self._pages)
        self.reading: Reading | None = None  # who must have done with it before it is changed
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
    def packed(self) -> dict[str, Packed]:
        """How the packed tensors of the slot are packed, by name; borrowed ones too."""
        found = dict(self.held.packed) if self.held is not None else {}
        lent = ((o.held.packed, n) for o, n in self.borrowed if o.held is not None)
        return found | {name: theirs[name] for theirs, name in lent if name in theirs}

    @property
    def shares_parameters(self) -> bool:
        """Whether gradients of several layers meet here or leave here: they need partial sums."""
        lent = {n for borrower in self._borrowers for o, n in borrower.borrowed if o is self}
        mine = not lent.isdisjoint(self.trainable)
        return mine or any(name in owner.trainable for owner, name in self.borrowed)

    # ---- weights

    def upload_pieces(self) -> list[UploadPiece]:
        """The copies that fill a slot as ``slot_layout`` says.

        One of the own segment, one of the base, one of each borrowed tensor; less where there is
        nothing, more where a base has lost tensors from its middle. The same list until `relayout`.
        """
        return self._pieces

    def relayout(self, trainable: Set[str]) -> bool:
        """Follow a change of ``requires_grad``; return whether anything changed.

        Values are kept, so are masters and gradients of parameters that stay trainable. Copies the
        own segment once; what is to be trained and lies in the base moves there. To be called when
        nothing of this layer is in flight. Raises what `require_trainable` raises.
        """
        names = tuple(n for n in self.tensors if n in trainable)
        if names == self.trainable:
            return False
        self.require_trainable(trainable)
        self.publish()
        self.trainable, self.held, self.weights = self._moved_in(names)
        self._gradients = self._gradients.relaid(self.trainable_layout)
        if self._masters is not None:
            self._masters.rebind(self._working())
        self._link()
        for borrower in self._borrowers:
            borrower._link()
        return True

    def require_trainable(self, names: Set[str]) -> None:
        """Raise ModelError if one of ``names`` is packed here: 4 bits are too few to train."""
        for name in () if self.held is None else filter(names.__contains__, self.held.packed):
            raise cannot_train(name)

    # ---- masters

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """Master weights by name, in parameter order; made when first asked for."""
        return self._made_masters().parameters

    @property
    def retired_masters(self) -> dict[str, nn.Parameter]:
        """Masters of parameters that are frozen now: an optimizer may go on holding them."""
        return self._made_masters().retired

    @property
    def master_store(self) -> Masters:
        """The masters and what can be done to all of them; made when first asked for."""
        return self._made_masters()

    def split_masters(self) -> None:
        """Give masters that alias their working weight storage of their own (staleness 1)."""
        self._made_masters().split()

    def is_alias(self, name: str) -> bool:
        """Whether an update of the master of ``name`` is one of the working weight at once."""
        return self._made_masters().is_alias(name)

    def wait_unread(self) -> None:
        """Block while somebody reads the layer: before anything but gradients is written.

        See [Note: a layer is written to disk before it is updated again].
        """
        reading = self.reading
        if reading is not None:
            reading.wait()

    def publish(self, names: Iterable[str] | None = None) -> None:
        """Cast masters into working weights (of all, by default); nothing to do for aliases.

        Blocks as `wait_unread` does.
        """
        self.wait_unread()
        if self._masters is not None:
            self._masters.publish(names)

    def reload_masters(self, names: Iterable[str] | None = None) -> None:
        """Take the working weights as the truth: after loading into the user's tensors."""
        self.wait_unread()
        if self._masters is not None:
            self._masters.reload(names)

    def newest(self, name: str) -> Tensor:
        """The newest value of one of the layer's own tensors, in the working dtype.

        A cast of the master where there is one; may be a view of live memory. Weights in 4 bits
        are unpacked, into new memory.
        """
        if self._masters is not None and name in self._masters.parameters:
            return self._masters.newest(name)
        if self.held is None or name not in self.held:
            return self.weights.views[name]
        if name in self.held.packed:
            return self.held.packed[name].unpack(self.held.parts(name))
        return self.held.view(name)

    def stored(self, name: str) -> list[Stored]:
        """Where the bytes of one of the layer's own tensors lie on the host, entry by entry."""
        if self.held is not None and name in self.held:
            return self.held.stored(name)
        return [Stored.at(self.weights.layout.by_name[name], self.weights.buffer, name)]

    # ---- gradients

    def gradient_layout(self, *, partial_sums: bool) -> Layout:
        """Where the layer's own gradients lie: fp32 for partial sums, else working dtype."""
        return self._gradients.layout(partial_sums=partial_sums)

    @property
    def gradient_runs(self) -> list[Run]:
        """How own gradients in working dtype lie in fp32 partial sums: a run for each dtype."""
        return self._gradients.runs

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
    def _moved_in(
        self, trainable: tuple[str, ...]
    ) -> tuple[tuple[str, ...], Holding | None, Segment]:
        """Copy the tensors into a new segment and re-point the user's, one at a time.

        Frozen ones that lie in a base stay there. Returns what is trainable then, what the layer
        holds in its base, and the segment; without memory for that nothing has changed.
        """
        held = self.held.without(set(trainable)) if self.held is not None else None
        dtypes = list(dict.fromkeys(self.tensors[name].dtype for name in trainable))
        first = sorted(trainable, key=lambda n: dtypes.index(self.tensors[n].dtype))
        kept = held.names if held is not None else ()
        rest = [n for n in self.tensors if n not in trainable and n not in kept]
        segment = Segment(Layout.of(_entry(n, self.tensors[n]) for n in [*first, *rest]))
        self._pages.adopt(segment.block)
        for name, view in segment.views.items():
            view.copy_(self.tensors[name])
            self.tensors[name].data = view
        return trainable, held, segment

    def _made_masters(self) -> Masters:
        if self._masters is None:
            self._masters = Masters(
                self._working(), self._optim_dtype, start_away=self.start_masters_away
            )
        return self._masters

    def _working(self) -> dict[str, Tensor]:
        return {name: self.weights.views[name] for name in self.trainable}

    def _link(self) -> None:
        """Work out what depends on the owners' layouts too: slot, pieces, gradients of a visit."""
        kept = self.held.names if self.held is not None else ()
        stored = [entry for name in kept for entry in self.stored(name)]
        lent = [owner.stored(name) for owner, name in self.borrowed]
        self.slot_layout = self.weights.layout.followed_by(
            (entry.name, entry.shape, entry.dtype) for entry in chain(stored, *lent)
        )
        own = UploadPiece(self.weights.buffer, 0, self.weights.layout.num_bytes)
        self._pieces = [own] if own.num_bytes else []
        for entries in (stored, *lent):
            self._pieces += pieces(entries, self.slot_layout.by_name)
        trained = [
            (owner, owner.weights.layout.by_name[name])
            for owner, name in self.borrowed
            if name in owner.trainable
        ]
        self.slot_gradient_layout = self.gradient_layout(partial_sums=True).followed_by(
            (s.name, s.shape, partial_sum_dtype(s.dtype)) for _, s in trained
        )
        self.gradient_owners: dict[str, HostLayer] = {
            **dict.fromkeys(self.trainable, self),
            **{s.name: owner for owner, s in trained},
        }


def _entry(name: str, tensor: Tensor) -> Entry:
    return name, tuple(tensor.shape), tensor.dtype
