"""Learning rate schedules as functions of the optimizer step.

A schedule maps the number of updates done so far to a factor of ``learning_rate``. With ``w``
warm-up steps of ``n`` steps, and ``m`` the share that is left at the end::

    factor
     1 |      ________                   warm-up: step / w
       |     /        \\__                progress p = (step - w) / (n - w), 0 to 1
       |    /            \\___            linear:  1 - p,  cosine: (1 + cos(2 pi c p)) / 2
     m |   /                 \\____       (c cycles, one half by default), both scaled into m .. 1
       +--+---------------------+-- step
          w                     n

    warmup_stable_decay: up from m, flat, and down to m in the last ``num_decay_steps``.

The same numbers as ``transformers.get_scheduler`` gives for the same names and arguments. Warm-up
counts optimizer steps, never microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim import Optimizer

    from roundpipe.finetune.settings.config import TrainConfig

_DECAY_SHARE = 0.1  # of all steps, where nobody says how long a schedule decays
_MINIMUM = ("min_lr", "min_lr_rate", "min_lr_ratio")  # three names for what is left at the end
_CURVES: dict[str, Callable[[float], float]] = {  # from 1 down to 0
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What some schedules may be told besides, by transformers' names.

    ``num_decay_steps``: below 1 a share of all steps; None: a tenth of them.
    """

    num_cycles: float = 0.5
    num_decay_steps: float | None = None
    num_stable_steps: int | None = None
    warmup_type: str = "linear"
    decay_type: str = "cosine"

    def __post_init__(self) -> None:
        for name in ("warmup_type", "decay_type"):
            if getattr(self, name) not in _CURVES:
                raise ConfigError(
                    f"lr_scheduler_kwargs: {name}: {getattr(self, name)}\n"
                    f"hint: one of {', '.join(_CURVES)}"
                )


def warmup_step_count(warmup_steps: float, total_steps: int) -> int:
    """How many steps warm up: a number of steps, or below 1 a share of all steps, rounded up."""
    if warmup_steps < 1:
        return math.ceil(warmup_steps * total_steps)
    return int(warmup_steps)


def rate_factor(
    name: str,
    *,
    num_warmup_steps: int,
    total_steps: int,
    min_ratio: float = 0.0,
    shape: Shape = Shape(),
) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the updates done so far.

    ``name``: linear, cosine, cosine_with_min_lr, warmup_stable_decay, constant,
    constant_with_warmup. ``constant`` has no warm-up. Raises ConfigError for any other name.
    """
    if name == "warmup_stable_decay":
        return _warmup_stable_decay(num_warmup_steps, total_steps, min_ratio, shape)

    def cosine(progress: float) -> float:
        return max(0.0, _CURVES["cosine"](2.0 * shape.num_cycles * progress))

    curves: dict[str, Callable[[float], float]] = {
        "linear": _CURVES["linear"],
        "cosine": cosine,
        "cosine_with_min_lr": cosine,
        "constant_with_warmup": lambda _: 1.0,
        "constant": lambda _: 1.0,
    }
    if name not in curves:
        known = ", ".join(sorted((*curves, "warmup_stable_decay")))
        raise ConfigError(f"lr_scheduler_type: {name}\nhint: one of {known}")
    curve = curves[name]
    warmup = 0 if name == "constant" else num_warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return min_ratio + (1.0 - min_ratio) * curve(progress)

    return factor


def _warmup_stable_decay(
    warmup: int, total_steps: int, min_ratio: float, shape: Shape
) -> Callable[[int], float]:
    asked = _DECAY_SHARE if shape.num_decay_steps is None else shape.num_decay_steps
    decay = math.ceil(asked * total_steps) if asked < 1 else int(asked)
    stable = shape.num_stable_steps
    if stable is None:
        stable = total_steps - warmup - decay  # below 0: the decay has begun when it is warm
    up, down = _CURVES[shape.warmup_type], _CURVES[shape.decay_type]
    cycles = 2.0 * shape.num_cycles if shape.decay_type == "cosine" else 1.0

    def factor(step: int) -> float:
        if step < warmup:
            part = up(1.0 - step / warmup)
        elif step < warmup + stable:
            return 1.0
        elif step < warmup + stable + decay:
            part = down(cycles * (step - warmup - stable) / decay)
        else:
            return min_ratio
        return max(0.0, min_ratio + (1.0 - min_ratio) * part)

    return factor


def factor_of(config: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """`rate_factor` as ``config`` says. Raises ConfigError for what is contradictory in it."""
    more: Mapping[str, Any] = getattr(config, "lr_scheduler_kwargs", None) or {}
    known = [field.name for field in fields(Shape)]
    if unknown := more.keys() - {*known, *_MINIMUM}:
        raise ConfigError(
            f"lr_scheduler_kwargs: {', '.join(sorted(unknown))}\n"
            f"hint: known are {', '.join((*known, *_MINIMUM))}"
        )
    return rate_factor(
        config.lr_scheduler_type,
        num_warmup_steps=warmup_step_count(config.warmup_steps, total_steps),
        total_steps=total_steps,
        min_ratio=_min_ratio(config, more),
        shape=Shape(**{name: more[name] for name in known if more.get(name) is not None}),
    )


def _min_ratio(config: TrainConfig, more: Mapping[str, Any]) -> float:
    said = {name: more[name] for name in _MINIMUM if more.get(name) is not None}
    if config.min_lr_ratio is not None:
        said["min_lr_ratio"] = config.min_lr_ratio
    if len(said) > 1:
        raise ConfigError(f"the least rate is given as {' and as '.join(said)}\nhint: leave one")
    if not said:
        if config.lr_scheduler_type == "cosine_with_min_lr":
            raise ConfigError(
                "lr_scheduler_type: cosine_with_min_lr, but not down to what"
                "\nhint: min_lr_ratio=0.1"
            )
        return 0.0
    ((name, value),) = said.items()
    ratio = float(value)
    if name == "min_lr":
        ratio = ratio / config.learning_rate if config.learning_rate else 0.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"the least rate is not within the rate: {name}={value}\nhint: {name}=0")
    return ratio


def make_scheduler(optimizer: Optimizer, config: TrainConfig, total_steps: int) -> LambdaLR:
    """Make the scheduler whose ``step()`` is called once after every optimizer step.

    Raises ConfigError for a schedule that is contradictory in itself.
    """
    return LambdaLR(optimizer, factor_of(config, total_steps))
