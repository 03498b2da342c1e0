"""From a profile to `Costs`: one machine's card, one dtype, one length and one microbatch.

Host bytes are those of the store, in its own layout. By default a trained 16-bit weight takes 16:
itself and its gradient (page-locked), its fp32 master and two fp32 moments (pageable). A bf16
master is the weight itself and a 16-bit remainder, together fp32: with 8-bit moments that is 8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.models.estimate.rates import DEFAULT, Arithmetic, Efficiency, seconds
from roundpipe.plan.costs import Costs, LayerCost

if TYPE_CHECKING:
    from roundpipe.models.estimate.profile import Kind, LayerProfile, Pass, Profile, Sizes
    from roundpipe.plan.machine import Card

ALIGNMENT = 256  # of the store's layouts, which cannot be imported without torch
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0 + 4 / 256}  # int8: a scale for 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a model is trained. None for ``optim_dtype``: fp32 for 16-bit weights, else theirs.

    ``moments_dtype``: None is fp32. ``backward_visits``: by how many visits of a step a layer's
    gradient is made; with more than one (rounds, a replicated stage) partial sums come down in
    fp32, each to a place of its own, and are added up on the host.
    """

    dtype: str = "bf16"
    fp16_accumulation: bool = False
    length: int = 2048
    microbatch_size: int = 1
    optim_dtype: str | None = None
    moments_dtype: str | None = None
    backward_visits: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "microbatch_size", "backward_visits"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: {getattr(self, name)}")
        for name in ("optim_dtype", "moments_dtype"):
            if getattr(self, name) not in (None, *_BYTES):
                raise ConfigError(
                    f"unknown {name}: {getattr(self, name)}\nhint: {name}={', '.join(_BYTES)}"
                )
        _ = self.arithmetic

    @property
    def arithmetic(self) -> Arithmetic:
        """Which of a card's rates it gets."""
        return Arithmetic.of(self.dtype, fp16_accumulation=self.fp16_accumulation)

    @property
    def bits(self) -> int:
        """Of the working dtype."""
        return 32 if self.dtype == "fp32" else 16

    def with_moments(self, dtype: str) -> Job:
        """The same with moments in ``dtype``. Where they are narrow, bf16 weights need no master.

        They are their own, with a remainder beside the moments.
        """
        own = dtype != "fp32" and self.dtype == "bf16"
        return replace(self, moments_dtype=dtype, optim_dtype="bf16" if own else None)

    @property
    def at(self) -> tuple[int, int]:
        """Tokens of a microbatch, and length."""
        return self.microbatch_size * self.length, self.length


def costs(profile: Profile, card: Card, job: Job, given: Efficiency = DEFAULT) -> Costs:
    """What every layer costs on ``card``. Takes milliseconds; needs no torch.

    Raises ConfigError if the card cannot compute in the dtype, or the profile was counted in
    another width.
    """
    if profile.bits != job.bits:
        raise ConfigError(f"counted in {profile.bits} bits, not in {job.dtype}")
    kinds = [kind.of(job.at[0]) for kind in profile.kinds(job.length)]
    times = [_times(kind, card, job, given) for kind in kinds]
    layers = tuple(
        _layer_cost(layer, kinds[layer.kind], times[layer.kind], card, job, given)
        for layer in profile.layers
    )
    owners = frozenset(i for i, layer in enumerate(profile.layers) if layer.sizes.trained)
    return Costs(layers, owners)


def _times(kind: Kind, card: Card, job: Job, given: Efficiency) -> tuple[float, float]:
    def time(run: Pass) -> float:
        return seconds(run, card, job.arithmetic, job.at, given)

    return time(kind.forward), time(kind.backward)


def _layer_cost(
    layer: LayerProfile,
    kind: Kind,
    times: tuple[float, float],
    card: Card,
    job: Job,
    given: Efficiency,
) -> LayerCost:
    sizes = layer.sizes
    forward, backward = times
    unpacking = (sizes.unpacked + sizes.slot) / card.bandwidth if sizes.unpacked else 0.0
    host = Host(sizes, job)
    gradients = len(sizes.trained)
    return LayerCost(
        forward_seconds=forward + unpacking,
        backward_seconds=backward + (unpacking if backward else 0.0),
        weight_bytes=sizes.slot,
        gradient_bytes=sizes.sums,
        download_bytes=sizes.sums if sizes.shares else sizes.own_whole,
        boundary_bytes=_whole((layer.boundary or kind.boundary).at(*job.at)),
        activation_bytes=_whole(kind.kept.at(*job.at)),
        peak_bytes=_whole(kind.peak(*job.at)) + sizes.unpacked,
        host_forward_seconds=kind.forward.calls * given.call_seconds,
        host_backward_seconds=(
            given.backward_seconds + gradients * given.gradient_seconds if backward else 0.0
        ),
        update_bytes=host.update_bytes,
        publish_bytes=host.publish_bytes,
        pinned_bytes=host.pinned_bytes,
        pageable_bytes=host.pageable_bytes,
        borrows=sizes.borrows,
    )


def _whole(count: float) -> int:
    return max(round(count), 0)


@dataclass(frozen=True)
class Host:
    """Host memory and its traffic for one layer, of what it owns."""

    sizes: Sizes
    job: Job

    @property
    def _is_partial(self) -> bool:
        return self.job.backward_visits > 1 or self.sizes.shares

    @property
    def pinned_bytes(self) -> int:
        """Working weights and gradients, and partial sums until they are added."""
        sizes = self.sizes
        if not self._is_partial:
            return sizes.own + sizes.own_whole
        return sizes.own + sizes.own_sums + self.job.backward_visits * sizes.sums

    @property
    def pageable_bytes(self) -> int:
        """Master weights where they are not the working weights themselves, and moments."""
        masters, state = 0, 0.0
        for count, size in self.sizes.trained:
            master = self._master_bytes(size)
            if master != size or self.job.staleness:
                masters += -(-round(count * master) // ALIGNMENT) * ALIGNMENT
            state += count * self._state_bytes(master)
        return masters + round(state)

    @property
    def saved_bytes(self) -> int:
        """Masters, also where they are the working weights themselves, and moments.

        What a checkpoint holds beside the weights.
        """
        masters = [(count, self._master_bytes(size)) for count, size in self.sizes.trained]
        return round(sum(count * (master + self._state_bytes(master)) for count, master in masters))

    @property
    def update_bytes(self) -> int:
        """Gradient read, master and state read and written, working weight written."""
        total = 0.0
        for count, size in self.sizes.trained:
            master = self._master_bytes(size)
            gradient = 4.0 if self._is_partial else size
            working = size if master != size else 0
            total += count * (gradient + 2 * master + 2 * self._state_bytes(master) + working)
        return round(total)

    @property
    def publish_bytes(self) -> int:
        """Master read and working weight written, where these are two."""
        total = 0.0
        for count, size in self.sizes.trained:
            master = self._master_bytes(size)
            if master != size or self.job.staleness:
                total += count * (master + size)
        return round(total)

    def _master_bytes(self, size: int) -> float:
        if self.job.optim_dtype is not None:
            return _BYTES[self.job.optim_dtype]
        return 4.0 if size == 2 else float(size)

    def _state_bytes(self, master: float) -> float:
        """Of both moments, and of what a bf16 master lacks of fp32."""
        remainder = 2.0 if master == _BYTES["bf16"] else 0.0
        return 2 * _BYTES[self.job.moments_dtype or "fp32"] + remainder
