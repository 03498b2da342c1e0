"""Amounts as people write them: ``64GB``, ``1.5 TiB``, ``25 GB/s``.

kB, MB, GB and TB are powers of 1000, as everywhere in this project; KiB, MiB, GiB, TiB of 1024.
"""

from __future__ import annotations

import math
import re

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kmgtp])(i?)b?|b)?", re.IGNORECASE)
_PREFIXES = " kmgtp"


def read_bytes(text: str) -> int | None:
    """The bytes that ``text`` says, or None; a bare number is bytes."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    number, prefix, binary = found.groups()
    power = _PREFIXES.index((prefix or " ").lower())
    step = 1024.0 if binary else 1000.0
    return round(float(number) * math.pow(step, power))


def read_rate(text: str) -> float | None:
    """The bytes per second that ``text`` says, with or without ``/s``, or None."""
    amount = read_bytes(re.sub(r"\s*/\s*s(?:ec)?$", "", text.strip(), flags=re.IGNORECASE))
    return None if amount is None else float(amount)


def write_bytes(amount: float, *, exact: bool = False) -> str:
    """``amount`` with a unit, three digits; ``exact``: as many as read back to the same number."""
    power = 0 if amount < 1000 else min(5, int(math.log10(amount) / 3 + 1e-9))
    unit = (_PREFIXES[power].upper() if power != 1 else "k") + "B" if power else "B"
    scaled = amount / 1000**power
    digits = range(3, 18) if exact else (3,)
    for places in digits:
        text = f"{scaled:.{places}g} {unit}"
        if "e" not in text and (not exact or read_bytes(text) == amount):
            return text
    return str(round(amount)) if exact else f"{scaled:.0f} {unit}"


def write_rate(rate: float, *, exact: bool = False) -> str:
    """``rate`` in bytes per second with a unit; see `write_bytes`."""
    return write_bytes(rate, exact=exact) + "/s"
