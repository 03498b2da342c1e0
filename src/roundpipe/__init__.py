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
    from roundpipe.checkpoint.saved import SavedCheckpoint
    from roundpipe.config import ModelExecutePlan, RoundPipeRunConfig
    from roundpipe.engine.microbatch import RoundPipePackedData
    from roundpipe.engine.pool import DevicePool
    from roundpipe.engine.recompute import (
        doing_recompute,
        get_recompute_data,
        save_for_recompute,
    )
    from roundpipe.engine.updates import StepResult
    from roundpipe.errors import (
        ConfigError,
        DataError,
        DeadlockError,
        DeviceError,
        HostMemoryError,
        ModelError,
        NoRoomError,
        PlanError,
        RaceError,
        RoundPipeError,
        StallError,
        StepError,
    )
    from roundpipe.finetune.trainer.trainer import RoundPipeTrainer
    from roundpipe.optim.scaler import GradScaler
    from roundpipe.roundpipe import RoundPipe
    from roundpipe.timer import ModelTimer
    from roundpipe.wrapped import OptimizerCtx
    from roundpipe.wrapping.auto import AutoRoundPipe
    from roundpipe.wrapping.wrap import wrap_model_to_roundpipe

__version__ = "0.1.0"

__all__ = [
    "AutoRoundPipe",
    "ConfigError",
    "DataError",
    "DeadlockError",
    "DeviceError",
    "DevicePool",
    "GradScaler",
    "HostMemoryError",
    "ModelError",
    "ModelExecutePlan",
    "ModelTimer",
    "NoRoomError",
    "OptimizerCtx",
    "PlanError",
    "RaceError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "RoundPipeTrainer",
    "SavedCheckpoint",
    "StallError",
    "StepError",
    "StepResult",
    "__version__",
    "doing_recompute",
    "get_recompute_data",
    "optim",
    "plan",
    "save_for_recompute",
    "sim",
    "wrap_model_to_roundpipe",
]


def __getattr__(name: str) -> object:
    """Import a public name or room on first use (PEP 562)."""
    if name in ("optim", "plan", "sim"):
        return importlib.import_module(f"roundpipe.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'roundpipe' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"roundpipe.{_room_of(name)}"), name)
    return value


def _room_of(name: str) -> str:
    rooms = {
        "AutoRoundPipe": "wrapping.auto",
        "DevicePool": "engine.pool",
        "GradScaler": "optim.scaler",
        "ModelExecutePlan": "config",
        "ModelTimer": "timer",
        "OptimizerCtx": "wrapped",
        "RoundPipe": "roundpipe",
        "RoundPipePackedData": "engine.microbatch",
        "RoundPipeRunConfig": "config",
        "RoundPipeTrainer": "finetune.trainer.trainer",
        "SavedCheckpoint": "checkpoint.saved",
        "StepResult": "engine.updates",
        "doing_recompute": "engine.recompute",
        "get_recompute_data": "engine.recompute",
        "save_for_recompute": "engine.recompute",
        "wrap_model_to_roundpipe": "wrapping.wrap",
    }
    return rooms.get(name, "errors")


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted(set(__all__) | set(globals()))
