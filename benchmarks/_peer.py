"""The peers: ``torch.distributed.pipelining`` over gloo, one process of one thread per stage set.

A peer is a schedule and a split of the ten layers. Everything that costs a peer time without being
asked for is off: outputs are not collected, gradients are not scaled afterwards (the loss is
already a share), recompute keeps no random state and checks nothing, and the head, whose backward
follows its forward at once in 1F1B, is not recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from _decoder import (
    MICROBATCHES,
    Block,
    build_batch,
    build_layers,
    gradient_square,
    microbatch_loss,
)
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 2


@dataclass(frozen=True)
class Peer:
    """One schedule at one split; the text form, ``1f1b 7+3``, is how processes name it."""

    schedule: str
    layers_per_stage: tuple[int, ...]

    KINDS: ClassVar[dict[str, Any]] = {
        "gpipe": ScheduleGPipe,
        "1f1b": Schedule1F1B,
        "interleaved": ScheduleInterleaved1F1B,
    }

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Read the text form back."""
        schedule, split = text.split()
        return cls(schedule, tuple(int(count) for count in split.split("+")))

    def __str__(self) -> str:
        return f"{self.schedule} {'+'.join(map(str, self.layers_per_stage))}"


EVEN = (
    Peer("gpipe", (5, 5)),
    Peer("1f1b", (5, 5)),
    Peer("interleaved", (3, 2, 2, 3)),
)
"""Equal numbers of blocks in every stage, the embedding with the first, the head with the last."""

CANDIDATES = tuple(
    Peer.parse(text)
    for text in (
        *("gpipe 6+4", "gpipe 7+3", "gpipe 8+2"),
        *("1f1b 6+4", "1f1b 7+3", "1f1b 8+2"),
        *("interleaved 3+2+4+1", "interleaved 4+2+3+1", "interleaved 5+2+2+1"),
        *("interleaved 2+2+5+1", "interleaved 3+3+3+1", "interleaved 6+2+1+1"),
        *("interleaved 3+2+3+2", "interleaved 4+3+2+1", "interleaved 4+1+3+2"),
    )
)
"""Hand-chosen splits. The best of each schedule runs against us.

Chosen from all splits into two and into four stages by playing the three schedules with the
layers' measured times, and keeping every split that came near the best one; what is best in real
time depends on the machine, so each run tries them first.
"""


class _Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(
            self.block,
            hidden,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )
        return result


class PeerSubject:
    """One rank of every peer: all of them share the rank's one set of layers."""

    def __init__(self, rank: int, rendezvous: str) -> None:
        store = distributed.FileStore(rendezvous, RANKS)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self._rank = rank
        self._layers = build_layers()
        self._tokens, self._labels = build_batch()
        self._schedules: dict[str, Any] = {}

    def step(self, variant: str) -> float | None:
        """Run one step of the peer ``variant``; the loss, on the rank that has the last stage."""
        if variant not in self._schedules:
            self._schedules[variant] = self._build(Peer.parse(variant))
        arguments = (self._tokens,) if self._rank == 0 else ()
        if self._rank < RANKS - 1:
            self._schedules[variant].step(*arguments, return_outputs=False)
            return None
        losses: list[Tensor] = []
        self._schedules[variant].step(
            *arguments, target=self._labels, losses=losses, return_outputs=False
        )
        return sum(loss.item() for loss in losses)

    def gradient_square(self) -> float:
        """Return the sum of squares of the gradients of this rank's layers."""
        return gradient_square(self._layers)

    def clear(self) -> None:
        """Drop the gradients."""
        for layer in self._layers:
            layer.zero_grad()

    def close(self) -> None:
        """Leave the process group."""
        distributed.destroy_process_group()

    def _build(self, peer: Peer) -> Any:
        stages = [
            PipelineStage(module, index, len(peer.layers_per_stage), torch.device("cpu"))
            for index, module in enumerate(self._split(peer.layers_per_stage))
            if index % RANKS == self._rank
        ]
        subject = stages if peer.schedule == "interleaved" else stages[0]
        kind = Peer.KINDS[peer.schedule]
        return kind(subject, MICROBATCHES, loss_fn=microbatch_loss, scale_grads=False)

    def _split(self, layers_per_stage: Sequence[int]) -> list[nn.Module]:
        wrapped = [_Recomputed(la) if isinstance(la, Block) else la for la in self._layers]
        bounds = pairwise(accumulate(layers_per_stage, initial=0))
        return [nn.Sequential(*wrapped[start:end]) for start, end in bounds]
