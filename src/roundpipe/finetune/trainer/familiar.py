"""What scripts ask a Trainer for beside training: who it is, its callbacks, its log and state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.durable import write_text
from roundpipe.finetune.output.earlier import STATE_FILE
from roundpipe.finetune.trainer.callback_handler import tell
from roundpipe.finetune.trainer.evaluating import speed
from roundpipe.finetune.trainer.refusals import absent

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from roundpipe.finetune.run.steps import Run
    from roundpipe.finetune.run.training import Optimizing
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.roundpipe import RoundPipe
    from roundpipe.sim.search import Plan


class Familiar:
    """Names that need nothing but what a trainer holds."""

    model: RoundPipe
    config: TrainConfig
    processing_class: Any
    args: Any
    state: Any  # transformers' TrainerState
    control: Any  # and TrainerControl
    callback_handler: Any
    lr_scheduler: Any = None
    _run: Run | None
    _optimizing: Optimizing | None

    @property
    def model_wrapped(self) -> RoundPipe:
        """The model, which is wrapped."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """``processing_class`` by its old name."""
        return self.processing_class

    @property
    def optimizer(self) -> Any:
        """What updates the masters; None before the first `train`, unless it was given."""
        return None if self._optimizing is None else self._optimizing.optimizer

    @property
    def plan(self) -> Plan | None:
        """What the planner chose for the last step, and why; None before the first."""
        return self.model.plan

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        return self._run is not None

    def is_world_process_zero(self) -> bool:
        """Say yes: there is one process."""
        return True

    def is_local_process_zero(self) -> bool:
        """Say yes: there is one process."""
        return True

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Tell ``callback``, an instance or a class, of what happens from now on."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Take a callback away and return it; None where there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Take a callback away."""
        self.callback_handler.remove_callback(callback)

    # ---- log and state

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add ``logs`` to ``state.log_history`` and ``trainer_log.jsonl``; tell callbacks."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen not in ("no", False):
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                seen = self.state.num_input_tokens_seen
                logs.update(speed("train", start_time, num_tokens=seen))
        record = {**logs, "step": self.state.global_step}
        self.state.log_history.append(record)
        if self._run is not None:
            plain = {name: _finite(value) for name, value in record.items()}
            self._run.training.log.append(plain)
        tell(self, "on_log", logs=logs)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into ``output_dir``."""
        folder = Path(self.config.output_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._state_to_save(), indent=2)
        write_text(folder / STATE_FILE, text + "\n")

    def _state_to_save(self) -> dict[str, Any]:
        return {name: getattr(self.state, name) for name in type(self.state).__dataclass_fields__}

    def __getattr__(self, name: str) -> Any:
        raise absent(name)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
