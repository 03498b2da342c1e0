"""TensorBoard, W&B, MLflow and trackio behind one small interface; none of them ever stops a run.

Each logger lives in a thread of its own, from its opening to its end: what it does over a network
or a disk holds nobody up, and what is bound to a thread (an active run) stays in one. The first
error of any kind ends that logger: it is told once, and the run goes on without. Ending waits for
what is under way, but not for ever.

A resumed run goes on in the same place: the ids that the services gave are kept in
``runs/loggers.json``, and steps that a service has already are not given to it again (they are the
same to the bit).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.finetune.run.log_backends import BACKENDS, NO_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from roundpipe.finetune.settings.config import TrainConfig

logger = logging.getLogger(__name__)

FOLDER = "runs"
_IDS = "loggers.json"
_OPENING_SECONDS = 60.0  # after which the first step does not wait for a logger any longer
_CLOSING_SECONDS = 30.0
_MOST_WAITING = 10_000  # records of a logger that does not keep up


class Backend(Protocol):
    """One open logger; used by one thread. Everything in it may raise."""

    @property
    def run_id(self) -> str | None:
        """What the service calls this run; None where it needs no name to go on."""
        ...

    @property
    def last_step(self) -> int:
        """The last step that the service has of this run; 0 if none, or if it does not say."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values of a step."""
        ...

    def text(self, name: str, text: str) -> None:
        """Record a text of the whole run."""
        ...

    def close(self, *, ok: bool) -> None:
        """End the run; ``ok``: it came to its end."""
        ...


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a logger is told of the run that it is to record.

    ``run_id`` and ``after_step``: of a run that goes on. ``name``, ``project``: None where the
    environment says them. ``about``: settings, as JSON values.
    """

    folder: Path  # the run's
    project: str | None
    name: str | None
    after_step: int = 0
    run_id: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def require_loggers(config: TrainConfig) -> None:
    """Raise ConfigError for a logger whose package is not installed; imports none."""
    for name in config.report_to:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name, which they leave
            raise ConfigError(
                f"report_to: {name} is not installed\nhint: pip install {name}, or report_to=none"
            )


def open_loggers(
    config: TrainConfig,
    folder: Path,
    *,
    say: Callable[[str], None],
    after_step: int = 0,
    about: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Loggers:
    """Open the loggers that ``config.report_to`` names, for the run in ``folder``.

    ``after_step``: the step that a resumed run goes on after; 0 begins anew, and what an earlier
    run left in ``runs/`` goes. ``say`` shows a line, from any thread. Blocks for a minute at most;
    a logger that takes longer catches up. Raises nothing.
    """
    place = folder / FOLDER
    known = _read_ids(place) if after_step else {}
    if not after_step:
        _clear(place)
    given = environment or {}
    opening = Opening(
        folder=folder,
        project=config.project,
        name=config.run_name,
        after_step=after_step,
        about=about or {},
        environment=given,
    )
    return Loggers(config.report_to, opening, known, say)


class Loggers:
    """The loggers of one run. Nothing here raises; see `open_loggers`."""

    def __init__(
        self,
        names: Iterable[str],
        opening: Opening,
        known: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._place = opening.folder / FOLDER
        self._ids: dict[str, str] = dict(known)
        self._lock = threading.Lock()
        self._channels = [
            _Channel(name, partial(_open, name, opening, known.get(name)), say, self._note_id)
            for name in names
        ]
        deadline = time.monotonic() + _OPENING_SECONDS
        for channel in self._channels:
            channel.wait_open(deadline)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Hand a record of ``trainer_log.jsonl`` to every logger; returns at once."""
        values = named_values(record)
        for channel in self._channels:
            channel.put(step, values)

    def text(self, name: str, text: str) -> None:
        """Hand a text to every logger; returns at once."""
        for channel in self._channels:
            channel.put_text(name, text)

    def close(self, *, ok: bool = True) -> None:
        """End all loggers; blocks until they have sent what they have, half a minute at most."""
        deadline = time.monotonic() + _CLOSING_SECONDS
        for channel in self._channels:
            channel.put_end(ok=ok)
        for channel in self._channels:
            channel.wait_end(deadline)

    def _note_id(self, name: str, run_id: str) -> None:
        """Keep what a service calls the run; called from the loggers' threads."""
        with self._lock:
            if self._ids.get(name) == run_id:
                return
            self._ids[name] = run_id
            self._place.mkdir(parents=True, exist_ok=True)
            write_text(self._place / _IDS, json.dumps(self._ids, indent=2) + "\n")


def named_values(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by the names that these services' users know: ``train/loss``, …"""
    values: dict[str, float] = {}
    for key, value in record.items():
        if key in ("step", "total_steps") or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            is_eval = key.startswith("eval_")
            values[f"eval/{key.removeprefix('eval_')}" if is_eval else f"train/{key}"] = value
    return values


class _Channel:
    """One logger, its thread and what waits for it."""

    def __init__(
        self,
        name: str,
        opening: Callable[[], Backend],
        say: Callable[[str], None],
        note_id: Callable[[str, str], None],
    ) -> None:
        self._name, self._open, self._say, self._note_id = name, opening, say, note_id
        self._waiting: queue.SimpleQueue[Callable[[Backend], None] | None] = queue.SimpleQueue()
        self._is_open, self._is_gone = threading.Event(), False
        self._skip_to = 0  # steps that the service has
        self._has_dropped = False
        self._thread = threading.Thread(target=self._serve, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        def log(backend: Backend) -> None:
            if step > self._skip_to:
                backend.log(step, values)

        self._put(log)

    def put_text(self, name: str, text: str) -> None:
        self._put(lambda backend: backend.text(name, text))

    def put_end(self, *, ok: bool) -> None:
        self._waiting.put(lambda backend: backend.close(ok=ok))
        self._waiting.put(None)

    def wait_open(self, deadline: float) -> None:
        if not self._is_open.wait(max(0.0, deadline - time.monotonic())):
            self._tell(f"{self._name} does not answer yet; training begins without waiting for it")

    def wait_end(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"{self._name} has not sent everything in time and is left behind")

    def _put(self, work: Callable[[Backend], None]) -> None:
        if self._is_gone:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            if not self._has_dropped:
                self._has_dropped = True
                self._tell(f"{self._name} does not keep up: records are left out there")
            return
        self._waiting.put(work)

    def _serve(self) -> None:
        try:
            backend = self._open()
            self._skip_to = backend.last_step
            if (run_id := backend.run_id) is not None:
                self._note_id(self._name, run_id)
            self._is_open.set()
            while (work := self._waiting.get()) is not None:
                work(backend)
        except BaseException as error:  # whatever it is: a picture of the run, not the run
            self._is_gone = True
            logger.debug("logger %s", self._name, exc_info=True)
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            self._tell(f"{self._name} failed and is left out from here on: {what}")
        finally:
            self._is_open.set()

    def _tell(self, text: str) -> None:
        try:
            self._say(text)
        except Exception:
            logger.warning("%s", text)


def _open(name: str, opening: Opening, run_id: str | None) -> Backend:
    given = {**vars(opening), "run_id": run_id}
    return BACKENDS.get(name, NO_BACKEND)(Opening(**given))


def _read_ids(place: Path) -> dict[str, str]:
    try:
        found = json.loads((place / _IDS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _clear(place: Path) -> None:
    """Remove what an earlier run has left, and nothing that is not of a logger."""
    for path in [*place.glob("events.out.tfevents.*"), *place.glob(_IDS)]:
        try:
            path.unlink()
        except OSError as error:
            logger.warning("%s was not removed: %s", path, error)
