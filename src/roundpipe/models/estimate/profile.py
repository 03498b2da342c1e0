"""What running each layer of a model takes, counted once: data, of no machine and no length.

A `Profile` is made by running a model without weights (`roundpipe.models.estimate.build`), which
takes a second or two; what it holds is small, can be kept as JSON and is turned into `Costs` for
any machine, length and microbatch in no time, without torch.

Layers of one *kind* run the same operations on the same shapes and are counted once: the blocks of
a model of 94 layers are one kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from roundpipe.models.estimate.amount import Amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# What is alike for a device: matrix products, those with a side too short to fill it (a LoRA
# adapter, a router), those in fp32 within a 16-bit model, those of routed experts, attention
# kernels, and everything element by element.
MATRIX, THIN, WIDE, EXPERTS, ATTENTION, POINTWISE = (
    "matrix",
    "thin",
    "wide",
    "experts",
    "attention",
    "pointwise",
)


@dataclass(frozen=True)
class Work:
    """Operations of one sort: arithmetic, bytes read and written, and how many there are."""

    flops: Amount
    moved: Amount
    kernels: int


@dataclass(frozen=True)
class Pass:
    """A layer's forward or backward. ``calls``: operations issued, views among them."""

    works: Mapping[str, Work]
    calls: int = 0


@dataclass(frozen=True)
class Kind:
    """Layers that run the same. Bytes are of activations, for one microbatch.

    ``kept`` stays from forward to backward: what autograd saved, the layer's input if it is among
    it, no weights and no output. ``peaks`` are moments at which more is alive than at most others,
    beside what is kept: the largest counts. ``boundary`` is the layer's input. ``beyond``: a number
    of tokens, and the kind for microbatches that have more of them.
    """

    forward: Pass
    backward: Pass
    kept: Amount
    peaks: tuple[Amount, ...]
    boundary: Amount
    beyond: tuple[int, Kind] | None = None

    def of(self, tokens: int) -> Kind:
        """The kind for a microbatch of ``tokens``: itself, or what it is beyond some number."""
        return self if self.beyond is None or tokens <= self.beyond[0] else self.beyond[1]

    def peak(self, tokens: int, length: int) -> float:
        """Bytes beside ``kept`` at the worst moment."""
        return max((peak.at(tokens, length) for peak in self.peaks), default=0.0)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one layer in the store, and what of it is trained. See `roundpipe.store.layer`.

    ``trained``: for each trained parameter the layer owns, how many elements of how many bytes.
    """

    own: int  # weight segment
    slot: int  # what an upload moves, borrowed tensors included
    sums: int  # fp32 gradients of a slot
    own_sums: int  # fp32 gradients of what it owns
    own_whole: int  # the same in working dtype
    trained: tuple[tuple[int, int], ...] = ()
    borrows: tuple[int, ...] = ()
    shares: bool = False  # gradients of several layers meet: partial sums in any plan
    unpacked: int = 0  # bytes of its 4-bit weights once they are unpacked, all for a forward
    largest_unpacked: int = 0  # of one of them: in backward they are unpacked one by one


@dataclass(frozen=True)
class LayerProfile:
    """One layer: its name, its kind (an index) and its sizes.

    ``boundary``: of its own input, where layers of its kind are not all given as much.
    """

    name: str
    kind: int
    sizes: Sizes
    boundary: Amount | None = None


@dataclass(frozen=True)
class Regime:
    """The kinds for lengths up to ``longest`` (None: any): beyond a window attention is masked."""

    longest: int | None
    kinds: tuple[Kind, ...]


@dataclass(frozen=True)
class Profile:
    """A model as it is trained by one method. ``bits`` are of its working dtype: 16 or 32."""

    name: str
    method: str
    bits: int
    parameters: int
    trained_parameters: int
    layers: tuple[LayerProfile, ...]
    regimes: tuple[Regime, ...]
    longest: int | None = None  # positions the model was made for
    notes: tuple[str, ...] = field(default=())
    unread: int = 0  # parameters that no layer has, because text does not reach them

    @property
    def unread_bytes(self) -> int:
        """What the host holds and no device ever does: a vision tower."""
        return self.unread * self.bits // 8

    def kinds(self, length: int) -> tuple[Kind, ...]:
        """The kinds that layers have at ``length``."""
        for regime in self.regimes:
            if regime.longest is None or length <= regime.longest:
                return regime.kinds
        raise AssertionError("the last regime has no end")

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers; equal layers are written once."""
        distinct = list(dict.fromkeys(map(_what, self.layers)))
        return {
            "name": self.name,
            "method": self.method,
            "bits": self.bits,
            "parameters": self.parameters,
            "trained_parameters": self.trained_parameters,
            "longest": self.longest,
            "notes": list(self.notes),
            **({"unread": self.unread} if self.unread else {}),
            "layers": _runs([(layer.name, distinct.index(_what(layer))) for layer in self.layers]),
            "distinct": [
                [kind, _from_sizes(sizes), *([] if boundary is None else [_from_amount(boundary)])]
                for kind, sizes, boundary in distinct
            ],
            "regimes": [
                {"longest": regime.longest, "kinds": [_from_kind(kind) for kind in regime.kinds]}
                for regime in self.regimes
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave; raises KeyError, TypeError or ValueError for anything else."""
        distinct = [
            (int(kind), _to_sizes(sizes), *(Amount(*each) for each in boundary))
            for kind, sizes, *boundary in data["distinct"]
        ]
        return cls(
            name=str(data["name"]),
            method=str(data["method"]),
            bits=int(data["bits"]),
            parameters=int(data["parameters"]),
            trained_parameters=int(data["trained_parameters"]),
            layers=tuple(
                LayerProfile(pattern.format(number), *distinct[which])
                for pattern, first, count, which in data["layers"]
                for number in range(first, first + count)
            ),
            regimes=tuple(
                Regime(regime["longest"], tuple(_to_kind(kind) for kind in regime["kinds"]))
                for regime in data["regimes"]
            ),
            longest=data["longest"],
            notes=tuple(data["notes"]),
            unread=int(data.get("unread", 0)),
        )


def _what(layer: LayerProfile) -> tuple[int, Sizes, Amount | None]:
    return layer.kind, layer.sizes, layer.boundary


def _runs(layers: Iterable[tuple[str, int]]) -> list[list[Any]]:
    """Equal layers that follow each other: a pattern for names, first number, how many, which."""
    runs: list[list[Any]] = []
    for name, which in layers:
        found = re.search(r"\d+$", name)
        number = int(found[0]) if found else 0
        pattern = name[: found.start()] + "{}" if found else name
        last = runs[-1] if runs else None
        if last is not None and [pattern, number, which] == [last[0], last[1] + last[2], last[3]]:
            last[2] += 1
        else:
            runs.append([pattern, number, 1, which])
    return runs


def _from_amount(amount: Amount) -> list[float]:
    values = (amount.fixed, amount.per_token, amount.per_pair)
    return [int(value) if value == int(value) else value for value in values]


def _from_amounts(amounts: Iterable[Amount]) -> list[list[float]]:
    return [_from_amount(amount) for amount in amounts]


def _from_pass(run: Pass) -> list[Any]:
    works = {
        sort: [_from_amount(work.flops), _from_amount(work.moved), work.kernels]
        for sort, work in run.works.items()
    }
    return [run.calls, works]


def _to_pass(data: Any) -> Pass:
    calls, works = data
    return Pass(
        {
            str(sort): Work(Amount(*flops), Amount(*moved), int(kernels))
            for sort, (flops, moved, kernels) in works.items()
        },
        int(calls),
    )


def _from_kind(kind: Kind) -> list[Any]:
    beyond = kind.beyond and [kind.beyond[0], _from_kind(kind.beyond[1])]
    return [
        _from_pass(kind.forward),
        _from_pass(kind.backward),
        _from_amount(kind.kept),
        _from_amounts(kind.peaks),
        _from_amount(kind.boundary),
        *([beyond] if beyond else []),
    ]


def _to_kind(data: Any) -> Kind:
    forward, backward, kept, peaks, boundary, *beyond = data
    return Kind(
        _to_pass(forward),
        _to_pass(backward),
        Amount(*kept),
        tuple(Amount(*peak) for peak in peaks),
        Amount(*boundary),
        *[(int(tokens), _to_kind(kind)) for tokens, kind in beyond],
    )


def _from_sizes(sizes: Sizes) -> list[Any]:
    return [
        sizes.own,
        sizes.slot,
        sizes.sums,
        sizes.own_sums,
        sizes.own_whole,
        [list(each) for each in sizes.trained],
        list(sizes.borrows),
        sizes.shares,
        sizes.unpacked,
        sizes.largest_unpacked,
    ]


def _to_sizes(data: Any) -> Sizes:
    own, slot, sums, own_sums, own_whole, trained, borrows, shares, *unpacked = data
    return Sizes(
        own,
        slot,
        sums,
        own_sums,
        own_whole,
        tuple((int(count), int(size)) for count, size in trained),
        tuple(borrows),
        bool(shares),
        *unpacked,
    )
