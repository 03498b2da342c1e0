"""How far a run's callbacks had come, kept in each checkpoint beside their own states.

A run may end between a step and what follows it: a callback fails, Ctrl-C comes while the model is
evaluated, the process is killed. The record, the evaluation and the end of an epoch that are owed
then come first when it goes on, and a record is the mean of all steps since the one before it.

transformers' Trainer keeps neither, and counts the patience of early stopping from nought again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import EarlyStoppingCallback, TrainerState

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NAME = "RoundPipeTrainer"  # among the states of callbacks


@dataclass
class Standing:
    """``losses``: of the steps since the last record; ``logged_loss``: the sum of those before.

    ``first``: the step after which losses are known; ``last_logged``: that of the last record;
    ``learning_rate``: of the last step. ``owes``: flags of ``TrainerControl`` that are to be done,
    ``step_end`` and ``epoch_end`` that are to be told, ``metrics`` that are to be taken.
    """

    first: int = 0
    last_logged: int = 0
    logged_loss: float = 0.0
    losses: list[float] = field(default_factory=list)
    learning_rate: float | None = None
    owes: list[str] = field(default_factory=list)

    @classmethod
    def at(cls, step: int) -> Standing:
        """Of a run that begins at a step, with nothing known of those before."""
        return cls(first=step, last_logged=step)

    @property
    def counted(self) -> int:
        """The last step whose loss is here."""
        return self.last_logged + len(self.losses)

    @property
    def mean_loss(self) -> float:
        """Of all steps so far."""
        total = self.logged_loss + sum(self.losses)
        return total / max(self.counted - self.first, 0.001)  # as transformers has it for none

    def take(self) -> float:
        """The mean since the last record, which is made now."""
        total = sum(self.losses)
        self.logged_loss += total
        mean = total / len(self.losses)
        self.last_logged, self.losses = self.counted, []
        return mean

    def forget_after(self, step: int) -> None:
        """Steps after ``step`` were taken back; none of them is in a record."""
        del self.losses[max(0, step - self.last_logged) :]


def keep(standing: Standing, states: dict[str, Any]) -> None:
    """Put it among the states of callbacks that a checkpoint keeps."""
    states[_NAME] = {"args": {}, "attributes": asdict(standing)}


def going_on(
    file: Path, callbacks: Iterable[Any], *, step: int
) -> tuple[TrainerState, Standing, bool]:
    """What a checkpoint's ``trainer_state.json`` says after ``step`` steps; patience counts on.

    The last of the three: whether its patience was at an end there. A checkpoint of ``roundpipe
    train`` says less.
    """
    told = json.loads(file.read_text(encoding="utf-8"))
    known = TrainerState.__dataclass_fields__
    state = TrainerState(**{name: value for name, value in told.items() if name in known})
    states: Any = state.stateful_callbacks
    standing = Standing(**states[_NAME]["attributes"]) if _NAME in states else Standing.at(step)
    if standing.counted != step:
        standing = Standing.at(step)
    return state, standing, _restore_patience(callbacks, states)


def metrics_of(state: TrainerState) -> dict[str, float]:
    """What was logged after the last step, evaluations among it."""
    found: dict[str, float] = {}
    for record in state.log_history or ():
        found |= record if record.get("step") == state.global_step else {}
    return found


def _restore_patience(callbacks: Iterable[Any], states: dict[str, Any]) -> bool:
    told = states.get(EarlyStoppingCallback.__name__)
    found = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]
    if len(found) != 1 or not isinstance(told, dict):
        return False
    count = int(told["attributes"]["early_stopping_patience_counter"])
    found[0].early_stopping_patience_counter = count
    return count >= found[0].early_stopping_patience
