"""A pass forward that saved what a backward needs, and when that may not run any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.engine.program import Program
    from roundpipe.engine.run import Run


@dataclass(frozen=True)
class ForwardPass:
    """A pass that a backward may follow: what it saved, and what must not have changed by then."""

    run: Run
    backward: Callable[[bool], Program]
    wanted: tuple[bool, ...]
    num_versions: int
    num_rewrites: int
    modes: list[bool]

    def require_current(self, num_versions: int, num_rewrites: int, modes: list[bool]) -> None:
        """Raise ConfigError if weights, attributes or modes are not those of the pass any more."""
        if self.num_versions != num_versions:
            raise ConfigError(
                "the weights were updated between forward() and its backward()\n"
                "hint: backward() first, then step"
            )
        if self.num_rewrites != num_rewrites:
            raise ConfigError(
                "an attribute of the model was set between forward() and its backward(), which "
                "recomputes\nhint: backward() first"
            )
        if self.modes != modes:
            raise ConfigError(
                "train() or eval() came between forward() and its backward(), which recomputes\n"
                "hint: backward() first"
            )
