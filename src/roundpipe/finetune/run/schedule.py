"""Learning rate schedules as functions of the optimizer step.

A schedule maps the number of updates done so far to a factor of ``learning_rate``. With ``w``
warm-up steps of ``n`` steps, and ``m`` the share that is left at the end::

    factor
     1 |      ________                   warm-up: step / w
       |     /        \\__                progress p = (step - w) / (n - w), 0 to 1
       |    /            \\___            linear:  1 - p,  cosine: (1 + cos(pi p)) / 2,
     m |   /                 \\____       both scaled into m .. 1
       +--+---------------------+-- step
          w                     n

The same numbers as ``transformers.get_scheduler`` gives for the same names. Warm-up counts
optimizer steps, never microbatches.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


def warmup_step_count(warmup_steps: float, total_steps: int) -> int:
    """How many steps warm up: a number of steps, or below 1 a share of all steps, rounded up."""
    if warmup_steps < 1:
        return math.ceil(warmup_steps * total_steps)
    return int(warmup_steps)


def rate_factor(
    name: str, *, num_warmup_steps: int, total_steps: int, min_ratio: float = 0.0
) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the updates done so far.

    ``name``: linear, cosine, constant, constant_with_warmup. ``constant`` has no warm-up.
    Raises ConfigError for any other name.
    """
    shapes: dict[str, Callable[[float], float]] = {
        "linear": lambda progress: 1.0 - progress,
        "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
        "constant_with_warmup": lambda _: 1.0,
        "constant": lambda _: 1.0,
    }
    if name not in shapes:
        raise ConfigError(f"lr_scheduler_type: {name}\nhint: one of {', '.join(sorted(shapes))}")
    shape = shapes[name]
    warmup = 0 if name == "constant" else num_warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return min_ratio + (1.0 - min_ratio) * shape(progress)

    return factor


def make_scheduler(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """Make the scheduler whose ``step()`` is called once after every optimizer step."""
    return LambdaLR(optimizer, factor)
