"""From trained weights to a folder that others can use, and the lines that show how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.durable import write_text
from roundpipe.finetune.output.earlier import LOG_FILE, dataset_digest
from roundpipe.finetune.output.result_files import base_of, save_result
from roundpipe.finetune.output.usage import usage_lines
from roundpipe.models.loading.own_class import name_to_load
from roundpipe.report.loss_plot import draw_losses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.prepare import Job

_QUESTION = "What is the capital of France?"


def save_run(
    job: Job, weights: Mapping[str, Tensor], folder: RunFolder, state: dict[str, Any]
) -> None:
    """Write the final files of a run, ``state`` (``trainer_state.json``) last: it marks the end."""
    with folder.files_in_place() as staging:
        save_result(staging, job.model, weights, job.tokenizer, base_folder=_folder(job))
        draw_losses(folder.path / LOG_FILE, staging / "training_loss.png", title=job.source.name)
    _write_card(job, folder)
    folder.finish({**state, **job.content, "dataset_sha256": dataset_digest(job.config)})


def show_usage(job: Job, terminal: Terminal) -> None:
    """Show where the result is and the Python lines that use it, ready to be pasted."""
    kind = "adapter" if job.is_adapter else "model"
    terminal.line(f"the {kind} is in {job.config.output_dir}; to use it in Python:")
    terminal.line()
    for line in _usage(job):
        terminal.line(line)
    terminal.line()


def _usage(job: Job) -> list[str]:
    prompts = job.config.sample_prompts
    return usage_lines(
        job.config.output_dir,
        job.source,
        is_adapter=job.is_adapter,
        has_template=bool(job.tokenizer.chat_template),
        question=prompts[0] if prompts else _QUESTION,
        model_class=name_to_load(base_of(job.model)),
    )


def _folder(job: Job) -> Path | None:
    """Where the files of the base model lie, if that is known."""
    folder = Path(job.base.folder or job.source.location)
    return folder if folder.is_dir() else None


def _write_card(job: Job, folder: RunFolder) -> None:
    """Write the model card, unless the folder has a README.md that is not one of ours."""
    card = folder.path / "README.md"
    mark = "<!-- written by roundpipe train -->"
    if card.exists() and mark not in card.read_text(encoding="utf-8", errors="replace"):
        return
    kind = "adapter" if job.is_adapter else "model"
    header = ["---", "pipeline_tag: text-generation"]
    header += ["library_name: " + ("peft" if job.is_adapter else "transformers")]
    if job.source.hub_id is not None:
        header.append(f"base_model: {job.source.hub_id}")
    text = [
        *header,
        "---",
        mark,
        "",
        f"# {job.source.name}, fine-tuned",
        "",
        f"{job.header()}",
        "",
        f"All settings are in `config.yaml`, the losses in `{LOG_FILE}`. To use this {kind}:",
        "",
        "```python",
        *_usage(job),
        "```",
        "",
    ]
    write_text(card, "\n".join(text))
