"""What a model costs, from its config alone: no weights, no network, no device.

    costs = estimate("Qwen/Qwen3-32B", card_named("4090"), method="lora", job=Job(length=4096))

Two steps. `profile` counts a model without weights, once for a method: a second or two, or no time
for a well-known model, whose counts travel with the package. `costs` turns that into `Costs` for
one card, dtype, length and microbatch in a millisecond, so that many can be tried.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.models.estimate.config import find_config, make_config, named
from roundpipe.models.estimate.costs import Job, costs
from roundpipe.models.estimate.disk import Disk, disk
from roundpipe.models.estimate.method import Lora, Method
from roundpipe.models.estimate.profile import Profile
from roundpipe.models.estimate.rates import Efficiency
from roundpipe.models.estimate.stored import stored_profile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from roundpipe.plan.costs import Costs
    from roundpipe.plan.machine import Card

__all__ = [
    "Disk",
    "Efficiency",
    "Job",
    "Lora",
    "Method",
    "Profile",
    "costs",
    "disk",
    "estimate",
    "profile",
]


def profile(
    model: str | Path | Mapping[str, Any],
    method: Method | str = "full",
    *,
    bits: int = 16,
    fuse: bool = False,
) -> Profile:
    """Count what running each layer of a model takes, when it is trained by ``method``.

    ``model``: a folder, a config.json, the id or name of a well-known model, or the fields of a
    config. ``bits``: 16 or 32, of its working dtype. ``fuse``: as if its attention were fused where
    transformers has no such kernel for it. Raises ConfigError for what names no model and
    ModelError for one that cannot be split exactly.
    """
    method = Method(name=method) if isinstance(method, str) else method  # type: ignore[arg-type]
    known = named(model) if isinstance(model, str) and not fuse else None
    found = None if known is None else stored_profile(known, method, bits=bits)
    if found is not None:
        return found
    name, fields = find_config(model)
    from roundpipe.models.estimate.build import count  # noqa: PLC0415 (imports torch)

    return count(make_config(fields), method, name=name, bits=bits, fuse=fuse)


def estimate(
    model: str | Path | Mapping[str, Any] | Profile,
    card: Card,
    *,
    method: Method | str = "full",
    job: Job | None = None,
) -> Costs:
    """What every layer of ``model`` costs on ``card``, trained by ``method`` as ``job`` says.

    Raises as `profile` and `costs` do.
    """
    job = Job() if job is None else job
    found = model if isinstance(model, Profile) else profile(model, method, bits=job.bits)
    return costs(found, card, job)
