"""Who is told of each step of a run, and says what is to follow it.

    begin → step_begins → (gradients) gradients_made → (update) updated → step_ended → step_begins …

The loop (`steps.py`) makes steps until `is_over`. What follows a step, a record, an evaluation, a
checkpoint, is for its `Events` to decide and to do: `ByConfig` as the config says.

A step that failed is given again: `step_begins` and `step_ended` then come once more for it, and
for those that were taken back with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from roundpipe.finetune.run.saving import trainer_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.run.steps import Run


class Events(Protocol):
    """Told of steps, in the thread that makes them."""

    @property
    def is_over(self) -> bool:
        """Whether no further step is to be made."""
        ...

    def begin(self, run: Run) -> None:
        """Steps are about to be made; some may have been, by a run that ended early."""
        ...

    def step_begins(self, step: int) -> bool:
        """A step is about to be made; False: it is not to be, after all."""
        ...

    def gradients_made(self, batch: Mapping[str, Any]) -> None:
        """Forward and backward of the step's ``batch`` were given; its update was not yet."""
        ...

    def updated(self) -> None:
        """The step's update was given."""
        ...

    def step_ended(self) -> None:
        """The step is counted (`Training.done`); its update may be under way."""
        ...

    def trainer_state(self) -> dict[str, Any]:
        """What ``trainer_state.json`` of a checkpoint after the steps done says."""
        ...


class ByConfig:
    """Evaluates, saves and ends as the config of a run says; nobody else is told."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._is_last = False

    @property
    def is_over(self) -> bool:
        """Whether all steps are made, or evaluations did not get better for too long."""
        return self._is_last

    def begin(self, run: Run) -> None:
        """Do what is due after the steps done: it may be owed by a run that ended there."""
        self._run = run
        self._follow_up(run)

    def step_begins(self, step: int) -> bool:
        """Say yes."""
        return True

    def gradients_made(self, batch: Mapping[str, Any]) -> None:
        """Nothing."""

    def updated(self) -> None:
        """Nothing."""

    def step_ended(self) -> None:
        """Do what is due after the step."""
        assert self._run is not None, "begin first"
        self._follow_up(self._run)

    def trainer_state(self) -> dict[str, Any]:
        """The state with the names that transformers gives it."""
        assert self._run is not None, "begin first"
        return trainer_state(self._run.training)

    def _follow_up(self, run: Run) -> None:
        training, saver, stop = run.training, run.saver, run.stop
        patience = run.job.config.early_stopping_patience
        is_last = training.done >= training.order.total_steps
        is_last = is_last or training.best.is_given_up(patience)
        if is_last or saver.is_due or training.is_evaluation_due(saver.due):
            training.settle()
            is_better = False
            if training.is_evaluation_due(saver.due):
                is_better = training.evaluate(lambda: stop.is_asked)
                is_last = is_last or training.best.is_given_up(patience)
            saver.save_if_due(is_better=is_better, is_last=is_last)
        self._is_last = is_last
