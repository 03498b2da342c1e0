"""What generating will do, and about how fast: said before it begins.

A token needs all weights once, whatever the number of sequences. What stays on the device is read
from its own memory; what does not comes up over the link, block by block, two slots taking turns:

    up        | u1 | u2 | u3 | u0 of the next token |
    compute        | c0 | c1 | c2 | c3 | outside, kept blocks |

So with n streamed blocks a token takes (n - 1) max(u, c) + max(u, c + what stays). Reading and
arithmetic overlap, so c is the longer of the two. Everything is an estimate from sizes and from
what a `Machine` says; nothing is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.engine.generation import threads_for, tree_of, work_for
from roundpipe.engine.residence import most_kept
from roundpipe.engine.uploads import Upload
from roundpipe.plan.amounts import write_bytes, write_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.engine.engine import Engine
    from roundpipe.plan.machine import Card, Link, Machine

# Of Python, for a block of a transformer that makes one token (60 operations, 6 us each). A card
# computes meanwhile; a CPU device waits for it.
_ISSUE_SECONDS = 0.36e-3
_LOOP_SECONDS = 1e-3  # of Python, for each token: masks, the choice of a token, an end
_KEYS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_EXPERTS_USED = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts", "num_selects")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Part:
    """A block, or what is outside of them. ``num_bytes`` come up; ``read`` are read for a token by
    all sequences together; ``flops`` are computed for it.
    """

    num_bytes: int
    read: float
    flops: float


@dataclass(frozen=True)
class Outlook:
    """See the module docstring. ``rows``: sequences at a time. ``card`` and ``link``: of the
    device, None where its rates are not known. ``flops``: of the card in the model's dtype, 0 if
    unknown.
    """

    device: str
    place: torch.device
    rows: int
    outside: Part
    kept: Sequence[Part]
    streamed: Sequence[Part]
    cache_bytes: int  # that all sequences have in the end
    card: Card | None = None
    link: Link | None = None
    flops: float = 0.0
    threads: int = 1  # that a CPU device takes

    @property
    def is_resident(self) -> bool:
        """Whether all weights stay on the device."""
        return not self.streamed

    @property
    def bytes_per_token(self) -> int:
        """What comes up over the link for each token."""
        return sum(part.num_bytes for part in self.streamed)

    @property
    def seconds_per_token(self) -> float | None:
        """How long one token of all sequences takes, the prompt aside; None: not known."""
        card, link = self.card, self.link
        if card is None or link is None:
            return None
        staying = sum(self._computing(part) for part in (self.outside, *self.kept))
        staying += self.cache_bytes / self.bandwidth
        issue = _ISSUE_SECONDS * (len(self.kept) + len(self.streamed)) + _LOOP_SECONDS
        if card.in_host:
            staying += _ISSUE_SECONDS * len(self.kept) + _LOOP_SECONDS
        if not self.streamed:
            return staying if card.in_host else max(staying, issue)
        computing = [self._computing(part) for part in self.streamed]
        if card.in_host:
            computing = [each + _ISSUE_SECONDS for each in computing]
        coming = [part.num_bytes / link.up for part in self.streamed]
        turns = sum(map(max, coming[1:], computing[:-1]))
        taken = turns + max(coming[0], computing[-1] + staying)
        return taken if card.in_host else max(taken, issue)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all sequences together; None where it is not known."""
        seconds = self.seconds_per_token
        return None if not seconds else self.rows / seconds

    def text(self) -> str:
        """``resident on cuda:0: …`` or ``streamed: 9 of 32 blocks stay, …``, without a rate."""
        if self.is_resident:
            reads = self.outside.read + sum(part.read for part in self.kept)
            at = "" if self.card is None else f" at {write_rate(self.bandwidth)}"
            return f"resident on {self.device}: {write_bytes(reads)} read per token{at}"
        num_blocks = len(self.kept) + len(self.streamed)
        over = "" if self.link is None else f" over a link of {write_rate(self.link.up)}"
        return (
            f"streamed to {self.device}: {len(self.kept)} of {num_blocks} blocks stay, "
            f"{write_bytes(self.bytes_per_token)} per token{over}"
        )

    @property
    def bandwidth(self) -> float:
        """At which the device reads its weights; of a CPU device, those threads that it takes."""
        assert self.card is not None
        if not self.card.in_host or self.link is None:
            return self.card.bandwidth
        return min(self.card.bandwidth, self.threads * self.link.up)

    def _computing(self, part: Part) -> float:
        return max(part.read / self.bandwidth, part.flops / self.flops if self.flops else 0.0)


def outlook(
    engine: Engine,
    machine: Machine | None,
    *,
    rows: int,
    prompt: int,
    new_tokens: int,
    device_bytes: int | None,
) -> Outlook:
    """What ``generate`` would do with ``rows`` prompts of ``prompt`` tokens. Takes milliseconds.

    ``machine``: whose first device it is, None: rates are not known. ``device_bytes`` as there.
    Raises ModelError for a model that does not generate text.
    """
    device = engine.models[0].device
    with torch.inference_mode(False):
        tree = tree_of(engine.spec, device.torch_device)
    module: Any = tree.module
    work = work_for(module, rows=rows, prompt=prompt, length=prompt + new_tokens)
    uploads = {i: Upload.of_layer(engine.layers[i]) for i in tree.blocks}
    outside = Upload.of_tensors("outside the blocks", tree.tensors, engine.layers)
    room = None if device_bytes is None else device_bytes - work.num_bytes - outside.num_bytes
    kept = most_kept({i: upload.num_bytes for i, upload in uploads.items()}, room)
    taken = sum(uploads[i].num_bytes + uploads[i].unpacked_bytes for i in kept)
    unpacks = room is None or taken <= room
    share = _share_of_experts(module.config.get_text_config(), rows)
    size = module.dtype.itemsize
    card = None if machine is None else machine.cards[0]
    return Outlook(
        device=device.name,
        place=device.torch_device,
        rows=rows,
        outside=_part(outside, rows, share, size, less=_table_bytes(module)),
        kept=[_part(uploads[i], rows, share, size, stays_unpacked=unpacks) for i in kept],
        streamed=[_part(each, rows, share, size) for i, each in uploads.items() if i not in kept],
        cache_bytes=work.cache,
        card=card,
        link=None if machine is None else machine.links[0],
        flops=0.0 if card is None else card.flops.get(_KEYS.get(module.dtype, ""), 0.0),
        threads=threads_for(
            outside.num_bytes + sum(each.num_bytes for each in uploads.values()),
            rows,
            most=torch.get_num_threads(),
        ),
    )


def _part(
    upload: Upload,
    rows: int,
    share: tuple[float, float],
    size: int,
    *,
    less: int = 0,
    stays_unpacked: bool = False,
) -> Part:
    """What of an upload is read and computed. ``share`` of experts: that one sequence uses, that
    all do. ``less``: bytes of which only single rows are read.
    """
    experts = sum(e.num_bytes for e in upload.layout.slices if ".experts." in e.name)
    dense = upload.num_bytes - experts - less
    unpacked = upload.unpacked_bytes
    if unpacked:  # packed stacks of experts are not told apart
        read = float(max(upload.num_bytes, unpacked))
        read += 0.0 if stays_unpacked else unpacked + upload.num_bytes
        return Part(upload.num_bytes, read, 2.0 * rows * unpacked / size)
    computed = dense + experts * share[0]
    return Part(upload.num_bytes, dense + experts * share[1], 2.0 * rows * computed / size)


def _share_of_experts(config: Any, rows: int) -> tuple[float, float]:
    """The part of a layer's experts that one token uses, and that ``rows`` tokens do at most."""
    used, of_all = (
        next((n for name in names if isinstance(n := getattr(config, name, None), int) and n), 0)
        for names in (_EXPERTS_USED, _EXPERTS)
    )
    if not used or not of_all:
        return 1.0, 1.0
    return min(1.0, used / of_all), min(1.0, rows * used / of_all)


def _table_bytes(module: Any) -> int:
    """An embedding that is not the head too: of it a token reads one row."""
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    weight = getattr(table, "weight", None)
    if weight is None or getattr(head, "weight", None) is weight:
        return 0
    return int(weight.numel() * weight.element_size())
