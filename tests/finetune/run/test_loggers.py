"""Loggers that work, fail, hang and go on; none of it is a run's concern.

W&B, MLflow and trackio are stood for by modules with the signatures of their own calls (wandb 0.31,
mlflow 3.17, trackio 0.2x): what is given to them by a name they do not have fails here too.
"""

from __future__ import annotations

import json
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.run import loggers as module
from roundpipe.finetune.run.loggers import Opening, named_values, open_loggers, require_loggers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def config_of(*names: str, **said: Any) -> Any:
    return SimpleNamespace(**{"report_to": names, "project": None, "run_name": None, **said})


class Recorded:
    """A logger that keeps what it is given; fails or hangs where it is told to."""

    def __init__(self, opening: Opening, *, fails_at: str = "", last_step: int = 0) -> None:
        self.opening, self.fails_at, self.last_step = opening, fails_at, last_step
        self.run_id = opening.run_id or "made"
        self.calls: list[Any] = []
        self.hold = threading.Event()
        self._check("open")

    def _check(self, what: str) -> None:
        if self.fails_at == what:
            raise OSError(f"cannot {what}\nmore about it")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._check("log")
        if self.fails_at == "hang":
            self.hold.wait()
        self.calls.append((step, dict(values)))

    def text(self, name: str, text: str) -> None:
        self._check("text")
        self.calls.append((name, text))

    def close(self, *, ok: bool) -> None:
        self._check("close")
        self.calls.append(("close", ok))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    """Loggers by name, once they are open; ``how[name]`` is what each is made with."""
    found: dict[str, Recorded] = {}
    found_how: dict[str, dict[str, Any]] = {}

    def maker(name: str) -> Any:
        def make(opening: Opening) -> Recorded:
            found[name] = Recorded(opening, **found_how.get(name, {}))
            return found[name]

        return make

    names = ("tensorboard", "wandb", "mlflow")
    monkeypatch.setattr(module, "BACKENDS", {name: maker(name) for name in names})
    found["how"] = found_how  # type: ignore[assignment]
    return found


def test_every_logger_gets_every_record_by_the_names_its_users_know(
    made: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    opened = open_loggers(config_of("wandb", "mlflow"), tmp_path, say=said.append)
    opened.log(1, {"step": 1, "total_steps": 9, "loss": 2.5, "grad_norm": None, "skipped": True})
    opened.log(1, {"step": 1, "eval_loss": 2.0})
    opened.text("sample", "hello")
    opened.close(ok=False)
    expected = [(1, {"train/loss": 2.5}), (1, {"eval/loss": 2.0}), ("sample", "hello")]
    for name in ("wandb", "mlflow"):
        assert made[name].calls == [*expected, ("close", False)]
    assert said == []
    assert named_values({"epoch": 0.5, "eval_tokens": 3}) == {"train/epoch": 0.5, "eval/tokens": 3}


@pytest.mark.parametrize("what", ["open", "log", "text", "close"])
def test_one_that_fails_is_told_once_and_left_out_and_the_others_go_on(
    made: dict[str, Any], tmp_path: Path, what: str
) -> None:
    made["how"]["wandb"] = {"fails_at": what}
    said: list[str] = []
    opened = open_loggers(config_of("wandb", "mlflow"), tmp_path, say=said.append)
    for step in (1, 2):
        opened.log(step, {"loss": 1.0})
        opened.text("a", "b")
    opened.close()
    assert said == [f"wandb failed and is left out from here on: cannot {what}"]
    assert [call[0] for call in made["mlflow"].calls] == [1, "a", 2, "a", "close"]


def test_one_that_hangs_is_left_behind_in_bounded_time(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSING_SECONDS", 0.05)
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    made["how"]["wandb"] = {"fails_at": "hang"}
    said: list[str] = []
    opened = open_loggers(config_of("wandb"), tmp_path, say=said.append)
    for step in range(1, 9):
        opened.log(step, {"loss": 1.0})
    opened.close()
    made["wandb"].hold.set()
    assert said == [
        "wandb does not keep up: records are left out there",
        "wandb has not sent everything in time and is left behind",
    ]


def test_one_that_takes_long_to_open_holds_no_step_up(
    made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    inner = module.BACKENDS["wandb"]
    monkeypatch.setitem(module.BACKENDS, "wandb", lambda opening: go_on.wait() and inner(opening))
    monkeypatch.setattr(module, "_OPENING_SECONDS", 0.01)
    said: list[str] = []
    opened = open_loggers(config_of("wandb"), tmp_path, say=said.append)
    opened.log(1, {"loss": 1.0})
    go_on.set()
    opened.close()
    assert said == ["wandb does not answer yet; training begins without waiting for it"]
    assert made["wandb"].calls == [(1, {"train/loss": 1.0}), ("close", True)]


def test_a_resumed_run_goes_on_in_the_same_place_and_repeats_no_step(
    made: dict[str, Any], tmp_path: Path
) -> None:
    open_loggers(config_of("wandb"), tmp_path, say=print).close()
    assert json.loads((tmp_path / "runs" / "loggers.json").read_text()) == {"wandb": "made"}
    (tmp_path / "runs" / "events.out.tfevents.1").touch()
    made["how"]["wandb"] = {"last_step": 3}
    opened = open_loggers(config_of("wandb"), tmp_path, say=print, after_step=2)
    for step in (3, 4):
        opened.log(step, {"loss": 1.0})
    opened.close()
    assert made["wandb"].opening.run_id == "made"
    assert made["wandb"].opening.after_step == 2
    assert made["wandb"].calls[0][0] == 4
    assert (tmp_path / "runs" / "events.out.tfevents.1").exists()
    open_loggers(config_of("wandb"), tmp_path, say=print).close()  # begins anew
    assert made["wandb"].opening.run_id is None
    assert not (tmp_path / "runs" / "events.out.tfevents.1").exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"wandb": 3}'])
def test_ids_that_cannot_be_read_are_as_none(
    made: dict[str, Any], tmp_path: Path, text: str
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "loggers.json").write_text(text)
    open_loggers(config_of("wandb"), tmp_path, say=print, after_step=2).close()
    assert made["wandb"].opening.run_id is None


def test_a_missing_package_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "trackio").mkdir()  # as one run leaves it: no package
    with pytest.raises(ConfigError, match="trackio is not installed\nhint: pip install trackio"):
        require_loggers(config_of("trackio"))
    require_loggers(config_of("json"))
    require_loggers(config_of())


def test_tensorboard_takes_back_the_steps_that_come_again(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for after, steps in ((0, range(1, 6)), (3, range(4, 7))):
        opened = open_loggers(
            config_of("tensorboard"),
            tmp_path,
            say=pytest.fail,
            after_step=after,
            about={"seed": 1},
        )
        for step in steps:
            opened.log(step, {"loss": float(step)})
        opened.close()
    read = events.EventAccumulator(str(tmp_path / "runs")).Reload()
    assert [event.step for event in read.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


class FakeWandb(ModuleType):
    """What is used of W&B."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.given: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.ended: list[int] = []

    def Settings(self, *, console: str) -> str:  # noqa: N802 - their name
        return f"console {console}"

    def init(
        self,
        *,
        project: str | None = None,
        name: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        resume: str | None = None,
        config: dict[str, Any] | None = None,
        settings: Any = None,
    ) -> Any:
        self.given = {"project": project, "name": name, "dir": dir, "id": id, "resume": resume}
        self.given |= {"config": config, "settings": settings}
        summary = {"train/global_step": 7} if id else {}
        return SimpleNamespace(
            id=id or "abc",
            summary=summary,
            define_metric=lambda name, *, step_metric=None, step_sync=None: None,
            log=self.rows.append,
            finish=lambda *, exit_code: self.ended.append(exit_code),
        )


def test_wandb_is_told_what_the_config_says_and_left_what_its_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = tmp_path / "out"
    opened = open_loggers(config_of("wandb"), folder, say=pytest.fail, about={"seed": 1})
    opened.log(1, {"loss": 2.0})
    opened.close()
    assert fake.given["project"] == "roundpipe"
    assert (fake.given["name"], fake.given["dir"]) == ("out", str(folder))
    assert (fake.given["id"], fake.given["resume"]) == (None, None)
    assert (fake.given["config"], fake.given["settings"]) == ({"seed": 1}, "console off")
    assert fake.rows == [{"train/loss": 2.0, "train/global_step": 1}]
    said = {"WANDB_PROJECT": "p", "WANDB_NAME": "n", "WANDB_DIR": "d", "WANDB_CONSOLE": "wrap"}
    opened = open_loggers(
        config_of("wandb"), folder, say=pytest.fail, after_step=5, environment=said
    )
    for step in (6, 7, 8):
        opened.log(step, {"loss": 2.0})
    opened.close(ok=False)
    assert [fake.given[key] for key in ("project", "name", "dir", "settings")] == [None] * 4
    assert (fake.given["id"], fake.given["resume"]) == ("abc", "allow")
    assert [row["train/global_step"] for row in fake.rows] == [1, 8]
    assert fake.ended == [0, 1]
    said_too = config_of("wandb", project="mine", run_name="first")
    open_loggers(said_too, folder, say=pytest.fail, environment=said).close()
    assert (fake.given["project"], fake.given["name"]) == ("mine", "first")


class FakeMlflow(ModuleType):
    """What is used of MLflow."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[Any] = []

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, run_id: str | None = None, *, run_name: str | None = None) -> Any:
        self.calls.append(("start", run_id, run_name))
        metrics = {"train/global_step": 3.0} if run_id else {}
        return SimpleNamespace(
            info=SimpleNamespace(run_id=run_id or "r1"), data=SimpleNamespace(metrics=metrics)
        )

    def log_params(self, params: dict[str, Any]) -> None:
        assert len(params) <= 100
        self.calls.append(("params", len(params)))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, metrics["train/loss"]))

    def log_text(self, text: str, artifact_file: str) -> None:
        self.calls.append((artifact_file, text))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(status)


def test_mlflow_goes_on_with_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    about = {f"key {at}": at for at in range(150)}
    opened = open_loggers(config_of("mlflow"), tmp_path, say=pytest.fail, about=about)
    opened.log(1, {"loss": 2.0})
    opened.text("sample", "hello")
    opened.close(ok=False)
    assert fake.calls == [
        ("experiment", "roundpipe"),
        ("start", None, tmp_path.name),
        ("params", 100),
        ("params", 50),
        (1, 2.0),
        ("sample.txt", "hello"),
        "FAILED",
    ]
    fake.calls.clear()
    opened = open_loggers(
        config_of("mlflow"),
        tmp_path,
        say=pytest.fail,
        after_step=2,
        environment={"MLFLOW_EXPERIMENT_NAME": "theirs"},
    )
    for step in (3, 4):
        opened.log(step, {"loss": 2.0})
    opened.close()
    assert fake.calls == [("start", "r1", tmp_path.name), (4, 2.0), "FINISHED"]


class FakeTrackio(ModuleType):
    """What is used of trackio."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.calls: list[Any] = []

    def init(
        self,
        project: str,
        name: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        resume: str = "never",
    ) -> Any:
        self.calls.append((project, name, resume))
        return SimpleNamespace(_next_step=4 if resume == "allow" else 0)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((step, metrics))

    def finish(self) -> None:
        self.calls.append("finish")


def test_trackio_goes_on_by_the_runs_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    config = config_of("trackio", run_name="mine")
    open_loggers(config, tmp_path, say=pytest.fail).close()
    (project, name, resume), end = fake.calls
    assert (project, resume, end) == ("roundpipe", "never", "finish")
    assert name.startswith("mine-")
    opened = open_loggers(config, tmp_path, say=pytest.fail, after_step=2)
    for step in (3, 4):
        opened.log(step, {"loss": 2.0})
    opened.close()
    assert fake.calls[2:] == [
        ("roundpipe", name, "allow"),
        (4, {"train/loss": 2.0}),
        "finish",
    ]
