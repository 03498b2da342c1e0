"""What ran when in the last steps of a run, kept for ``timeline.json``.

``take`` is called where the run ends, before anything else touches the pipe: what follows a
failure makes it forget the steps that failed. ``write`` puts the file into the folder, whole or not
at all. Neither ever stops a run: a picture of it is worth less than its weights.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from roundpipe.device.host_memory import used_bytes
from roundpipe.durable import write_text
from roundpipe.plan.timeline import Timeline
from roundpipe.report.timeline_record import (
    TIMELINE_FILE,
    TimelineRecord,
    record_text,
    shortened,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.device.api import Device
    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.roundpipe import RoundPipe

logger = logging.getLogger(__name__)

_MOST_SAMPLES = 4096  # of memory: more than the pipe remembers steps


class TimelineRecorder:
    """Records the run of ``pipe`` on ``devices``; ``title`` says what is trained on what."""

    def __init__(self, pipe: RoundPipe, devices: Sequence[Device], *, title: str) -> None:
        self._pipe, self._devices, self._title = pipe, devices, title
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=_MOST_SAMPLES)
        self._record: TimelineRecord | None = None

    def sample(self) -> None:
        """Note how much memory is in use now."""
        used = {
            f"{index}.memory": float(device.allocated_bytes)
            for index, device in enumerate(self._devices)
        }
        host = used_bytes()
        if host is not None:
            used["host.memory"] = float(host)
        self._samples.append((time.perf_counter(), used))

    def take(self) -> None:
        """Read the timeline, as far as it is over."""
        try:
            self._record = self._read()
        except Exception:
            logger.exception("what ran when cannot be told")

    def write(self, folder: RunFolder) -> None:
        """Write what was taken, unless no step was made."""
        if self._record is None or not self._record.timeline.spans:
            return
        try:
            write_text(folder.path / TIMELINE_FILE, record_text(self._record))
        except OSError as error:
            logger.warning("%s was not written: %s", TIMELINE_FILE, error)

    def _read(self) -> TimelineRecord:
        ran = self._pipe.timeline
        steps = tuple(dataclasses.replace(step, step=step.step + 1) for step in ran.steps)
        counters: dict[str, list[tuple[float, float]]] = {}
        for at, used in self._samples:
            for name, value in used.items():
                counters.setdefault(name, []).append((at, value))
        timeline = Timeline(steps, ran.devices, ran.layers)
        return shortened(TimelineRecord(self._title, timeline, counters))
