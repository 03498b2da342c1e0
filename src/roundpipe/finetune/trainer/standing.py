"""How far a run's callbacks had come, kept in each checkpoint beside their own states.

A run may end between a step and what follows it: a callback fails, Ctrl-C comes while the model is
evaluated, the process is killed. The record, the evaluation and the end of an epoch that are owed
then come first when it goes on, and a record is the mean of all steps since the one before it.

transformers' Trainer keeps neither, and counts the patience of early stopping from nought again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import EarlyStoppingCallback

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = "RoundPipeTrainer"  # among the states of callbacks


@dataclass
class Standing:
    """``losses``: of the steps since the last record; ``logged_loss``: the sum of those before.

    ``learning_rate``: of the last step.
    ``first`` and ``last_logged`` are steps. ``owes``: flags of ``TrainerControl`` that are to be
    done, ``step_end`` and ``epoch_end`` that are to be told, ``metrics`` that are to be taken.
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
        return self.whole_loss / max(self.counted - self.first, 0.001)

    @property
    def whole_loss(self) -> float:
        """The sum of the losses of all steps so far."""
        return self.logged_loss + sum(self.losses)

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


def kept(states: dict[str, Any] | None, step: int) -> Standing:
    """What a checkpoint after ``step`` steps says; one of ``roundpipe train`` says nothing."""
    found = (states or {}).get(_NAME)
    standing = Standing.at(step) if found is None else Standing(**found["attributes"])
    return standing if standing.counted == step else Standing.at(step)


def restore_patience(callbacks: Iterable[Any], states: dict[str, Any] | None) -> bool:
    """Have early stopping count on where it was; whether its patience was at an end there."""
    told = (states or {}).get(EarlyStoppingCallback.__name__)
    found = [each for each in callbacks if isinstance(each, EarlyStoppingCallback)]
    if len(found) != 1 or not isinstance(told, dict):
        return False
    count = int(told["attributes"]["early_stopping_patience_counter"])
    found[0].early_stopping_patience_counter = count
    return count >= found[0].early_stopping_patience
