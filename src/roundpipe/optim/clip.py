"""The global gradient norm in pieces: per layer as gradients arrive, joined when all are there.

The norm of all gradients is the norm of the parameters' norms, which is also how
``torch.nn.utils.clip_grad_norm_`` computes it: joined in parameter order the bits are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roundpipe.store.gradients import partial_sum_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


@torch.no_grad()
def layer_norms(grads: Iterable[Tensor]) -> Tensor:
    """The 2-norm of each gradient, as one tensor [number of gradients].

    16-bit gradients are summed in fp32, as if cast first. No gradients: an empty tensor.
    """
    norms = [torch.linalg.vector_norm(g, 2.0, dtype=partial_sum_dtype(g.dtype)) for g in grads]
    return torch.stack(norms) if norms else torch.empty(0)


@torch.no_grad()
def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The global norm, 0-d, from layers' norms in parameter order; 0.0 without any gradient.

    Not finite if a gradient is not: the caller looks.
    """
    some = [n for n in norms if n.numel()]
    return torch.linalg.vector_norm(torch.cat(some), 2.0) if some else torch.tensor(0.0)


@torch.no_grad()
def clip_coefficient(total: Tensor, max_norm: float) -> Tensor:
    """What to multiply every gradient by, 0-d: never above 1, exactly 1 when nothing is clipped."""
    return torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
