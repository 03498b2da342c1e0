"""Where ``save_model`` writes: a folder that stock transformers or peft opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.finetune.output.earlier import Earlier, RunState
from roundpipe.finetune.output.result_files import save_result
from roundpipe.finetune.output.run_folder import RunFolder, claim
from roundpipe.finetune.run.result import save_run
from roundpipe.finetune.run.training import weights_to_save

if TYPE_CHECKING:
    from pathlib import Path

    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.roundpipe import RoundPipe


def save_to(folder: Path, job: Job, pipe: RoundPipe) -> None:
    """Write the newest weights, tokenizer and settings into ``folder``, in place of those there.

    Each file appears whole or not at all. Raises OSError where the disk fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder, Earlier(RunState.NEW), str(folder)).files_in_place() as staging:
        save_result(
            staging,
            job.model,
            weights_to_save(job, pipe),
            job.tokenizer,
            base_folder=job.base_folder,
        )


def save_as_run(job: Job, pipe: RoundPipe, state: dict[str, Any]) -> None:
    """Write the result of a run into its own folder, with its model card and its state.

    ``state``: of ``trainer_state.json``. Raises ConfigError where another process holds it.
    """

    def as_it_is(config: TrainConfig, path: Path, counting: Any) -> Earlier:
        del config, path, counting
        return Earlier(RunState.UNFINISHED)

    with claim(job.config, judged=as_it_is) as folder:
        save_run(job, weights_to_save(job, pipe), folder, state)
