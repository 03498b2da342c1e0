"""What a Trainer's run shows: lines of ours, and the bar that its callbacks draw."""

from __future__ import annotations

from roundpipe.finetune.output.progress import Progress
from roundpipe.finetune.output.terminal import Terminal


class LinesOnly(Terminal):
    """A terminal whose progress is somebody else's to show: `transformers.ProgressCallback`."""

    def _make_progress(self, total_steps: int) -> Progress:
        return Progress(total_steps, log=self.log, write=self._write_line)
