"""Scores as lines for people, as values for programs, and each answer as a line of a file."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roundpipe.finetune.use.evaluating import Answers, Scores


def score_lines(scores: Sequence[Scores]) -> list[str]:
    """Two lines of each result: its loss, and its answers where there are any."""
    lines = []
    for each in scores:
        loss = each.loss
        parts = (
            f"loss {loss.loss:.4f}",
            f"perplexity {loss.perplexity:.4g}",
            f"{loss.trained:,} trained of {loss.tokens:,} tokens, {loss.samples:,} samples"
            + ("" if loss.is_whole else " so far"),
            f"{loss.tokens_per_second:,.0f} tokens/s",
        )
        lines.append(f"{each.name}: {' · '.join(parts)}")
        if each.answers is not None:
            lines.append(f"  answers: {_matches(each.answers)}")
    return lines


def _matches(answers: Answers) -> str:
    if not answers.given:
        return "none yet"
    low, high = (100 * share for share in answers.interval)
    so_far = "" if len(answers.given) == answers.total else f" so far, of {answers.total:,}"
    return (
        f"{answers.matches:,} of {len(answers.given):,} match{so_far}: {100 * answers.share:.1f} % "
        f"(with 95 % confidence {low:.1f} to {high:.1f} %); the pattern finds something in "
        f"{answers.found:,} of them"
    )


def score_values(scores: Scores) -> dict[str, Any]:
    """The same as plain values; shares from 0 to 1, seconds, nats; None for what is no number."""
    loss, answers = scores.loss, scores.answers
    values: dict[str, Any] = {
        "name": scores.name,
        "is_whole": scores.is_whole,
        "loss": _finite(loss.loss),
        "perplexity": _finite(loss.perplexity),
        "samples": loss.samples,
        "tokens": loss.tokens,
        "trained_tokens": loss.trained,
        "seconds": round(loss.seconds, 3),
        "tokens_per_second": round(loss.tokens_per_second, 1),
    }
    if answers is not None:
        values["answers"] = {
            "asked": answers.total,
            "answered": len(answers.given),
            "found": answers.found,
            "matches": answers.matches,
            "share": _finite(answers.share),
            "interval_95": list(answers.interval),
            "seconds": round(answers.seconds, 3),
        }
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def answer_lines(scores: Sequence[Scores], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A JSON object for each answer of each result."""
    return [
        json.dumps(
            {
                "model": each.name,
                "prompt": tokenizer.decode(given.asked.question.prompt),
                "reference": given.asked.question.reference,
                "answer": given.answer,
                "wanted": given.asked.wanted,
                "found": given.found,
                "matched": given.is_match,
            },
            ensure_ascii=False,
        )
        for each in scores
        if each.answers is not None
        for given in each.answers.given
    ]
