import json
from pathlib import Path

import pytest

from roundpipe.report.loss_plot import Losses, draw_losses, losses_of, read_records, smoothed

PNG = b"\x89PNG\r\n"


def write_log(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_training_and_evaluation_are_told_apart() -> None:
    records = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3}, {"step": 2, "loss": 1.5}]
    assert losses_of(records) == Losses(train=((1, 2.0), (2, 1.5)), evaluation=((1, 3.0),))


def test_what_is_no_finite_loss_is_left_out() -> None:
    records = [{"step": 1, "loss": None}, {"step": 2, "loss": float("nan")}, {"loss": 1.0}]
    assert losses_of(records) == Losses(train=(), evaluation=())


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", {"step": 1, "loss": 2.0})
    with log.open("a") as file:
        file.write('{"step": 2, "lo')
    assert read_records(log) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_a_picture_is_drawn_and_the_log_stays_as_it_was(tmp_path: Path, count: int) -> None:
    records = [{"step": i, "loss": 1 / i} for i in range(1, count + 1)]
    log = write_log(tmp_path / "log.jsonl", *records, {"step": count, "eval_loss": 0.5})
    before = log.read_bytes()
    assert draw_losses(log, tmp_path / "loss.png", title="a model")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert log.read_bytes() == before


def test_nothing_to_draw_is_no_error(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", {"step": 1, "loss": None})
    assert not draw_losses(log, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smoothed([4.0, 0.0])[0] == pytest.approx(4.0)
    assert 0 < smoothed([4.0, 0.0])[1] < 4
