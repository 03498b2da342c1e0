"""Which parts of a mixture of experts are routed, by name.

``all-linear`` means attention and shared experts: each routed expert sees few tokens, and a router
that moves sends them elsewhere.
"""

from __future__ import annotations

_PARTS = ("gate", "router", "shared_expert_gate", "experts")  # of a name, between dots
ROUTED = rf"(.*\.)?({'|'.join(_PARTS)})(\..*)?"  # what they are called, as a regular expression


def is_routed(name: str) -> bool:
    """Whether a module of this full name is a router, routed experts, or a part of either."""
    return not set(_PARTS).isdisjoint(name.split("."))
