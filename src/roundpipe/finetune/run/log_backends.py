"""The services that a run can be logged to, each in the few calls that are needed of it.

A package is imported when its logger is opened, in that logger's thread. What its environment
variables say (``WANDB_*``, ``MLFLOW_TRACKING_URI``, …) is the package's own business: an argument
is given only where the config or nobody says something.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from roundpipe.finetune.run.loggers import Backend, Opening

_PROJECT = "roundpipe"  # where neither config nor environment names one
_STEP = "train/global_step"
_MLFLOW_PARAMS = 100  # that it takes in one call
_MLFLOW_LENGTH = 500  # characters of a value that every version of it takes


class TensorBoard:
    """Event files in ``runs/``; of a resumed run the steps after it are taken back."""

    run_id = None
    last_step = 0  # steps after the one that is gone on from are purged

    def __init__(self, opening: Opening) -> None:
        made = importlib.import_module("torch.utils.tensorboard")
        after = opening.after_step
        self._writer: Any = made.SummaryWriter(
            log_dir=str(opening.folder / "runs"),
            purge_step=after + 1 if after else None,
            flush_secs=30,
        )
        if opening.about and not after:
            lines = [f"    {key}: {value}" for key, value in opening.about.items()]
            self._writer.add_text("config", "\n".join(lines), 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, text: str) -> None:
        """A page of text."""
        self._writer.add_text(name, text)

    def close(self, *, ok: bool) -> None:
        """Write out what waits; there is no mark of success in these files."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, online or offline as the environment says."""

    def __init__(self, opening: Opening) -> None:
        wandb = importlib.import_module("wandb")
        said = opening.environment
        self._run: Any = wandb.init(
            project=_named(opening.project, said, "WANDB_PROJECT", _PROJECT),
            name=_named(opening.name, said, "WANDB_NAME", opening.folder.name),
            dir=_named(None, said, "WANDB_DIR", str(opening.folder)),
            id=opening.run_id,
            resume="allow" if opening.run_id else None,
            config=dict(opening.about) or None,
            # a bar that is drawn over and over is no log, and run.log has all lines
            settings=None if "WANDB_CONSOLE" in said else wandb.Settings(console="off"),
        )
        # Steps are a value like others: what a resumed run logs again is not out of order then.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP, step_sync=True)

    @property
    def run_id(self) -> str:
        """As W&B has it."""
        return str(self._run.id)

    @property
    def last_step(self) -> int:
        """As its summary says; offline there is none."""
        return _whole(self._run.summary.get(_STEP))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({**values, _STEP: step})

    def text(self, name: str, text: str) -> None:
        """A line of its summary."""
        self._run.summary[name] = text

    def close(self, *, ok: bool) -> None:
        """Send what waits and end the run."""
        self._run.finish(exit_code=0 if ok else 1)


class MLflow:
    """A run of an experiment; where, its environment or ``mlflow`` itself says."""

    def __init__(self, opening: Opening) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        said = opening.environment
        project = _named(opening.project, said, "MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if project is not None and "MLFLOW_EXPERIMENT_ID" not in said:
            self._mlflow.set_experiment(project)
        name = opening.name or opening.folder.name
        run = self._mlflow.start_run(run_id=opening.run_id, run_name=name)
        self.run_id = str(run.info.run_id)
        self.last_step = _whole(run.data.metrics.get(_STEP)) if opening.run_id else 0
        if not opening.run_id:
            for part in _parts(dict(opening.about), _MLFLOW_PARAMS):
                self._mlflow.log_params({k: str(v)[:_MLFLOW_LENGTH] for k, v in part.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One point for each value."""
        self._mlflow.log_metrics({**values, _STEP: step}, step=step)

    def text(self, name: str, text: str) -> None:
        """A text file among its artifacts."""
        self._mlflow.log_text(text, f"{name}.txt")

    def close(self, *, ok: bool) -> None:
        """End the run."""
        self._mlflow.end_run("FINISHED" if ok else "FAILED")


class Trackio:
    """A run of trackio, which goes on by its name."""

    def __init__(self, opening: Opening) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        said = opening.environment
        self.run_id = opening.run_id or f"{opening.name or opening.folder.name}-{_now()}"
        run: Any = self._trackio.init(
            project=opening.project or said.get("TRACKIO_PROJECT") or _PROJECT,
            name=self.run_id,
            resume="allow" if opening.run_id else "never",
            config={key: str(value) for key, value in opening.about.items()} or None,
        )
        # 0.x knows the step that it would count next, under no public name
        self.last_step = _whole(getattr(run, "_next_step", 0)) - 1 if opening.run_id else 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._trackio.log(dict(values), step=step)

    def text(self, name: str, text: str) -> None:
        """A value that is text."""
        self._trackio.log({name: text}, step=0)

    def close(self, *, ok: bool) -> None:
        """Send what waits and end the run."""
        self._trackio.finish()


def NO_BACKEND(opening: Opening) -> Backend:  # noqa: N802 - stands for a class
    """A logger that nobody knows; the config lets none through."""
    raise ConfigError(f"report_to: not a logger: {opening}")


BACKENDS: dict[str, Callable[[Opening], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _named(
    said: str | None, environment: Mapping[str, str], variable: str, usual: str
) -> str | None:
    """What the config says, else None where the environment does, else the usual."""
    return said or (None if environment.get(variable) else usual)


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _now() -> str:
    return time.strftime("%m%d-%H%M%S")


def _parts(values: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    keys = list(values)
    for start in range(0, len(keys), size):
        yield {key: values[key] for key in keys[start : start + size]}
