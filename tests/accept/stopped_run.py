"""``roundpipe`` in a process that sends itself a signal in the middle of something.

python stopped_run.py PHASE SIGNAL train …   PHASE: see `PHASES` and `IMPORTS`;
SIGNAL: a name, or several joined by commas.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from typing import Any

PHASES = {  # where it is called: module, then what of it
    "tokenizer": ("roundpipe.finetune.run.prepare", "load_tokenizer"),
    "data": ("roundpipe.finetune.run.prepare", "load_dataset"),
    "load": ("roundpipe.finetune.run.prepare", "load_base"),
    "wrap": ("roundpipe.finetune.run.steps", "_wrapped"),
    "step": ("roundpipe.finetune.run.training", "Training.make_step"),
    "evaluation": ("roundpipe.finetune.run.training", "Training._evaluation"),
    "save": ("roundpipe.checkpoint.write", "write_layers"),
    "result": ("roundpipe.finetune.run.steps", "save_run"),
}
IMPORTS = {"import": "torch.nn", "lost": "numpy.linalg"}  # torch's C code clears what that raises
SIGNALS = sys.argv[2].split(",") if len(sys.argv) > 2 else []
_CALLS = {"step": 3}  # the how manieth call gets the signal; else the first


def send() -> None:
    for name in SIGNALS:
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        time.sleep(0.3)  # of two, more than what a launcher passes on


class AtImport(MetaPathFinder):
    """Send the signal when a module is being imported."""

    def __init__(self, module: str) -> None:
        self.module, self.is_sent = module, False

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.module and not self.is_sent:
            self.is_sent = True
            send()


def patch(module: str, what: str, calls: int) -> None:
    """Send the signal in the so manieth call of a function."""
    owner: Any = importlib.import_module(module)
    *outer, last = what.split(".")
    for each in outer:
        owner = getattr(owner, each)
    original, left = getattr(owner, last), [calls]

    def calling(*arguments: Any, **words: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            send()
        return original(*arguments, **words)

    setattr(owner, last, calling)


if __name__ == "__main__":
    phase = sys.argv[1]
    if phase in IMPORTS:
        sys.meta_path.insert(0, AtImport(IMPORTS[phase]))
    else:
        patch(*PHASES[phase], _CALLS.get(phase, 1))
    from roundpipe.cli import main

    sys.argv[:] = ["roundpipe", *sys.argv[3:]]
    sys.exit(main())
