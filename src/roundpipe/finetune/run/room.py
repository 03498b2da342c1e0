"""Room on the disk for all that a run will write, looked for before its first step.

The figures are those of `roundpipe.models.estimate.disk`, here from the parameters of the model
that is to be trained: while a checkpoint is written there is one more than are kept.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.checkpoint.find import checkpoints_in
from roundpipe.errors import PlanError
from roundpipe.plan.amounts import write_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from roundpipe.finetune.settings.config import TrainConfig

_FREE_BYTES = 1 << 20  # that a run takes besides: logs, plot, configs
_UNLIMITED = 2  # checkpoints that are counted where all are kept
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2 * (1 + 4 / 256)}  # bytes of a trained weight
_MASTER = 4


@dataclass(frozen=True)
class Room:
    """Bytes of the result, and of what a checkpoint holds beside it to go on from."""

    result: int
    state: int

    @classmethod
    def of(cls, model: nn.Module, config: TrainConfig, *, beside: int = 0) -> Room:
        """What a run of ``config`` writes of ``model``: an adapter alone, or all of it.

        ``beside``: bytes of what lies beside the weights, the tokenizer.
        """
        is_adapter = config.finetuning_type in ("lora", "qlora")
        moments = _MOMENTS[config.optim_state_dtype]
        result, state = beside, 0.0
        for parameter in model.parameters():
            if parameter.requires_grad or not is_adapter:
                result += parameter.nbytes
            if parameter.requires_grad:
                size = parameter.element_size()
                # A bf16 weight with narrow moments is its own master, with what it lacks of fp32.
                is_own = size == 2 and config.optim_state_dtype != "fp32"
                state += parameter.numel() * (moments + (2 if is_own else _MASTER))
        return cls(result, round(state))

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint."""
        return self.result + self.state

    def needs(self, config: TrainConfig) -> int:
        """The most bytes that checkpoints and result take at once."""
        kept = _kept(config)
        if config.save_only_model:  # but the one of an interruption
            return kept * self.result + self.checkpoint + self.result
        return (kept + 1) * self.checkpoint + self.result


def _kept(config: TrainConfig) -> int:
    if config.save_strategy == "no":
        return 0
    limit = config.save_total_limit
    kept = _UNLIMITED if limit is None else limit
    return kept + (1 if config.load_best_model_at_end else 0)


def require_room(room: Room, config: TrainConfig, folder: Path) -> None:
    """Raise PlanError unless ``folder`` has room; what an earlier run keeps there is counted in."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    has = shutil.disk_usage(there).free + sum(map(_bytes_in, checkpoints_in(folder)))
    needs = room.needs(config) + _FREE_BYTES
    if needs <= has:
        return
    kept = f"{_kept(config)} + 1 checkpoints of {write_bytes(room.checkpoint)}"
    raise PlanError(
        f"does not fit on the disk of output_dir: {write_bytes(needs)} of {write_bytes(has)}: "
        f"{kept}, result {write_bytes(room.result)}: {config.output_dir}"
        f"\nhint: {_ways_out(room, config, has)}"
    )


def _ways_out(room: Room, config: TrainConfig, has: int) -> str:
    """Settings with which it would fit, each alone."""
    narrow = room
    if config.optim_state_dtype == "fp32":
        narrow = Room(room.result, round(room.state * (_MOMENTS["int8"] + 4) / 12))
    tries: dict[str, tuple[Room, dict[str, Any]]] = {
        "save_total_limit=1": (room, {"save_total_limit": 1}),
        "optim_state_dtype=int8": (narrow, {}),
        "save_only_model=true": (room, {"save_only_model": True}),
        "save_strategy=no": (room, {"save_strategy": "no"}),
    }
    found = []
    for text, (size, changes) in tries.items():
        needs = size.needs(config.model_copy(update=changes)) + _FREE_BYTES
        if needs <= has:
            found.append(f"{text} ({write_bytes(needs)})")
    return ", or ".join([*found[:2], "output_dir=FOLDER on a larger disk"])


def _bytes_in(folder: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(place, name))
        for place, _, names in os.walk(folder)
        for name in names
    )
