"""Draw the losses of a run from its ``trainer_log.jsonl``; reads records, changes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_TRAIN_COLOUR = "#4878a8"
_EVAL_COLOUR = "#c0504d"
_SMOOTHED_FROM = 30  # points; fewer are better seen as they are


@dataclass(frozen=True)
class Losses:
    """Points (step, loss) of a run; only finite losses."""

    train: tuple[tuple[int, float], ...]
    evaluation: tuple[tuple[int, float], ...]


def read_records(log_file: Path) -> list[dict[str, Any]]:
    """Every whole JSON line of a log; a last line cut off by a crash is left out."""
    records = []
    with log_file.open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def losses_of(records: Iterable[dict[str, Any]]) -> Losses:
    """Pick the points to draw."""
    kept = list(records)
    return Losses(train=_points(kept, "loss"), evaluation=_points(kept, "eval_loss"))


def draw_losses(log_file: Path, picture: Path, *, title: str = "") -> bool:
    """Draw training and evaluation loss over the steps into ``picture`` (png).

    Returns False, and draws nothing, where the log holds no finite loss. Needs no display.
    """
    losses = losses_of(read_records(log_file))
    if not losses.train and not losses.evaluation:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415, costs 0.5 s
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(7.0, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, losses.train)
    if losses.evaluation:
        steps, values = zip(*losses.evaluation, strict=True)
        axes.plot(steps, values, "o-", color=_EVAL_COLOUR, markersize=4, label="evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss per trained token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    if title:
        axes.set_title(title, fontsize=10)
    figure.savefig(picture, format="png")
    return True


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean of ``values``, corrected for its start (as Adam corrects its moments)."""
    means, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        means.append(mean / (1 - weight**count))
    return means


def _points(records: Sequence[dict[str, Any]], key: str) -> tuple[tuple[int, float], ...]:
    return tuple(
        (record["step"], float(record[key]))
        for record in records
        if isinstance(record.get(key), int | float)
        and math.isfinite(record[key])
        and isinstance(record.get("step"), int)
    )


def _draw_training(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    if not points:
        return
    steps, values = zip(*points, strict=True)
    is_smoothed = len(points) >= _SMOOTHED_FROM
    axes.plot(
        steps,
        values,
        color=_TRAIN_COLOUR,
        alpha=0.35 if is_smoothed else 1.0,
        marker="." if len(points) < _SMOOTHED_FROM else "",
        label=None if is_smoothed else "training",
    )
    if is_smoothed:
        axes.plot(steps, smoothed(values), color=_TRAIN_COLOUR, label="training (smoothed)")
