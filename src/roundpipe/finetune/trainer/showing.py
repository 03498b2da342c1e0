"""What a Trainer's run shows: lines of ours, and the bar that its callbacks draw."""

from __future__ import annotations

import contextlib

from tqdm import tqdm  # type: ignore[import-untyped]

from roundpipe.finetune.output.progress import Progress
from roundpipe.finetune.output.terminal import Terminal


class LinesOnly(Terminal):
    """A terminal whose progress is somebody else's to show: `transformers.ProgressCallback`."""

    def _write_line(self, text: str) -> None:
        """Above the bar, which is told to make room."""
        with contextlib.suppress(OSError, ValueError), tqdm.external_write_mode(self._stream):
            super()._write_line(text)

    def _make_progress(self, total_steps: int) -> Progress:
        return Progress(total_steps, log=self.log, write=self._write_line)
