"""What scripts ask a Trainer for beside training: who it is, what it has, its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.finetune.trainer.refusals import absent

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from roundpipe.finetune.run.steps import Run
    from roundpipe.finetune.run.training import Optimizing
    from roundpipe.roundpipe import RoundPipe
    from roundpipe.sim.search import Plan


class Familiar:
    """Names that need nothing but what a trainer holds."""

    model: RoundPipe
    processing_class: Any
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

    def __getattr__(self, name: str) -> Any:
        raise absent(name)
