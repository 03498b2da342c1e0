"""``roundpipe eval RUN``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command."""
    raise ConfigError("eval: being written")
