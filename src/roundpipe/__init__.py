"""Fine-tune models larger than your devices; names are imported on first use.

Importing torch costs seconds and ``roundpipe --help`` must not pay them, so nothing below is
imported before it is asked for. The names under ``TYPE_CHECKING`` are the same ones, for editors
and type checkers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe import optim, plan, sim
    from roundpipe.config import ModelExecutePlan, RoundPipeRunConfig
    from roundpipe.engine.microbatch import RoundPipePackedData
    from roundpipe.engine.pool import DevicePool
    from roundpipe.engine.updates import StepResult
    from roundpipe.errors import (
        ConfigError,
        DataError,
        DeadlockError,
        DeviceError,
        HostMemoryError,
        ModelError,
        PlanError,
        RaceError,
        RoundPipeError,
        StallError,
        StepError,
    )
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.roundpipe import RoundPipe
    from roundpipe.wrapped import OptimizerCtx

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DataError",
    "DeadlockError",
    "DeviceError",
    "DevicePool",
    "GradScaler",
    "HostMemoryError",
    "ModelError",
    "ModelExecutePlan",
    "OptimizerCtx",
    "PlanError",
    "RaceError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "StallError",
    "StepError",
    "StepResult",
    "__version__",
    "optim",
    "plan",
    "sim",
]


def __getattr__(name: str) -> object:
    """Import a public name or room on first use (PEP 562)."""
    match name:
        case "optim" | "plan" | "sim":
            return importlib.import_module(f"roundpipe.{name}")
        case "RoundPipe":
            room = "roundpipe.roundpipe"
        case "RoundPipeRunConfig" | "ModelExecutePlan":
            room = "roundpipe.config"
        case "GradScaler":
            room = "roundpipe.optim.scaler"
        case "OptimizerCtx":
            room = "roundpipe.wrapped"
        case "RoundPipePackedData":
            room = "roundpipe.engine.microbatch"
        case "DevicePool":
            room = "roundpipe.engine.pool"
        case "StepResult":
            room = "roundpipe.engine.updates"
        case _ if name in __all__:
            room = "roundpipe.errors"
        case _:
            raise AttributeError(f"module 'roundpipe' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(room), name)
    return value


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted(set(__all__) | set(globals()))
