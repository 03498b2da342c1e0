"""The logging services with their own packages, on this machine alone.

For what is installed: ``pip install wandb mlflow-skinny trackio``. Without a package its signature
is stood for in ``tests/finetune/run/test_loggers.py``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.accept

# In a process of its own: these packages leave threads behind.
_RUN = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from roundpipe.finetune.run.loggers import open_loggers, require_loggers

name, folder = sys.argv[1], Path(sys.argv[2])
config = SimpleNamespace(report_to=(name,), project=None, run_name=None)
require_loggers(config)
said = []
for after in (0, 2):
    loggers = open_loggers(
        config,
        folder / "out",
        say=said.append,
        after_step=after,
        about={"model": "m", "dataset": [{"path": "d"}], "seed": None},
        environment=dict(os.environ),
    )
    for step in range(after + 1, after + 4):
        loggers.log(step, {"step": step, "loss": 1 / step, "grad_norm": None, "epoch": 0.1})
    loggers.log(after + 3, {"step": after + 3, "eval_loss": 2.0})
    loggers.text("sample", "hello ▌trained▐")
    loggers.close()
assert said == [], said
"""


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_service_takes_what_it_is_given_and_goes_on_with_its_run(
    name: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    here = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{tmp_path}/trackio",
    }
    subprocess.run(
        [sys.executable, "-c", _RUN, name, str(tmp_path)], check=True, env={**os.environ, **here}
    )
