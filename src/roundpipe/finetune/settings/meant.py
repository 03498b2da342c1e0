"""What a config of another trainer means by saying nothing: there, no adapter is full fine-tuning.

Here LoRA is what is done unless something else is said. A file that can only be axolotl's or TRL's,
and names neither a method nor anything of an adapter, asked for the whole model; it gets that, and
a line says so. Numbers that such a file leaves out are ours, and a line names those that each
trainer has its own of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.account import short_text
from roundpipe.finetune.settings.derive import ANSWERS_ONLY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.settings.account import Account
    from roundpipe.finetune.settings.fields import TrainConfig

_AXOLOTL = {
    "datasets",
    "flash_attention",
    "gradient_accumulation_steps",
    "lr_scheduler",
    "micro_batch_size",
    "num_epochs",
    "optimizer",
    "pad_to_sequence_len",
    "sample_packing",
    "sequence_len",
    "val_set_size",
}
_TRL = {
    "activation_offloading",
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_mixer",
    "dataset_name",
    "eos_token",
    "packing_strategy",
    "padding_free",
    "test_split_size",
}
_OF_OTHERS = {"cutoff_len", "template", "stage", "dataset", "model_name"}
_ADAPTER = (
    "adapter_name_or_path",
    "lora_alpha",
    "lora_dropout",
    "lora_r",
    "modules_to_save",
    "peft",
    "target_modules",
    "target_parameters",
    "use_dora",
    "use_rslora",
)
# Fields of which other trainers have other defaults; those of an adapter last.
_DIFFERS = (
    "batch_size",
    "max_length",
    "num_train_epochs",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
)
_DIFFERS_IN_ADAPTERS = ("lora_r", "lora_alpha", "target_modules")
# Keys that tell another trainer's file; short names are habits.
_FOREIGN = frozenset((*keys.DERIVED, *keys.NEEDLESS, *keys.REFUSED, *keys.UNFOLDED))
_FOREIGN |= {"base_model", "cutoff_len", "max_seq_length", "sequence_len"}


def say_defaults(file: Mapping[str, Any], config: TrainConfig, account: Account) -> None:
    """Say which numbers are ours, if ``file`` is another trainer's and does not give them."""
    if _FOREIGN.isdisjoint(file):
        return
    names: tuple[str, ...] = _DIFFERS
    if config.finetuning_type in ("lora", "qlora") and config.adapter_name_or_path is None:
        names += _DIFFERS_IN_ADAPTERS
        names += ("lora_dropout",) if is_trl(file) else ()
    left = [name for name in names if name not in config.model_fields_set]
    if config.max_steps is not None and "num_train_epochs" in left:
        left.remove("num_train_epochs")
    if is_trl(file) and not {"train_on_prompt", "train_on_inputs", *ANSWERS_ONLY} & file.keys():
        account.say("of conversations answers alone are trained (train_on_prompt: true trains all)")
    if left:
        shown = ", ".join(f"{name}: {short_text(getattr(config, name))}" for name in left)
        account.say(f"not in the file, so as it is here: {shown}")


def is_trl(file: Mapping[str, Any]) -> bool:
    """Whether a config can only be TRL's, which never calls its data ``dataset``."""
    said = {key for key, value in file.items() if value is not None}
    return bool(_TRL & said and "model_name_or_path" in said and not _OF_OTHERS & said)


def mean_method(file: Mapping[str, Any], values: dict[str, Any], account: Account) -> None:
    """Set ``finetuning_type`` where the file says it by what it leaves out."""
    if values.get("finetuning_type") == "freeze" and not values.get("unfrozen_parameters"):
        values["unfrozen_parameters"] = ["layers:-2"]
        account.say("unfrozen_parameters: layers:-2 (the last two layers; nothing else is said)")
        return
    if values.get("finetuning_type") is not None:
        return
    if values.get("unfrozen_parameters"):
        values["finetuning_type"] = "freeze"
        account.say("finetuning_type: freeze (unfrozen_parameters says what is trained)")
        return
    if any(values.get(key) not in (None, False) for key in _ADAPTER):
        return
    if "base_model" in file and len(_AXOLOTL.intersection(file)) > 1:
        missing = "adapter"
    elif is_trl(file):
        missing = "use_peft"
    else:
        return
    values["finetuning_type"] = "full"
    account.say(f"finetuning_type: full (where this config comes from, no {missing} means that)")
