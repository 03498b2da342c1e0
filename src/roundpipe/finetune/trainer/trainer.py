"""`RoundPipeTrainer`: a trainer by the names that scripts for transformers and TRL know.

It is the loop of ``roundpipe train`` with other words around it: its steps, checkpoints, retries
and its care for what was trained are those. What it calls callbacks with, and when, is as
transformers' Trainer has it (`callbacks.py`). What it has not raises by name (`refusals.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import STATE_FILE, Earlier, RunState
from roundpipe.finetune.output.run_folder import RunFolder, claim
from roundpipe.finetune.output.sample import answer
from roundpipe.finetune.run.content import Content
from roundpipe.finetune.run.result import save_run
from roundpipe.finetune.run.signals import listening
from roundpipe.finetune.run.steps import (
    Around,
    kept_when_ended_early,
    run_steps,
    started,
    take_best,
)
from roundpipe.finetune.run.training import Optimizing, make_optimizer, weights_to_save
from roundpipe.finetune.trainer.accelerator import OneProcess
from roundpipe.finetune.trainer.arguments import read_arguments
from roundpipe.finetune.trainer.callbacks import CallbackEvents, callbacks_for
from roundpipe.finetune.trainer.evaluating import Evaluating
from roundpipe.finetune.trainer.place import judge_for
from roundpipe.finetune.trainer.refusals import absent, refuse_arguments, refuse_overridden
from roundpipe.finetune.trainer.result import save_to
from roundpipe.finetune.trainer.setting_up import Wishes, set_up
from roundpipe.finetune.trainer.showing import LinesOnly
from roundpipe.models.paths import num_matrix_weights
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer
    from transformers import TrainerCallback, TrainingArguments

    from roundpipe.finetune.run.steps import Run
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.sim.search import Plan
