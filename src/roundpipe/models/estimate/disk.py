"""What a run puts on the disk: the model as it is fetched, checkpoints, the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.models.estimate.costs import Host

if TYPE_CHECKING:
    from roundpipe.models.estimate.costs import Job
    from roundpipe.models.estimate.profile import Profile

_PUBLISHED_BYTES = 2  # of a weight in the files one fetches: bf16 or fp16


@dataclass(frozen=True)
class Disk:
    """Bytes. ``checkpoint`` is one: what is trained, its masters and moments."""

    download: int
    checkpoint: int
    result: int
    total: int


def disk(profile: Profile, job: Job, *, save_total_limit: int | None = 2) -> Disk:
    """The most that lies on the disk at once: while a checkpoint is written there is one more.

    Weights that are frozen are in no checkpoint: adapters are saved alone. ``save_total_limit``:
    None keeps all, of which two are counted.
    """
    trained = sum(n * size for layer in profile.layers for n, size in layer.sizes.trained)
    state = sum(Host(layer.sizes, job).saved_bytes for layer in profile.layers)
    has_adapter = profile.method in ("lora", "qlora")
    base = profile.parameters - (profile.trained_parameters if has_adapter else 0)
    weights = trained if has_adapter else profile.parameters * job.bits // 8
    kept = 2 if save_total_limit is None else save_total_limit
    download = base * _PUBLISHED_BYTES
    checkpoint = weights + state
    return Disk(
        download=download,
        checkpoint=checkpoint,
        result=weights,
        total=download + (kept + 1) * checkpoint + weights,
    )
