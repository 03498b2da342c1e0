"""Tries on a tiny input whether a model's loss may be made in chunks of tokens.

A head that mixes tokens, a loss that reads logits twice, a step between them that is none of the
known: nothing of that can be told from code. So both ways are run, and loss and gradients must be
equal as far as rounding allows. Where they are not, long sequences need all logits at once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roundpipe.models.four_bit import values_of
from roundpipe.models.packet import Packet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.causal_layers import Suffix
    from roundpipe.models.shell import TreeShell
    from roundpipe.models.spec import Boundary, Inputs
    from roundpipe.store.packed import PackedTensor

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_ROWS = 9  # divides no number of tokens here, and makes two chunks: each reads the whole head
_MOST_TRAINED = 10_000_000  # parameters of a head whose own gradient is compared too
_ALIKE = 1e-3  # relative to the largest value: what is not the same is not nearly the same
_EPSILONS = 16  # or of the dtype


def loss_can_be_cut(
    suffix: Suffix, hidden: Boundary, inputs: Inputs, packed: Mapping[Tensor, PackedTensor]
) -> bool:
    """Whether ``suffix`` makes the same loss and gradients in chunks; says in the log if not.

    ``hidden``: what the last block returns for ``inputs``; ``packed``: as in `causal_lm_spec`.
    Takes a moment; in a large model only the gradient of the hidden state is compared.
    """
    values = values_of(suffix.homes, packed)
    shells = [suffix.make_shell(_CPU, rows=rows) for rows in (None, _ROWS)]
    for shell in shells:
        shell.bind(values)
        shell.module.eval()
    plain = _Tried.of(shells[0], hidden, inputs)
    cut = _Tried.of(shells[1], hidden, replace(inputs, wants_logits=False))
    if cut.has_logits:
        return False
    if plain.is_like(cut):
        return True
    logger.warning(
        "the loss of %s is made with all logits at once, which takes much memory in long "
        "sequences: made in chunks of tokens it differs by %.2g",
        type(suffix.split.root).__name__,
        plain.difference(cut),
    )
    return False


@dataclass
class _Tried:
    """A loss, and its gradient by the hidden state and by what is trained."""

    values: Sequence[Tensor | None]
    has_logits: bool

    @classmethod
    def of(cls, shell: TreeShell, hidden: Boundary, inputs: Inputs) -> _Tried:
        leaves = [leaf for leaf in shell.parameters.values() if leaf.requires_grad]
        if sum(leaf.numel() for leaf in leaves) > _MOST_TRAINED:
            for leaf in leaves:
                leaf.requires_grad_(False)
            leaves = []
        with torch.enable_grad():
            packet = Packet.of(hidden)
            given = packet.hidden.detach().clone().requires_grad_()
            output = shell(packet._replace(hidden=given).boundary(), inputs, None)
            output.loss.backward()
        made = [output.loss.detach(), given.grad, *(leaf.grad for leaf in leaves)]
        return cls(made, output.get("logits") is not None)

    def difference(self, other: _Tried) -> float:
        """The largest difference, relative to the largest value of its tensor."""
        pairs = zip(self.values, other.values, strict=True)
        return max((_difference(one, two) for one, two in pairs), default=0.0)

    def is_like(self, other: _Tried) -> bool:
        """Whether both are equal but for rounding."""
        given = self.values[1]
        dtype = given.dtype if given is not None else torch.float32
        return self.difference(other) <= max(_ALIKE, _EPSILONS * torch.finfo(dtype).eps)


def _difference(one: Tensor | None, two: Tensor | None) -> float:
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    scale = max(float(one.abs().max()), torch.finfo(one.dtype).tiny)
    return float((one.double() - two.double()).abs().max()) / scale
