"""How fast a model will answer, in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.engine.outlook import Outlook


def outlook_line(one: Outlook, many: Outlook) -> str:
    """What will happen, and tokens/s of one prompt and of ``many.rows`` at a time, estimated."""
    rates = [_about(each) for each in ([one] if many.rows == one.rows else [one, many])]
    if not all(rates):
        return many.text()
    text = f"{many.text()}: about {rates[0]} tokens/s"
    if len(rates) > 1:
        text += f", {rates[1]} with {many.rows} prompts at a time"
    return f"{text} (estimate)"


def rate_text(rate: float) -> str:
    """A rate with the digits that mean something: ``52``, ``8.8``, ``0.21``."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _about(outlook: Outlook) -> str:
    rate = outlook.tokens_per_second
    return "" if rate is None else rate_text(rate)
