"""From trained weights to a folder that others can use, and the lines that show how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.finetune.data.files import is_hub_id
from roundpipe.finetune.output.earlier import LOG_FILE, dataset_digest
from roundpipe.finetune.output.model_card import Card, write_card
from roundpipe.finetune.output.result_files import adapter_fields, base_of, save_result
from roundpipe.finetune.output.usage import QUESTION, Result, short_lines
from roundpipe.models.loading.own_class import name_to_load
from roundpipe.report.loss_plot import draw_losses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roundpipe.finetune.output.run_folder import RunFolder
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.prepare import Job

_SETTINGS = (
    "finetuning_type",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "batch_size",
    "num_train_epochs",
    "max_steps",
    "max_length",
    "packing",
    "train_on_prompt",
    "mask_history",
    "weight_decay",
    "max_grad_norm",
    "optim_state_dtype",
    "neftune_noise_alpha",
    "staleness",
    "seed",
)
_SIZES = ("lengths: ", "evaluation: ")  # lines of what is said of the data
_ADAPTER = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "use_dora",
    "use_rslora",
)


def save_run(
    job: Job, weights: Mapping[str, Tensor], folder: RunFolder, state: dict[str, Any]
) -> None:
    """Write the final files of a run, ``state`` (``trainer_state.json``) last: it marks the end."""
    with folder.files_in_place() as staging:
        save_result(staging, job.model, weights, job.tokenizer, base_folder=job.base_folder)
        draw_losses(folder.path / LOG_FILE, staging / "training_loss.png", title=job.source.name)
    write_card(folder.path, _card(job, state["log_history"]))
    folder.finish({**state, **job.content, "dataset_sha256": dataset_digest(job.config)})


def show_usage(job: Job, terminal: Terminal) -> None:
    """Show where the result is and the lines that use it, ready to be pasted."""
    kind = "adapter" if job.is_adapter else "model"
    folder = job.config.output_dir
    terminal.line(f"the {kind} is in {folder} (its README.md has more on each of these):")
    terminal.line()
    for line in short_lines(_result(job)):
        terminal.line(line)
    terminal.line()


def _result(job: Job) -> Result:
    prompts = job.config.sample_prompts
    base = base_of(job.model)
    return Result(
        job.config.output_dir,
        job.source,
        question=prompts[0] if prompts else QUESTION,
        peft=adapter_fields(job.model),
        model_class=name_to_load(base),
        has_template=bool(job.tokenizer.chat_template),
        is_packed=job.base.is_packed,
        dtype=str(base.dtype).removeprefix("torch."),
        is_tied=bool(getattr(base, "all_tied_weights_keys", None)),
    )


def _card(job: Job, history: Sequence[Mapping[str, Any]]) -> Card:
    """What the model card tells of a run."""
    config, source = job.config, job.source
    entries = (*config.dataset, *(config.eval_dataset or ()))
    base = source.hub_id or source.given
    return Card(
        _result(job),
        kind="adapter" if job.is_adapter else "model",
        summary=f"{job.header()}. Base: `{base}`{_commit(job)}.",
        settings=_settings(job),
        data=_data(job),
        losses=_losses(history),
        datasets=[entry.path for entry in entries if is_hub_id(entry)],
        tags=[config.finetuning_type, "sft"],
        notes=_notes(job),
        base_folder=job.base_folder,
    )


def _commit(job: Job) -> str:
    told = (("revision", job.source.revision), ("commit", job.source.commit))
    return "".join(f", {name} {value}" for name, value in told if value)


def _settings(job: Job) -> dict[str, Any]:
    """The settings that make the numbers what they are."""
    config = job.config
    found = {name: getattr(config, name) for name in _SETTINGS}
    if job.is_adapter:
        fields = adapter_fields(job.model) or {}
        found |= {name: _brief(fields[name]) for name in _ADAPTER if fields.get(name)}
    found["dtype"] = str(base_of(job.model).dtype).removeprefix("torch.")
    return {name: value for name, value in found.items() if value is not None}


def _brief(value: Any) -> Any:
    """A value of peft's; of the many full names that it makes of modules their last parts."""
    if not isinstance(value, list | tuple | set):
        return value
    return sorted({str(name).rpartition(".")[2] for name in value})


def _data(job: Job) -> list[str]:
    """Sizes and what was cut or left out; no path and no excerpt of a row."""
    data = job.dataset
    warnings = [line.removeprefix("warning: ") for line in data.account.warnings(data.limit)]
    kept = [str(data.stats), *(line for line in data.describe() if line.startswith(_SIZES))]
    return [line.partition(", the first:")[0] for line in (*kept, *warnings)]


def _losses(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """First and last loss of training, and the last and the best evaluation."""
    trained = [record for record in history if record.get("loss") is not None]
    scored = [record for record in history if record.get("eval_loss") is not None]
    if not trained:
        return []
    first, last = trained[0], trained[-1]
    lines = [
        f"training: {first['loss']:.4g} at step {first['step']}, "
        f"{last['loss']:.4g} at step {last['step']}"
    ]
    if scored:
        last, best = scored[-1], min(scored, key=lambda record: float(record["eval_loss"]))
        lines.append(
            f"evaluation: {last['eval_loss']:.4g} at step {last['step']}, the best "
            f"{best['eval_loss']:.4g} at step {best['step']}"
        )
    return [
        *lines,
        f"of every step: `{LOG_FILE}`, `training_loss.png`; all settings: `config.yaml`",
    ]


def _notes(job: Job) -> list[str]:
    if not job.base.is_packed:
        return []
    return [
        "Trained over weights in 4 bits (NF4). `roundpipe chat` and the Python lines below load "
        "them so; on a base in 16 bits, as in the other tools, answers differ a little."
    ]
