"""The loss of a Trainer's model on held-out samples, whether a run is under way or not."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from transformers import trainer_utils

from roundpipe.finetune.run.batches import batches_of, cut_of
from roundpipe.finetune.run.evaluate import Evaluation, evaluate
from roundpipe.finetune.run.retry import Splitting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roundpipe.finetune.run.own_loss import OwnLoss
    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.run.steps import Run
    from roundpipe.roundpipe import RoundPipe


@dataclass
class Evaluating:
    """``rows``: samples that count as one prediction step, as transformers' batches do."""

    job: Job
    pipe: RoundPipe
    rows: int
    splitting: Splitting = field(default_factory=Splitting)

    def loss_on(
        self, samples: Any, *, run: Run | None, tell: Callable[[], None], say: Callable[[str], None]
    ) -> Evaluation:
        """Evaluate the newest weights; ``tell`` is called once for each prediction step.

        ``run``: that is under way, which waits meanwhile and may be stopped. Blocks until done.
        """
        told = 0

        def count(done: int) -> None:
            nonlocal told
            while told * self.rows < done:
                told += 1
                tell()

        job = self.job
        with _at_rest(self.pipe) if run is None else run.training.paused():
            return evaluate(
                self.pipe if job.loss is None else _by(job.loss, self.pipe),
                batches_of(job.batches, samples, job.config.batch_size),
                run_config=functools.partial(cut_of, job.batches, job.config, self.splitting),
                should_stop=lambda: run is not None and run.stop.is_asked,
                tell=count,
                splitting=self.splitting,
                say=say,
            )


@contextlib.contextmanager
def _at_rest(pipe: RoundPipe) -> Iterator[None]:
    was_training = pipe.training
    pipe.eval()
    try:
        yield
    finally:
        pipe.train(was_training)


def _by(loss: OwnLoss, pipe: RoundPipe) -> Callable[..., Any]:
    """The model with a loss of the user's, which needs all logits on the host."""

    def call(*, roundpipe_run_config: Any, **batch: Any) -> Any:
        inputs, labels = loss.parted(batch)
        config = replace(loss.run_config(roundpipe_run_config, len(labels)), loss_only=False)
        outputs = pipe(**inputs, roundpipe_run_config=config)
        return SimpleNamespace(loss=loss.over(labels)(outputs, labels))

    return call


def speed(kind: str, started: float, **counts: float | None) -> dict[str, float]:
    """``KIND_runtime`` in seconds since ``started`` (`time.time`), and what was done per second."""
    module: Any = trainer_utils
    metrics: dict[str, float] = module.speed_metrics(kind, started, **counts)
    return metrics
