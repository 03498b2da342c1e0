"""The folder of a Trainer's run: what an earlier run left there, and what ``save_model`` writes.

transformers' Trainer writes into its ``output_dir`` whatever is there. Here a run begins with no
checkpoints of another one beside its own, from which it could go on by mistake. So:

1. Asked to go on, it goes on from the newest whole checkpoint, or from the one that is named.
2. Else checkpoints and logs of an earlier run of ours are replaced, which is said. A model that was
   saved there stays until another is saved.
3. Checkpoints that another program has written are never touched: the folder is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.checkpoint.find import checkpoints_in
from roundpipe.checkpoint.manifest import MANIFEST
from roundpipe.errors import ConfigError
from roundpipe.finetune.output.earlier import (
    CONFIG_FILE,
    Earlier,
    RunState,
    named,
    newest,
)
from roundpipe.finetune.output.result_files import save_result
from roundpipe.finetune.output.run_folder import RunFolder, claim
from roundpipe.finetune.run.content import Content
from roundpipe.finetune.run.result import save_run
from roundpipe.finetune.run.training import weights_to_save
from roundpipe.finetune.settings.parse import RESOLVED

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.finetune.output.earlier import Counting
    from roundpipe.finetune.run.prepare import Job
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.roundpipe import RoundPipe


def judge_for(resume: str | None) -> Callable[[TrainConfig, Path, Counting], Earlier]:
    """What to do with a folder: ``resume`` is None, "auto" or a checkpoint's folder.

    The result raises ConfigError for a folder that is not to be written to, and where nothing is
    to go on from.
    """

    def judge(config: TrainConfig, path: Path, counting: Counting) -> Earlier:
        _refuse_foreign(config, path)
        if resume is None:
            return _anew(config, path)
        if resume != "auto":
            return named(config, resume, {}, counting)
        found = newest(config, path, counting)
        if found.checkpoint is None:
            broken = "".join(f"  {line}\n" for line in found.lines[1:])
            raise ConfigError(
                f"resume_from_checkpoint: no checkpoint to go on from in: {config.output_dir}\n"
                f"{broken}hint: train() without resume_from_checkpoint begins anew"
            )
        return replace(found, is_other=True)

    return judge


def place_to_resume(given: str | Path | bool | None, config: TrainConfig) -> str | None:
    """What `judge_for` is to be told: what ``train`` was given, else what its args say.

    A config's "auto" goes on where there is something to go on from, as the command does.
    """
    if given is None and config.resume_from_checkpoint != "none":
        folder = Path(config.output_dir).expanduser()
        is_auto = config.resume_from_checkpoint == "auto"
        return None if is_auto and not checkpoints_in(folder) else config.resume_from_checkpoint
    if given is None or given is False:
        return None
    return "auto" if given is True else str(given)


def compare_content(job: Job, earlier: Earlier, say: Callable[[str], None]) -> None:
    """Say where model or data are others than those of the run that is gone on with."""
    content = Content.of(earlier, say)
    for what, digest in job.content.items():
        if what in ("base", "data") and digest is not None:
            content.note(what, digest)


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


def _anew(config: TrainConfig, path: Path) -> Earlier:
    found = checkpoints_in(path)
    lines = (
        (
            f"an earlier run in {config.output_dir} is replaced, from {found[0].name} to "
            f"{found[-1].name}: train(resume_from_checkpoint=True) would have gone on"
            if len(found) > 1
            else f"an earlier run in {config.output_dir} is replaced, with {found[0].name}: "
            "train(resume_from_checkpoint=True) would have gone on",
        )
        if found
        else ()
    )
    return Earlier(RunState.UNFINISHED, lines=lines)


def _refuse_foreign(config: TrainConfig, path: Path) -> None:
    own = path / CONFIG_FILE
    if own.exists() and not own.read_text(encoding="utf-8", errors="replace").startswith(RESOLVED):
        raise ConfigError(
            f"output_dir: a config.yaml that is not a run's is in: {config.output_dir}\n"
            "hint: output_dir=ANOTHER, or give that file another name"
        )
    foreign = [each.name for each in checkpoints_in(path) if not (each / MANIFEST).is_file()]
    if foreign:
        raise ConfigError(
            f"output_dir: checkpoints of another program are in: {config.output_dir}: "
            f"{', '.join(foreign[:3])}\nhint: output_dir=ANOTHER; none of them is read or removed"
        )
