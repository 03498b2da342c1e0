"""How far two models are apart, by their logits over the same text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roundpipe.roundpipe import RoundPipe

_TEXT = "Tom has three boxes with twelve apples each. He gives five apples away. How many are left?"
_MOST_TOKENS = 128


@dataclass(frozen=True)
class Difference:
    """Of logits over ``tokens`` tokens.

    ``largest``: absolute difference; ``low``, ``high``: the first model's smallest and largest
    logit; ``share``: the root of the mean squared difference, as a share of the logits' own spread;
    ``same``: tokens after which both would go on alike.
    """

    tokens: int
    largest: float
    low: float
    high: float
    share: float
    same: int

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Difference:
        """Of logits [tokens, vocabulary]."""
        one, other = first.double(), second.double()
        gap = one - other
        spread = (one - one.mean(-1, keepdim=True)).square().mean().sqrt()
        return cls(
            tokens=len(one),
            largest=float(gap.abs().max()),
            low=float(one.min()),
            high=float(one.max()),
            share=float(gap.square().mean().sqrt() / spread.clamp_min(1e-30)),
            same=int((one.argmax(-1) == other.argmax(-1)).sum()),
        )

    def line(self) -> str:
        """For people."""
        alike = "all" if self.same == self.tokens else f"{self.same}"
        return (
            f"logits of {self.tokens} tokens differ by {self.largest:.2g} at most "
            f"(they go from {self.low:.3g} to {self.high:.3g}); "
            f"the next token is the same after {alike} of {self.tokens}"
        )


def sample_ids(tokenizer: Any, prompts: Sequence[str], rows: int) -> Tensor:
    """The tokens [1, length] of a text that a result can be told by.

    ``rows``: of the embedding; a tokenizer may make others. Without a tokenizer: some of all.
    """
    ids: list[int] = []
    if tokenizer is not None:
        text = prompts[0] if prompts else _TEXT
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(text)["input_ids"]
        ids = [token for token in ids if token < rows]
    if len(ids) < 2:
        step = max(1, rows // 16)
        ids = list(range(0, rows, step))
    return torch.tensor([ids[:_MOST_TOKENS]])


def logits_of(model: RoundPipe, ids: Tensor) -> Tensor:
    """Logits [tokens, vocabulary] in fp32 on the host."""
    with torch.no_grad():
        found: Any = model(input_ids=ids)
    return found.logits[0].detach().float().cpu().clone()  # type: ignore[no-any-return]
