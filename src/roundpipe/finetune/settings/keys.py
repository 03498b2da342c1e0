"""The keys of other trainers' configs, as data: what each becomes here.

A key that is not a field of TrainConfig is in exactly one table below. ``ALIASES`` are renames;
``DERIVED`` keys need a look at their value (`derive.py` has the rule for each); ``NEEDLESS`` keys
ask for what is already so and ``REFUSED`` ones for what is not done here, a sentence each, from
the lists of `foreign`. A null, false or empty value of a foreign key asks for nothing and is
dropped without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.finetune.settings.foreign import (
    axolotl,
    llamafactory,
    transformers,
    trl,
    unsloth,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TRAINERS = (transformers, trl, llamafactory, axolotl, unsloth)


def _by_key(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {
        key: sentence
        for table in tables
        for sentence, names in table.items()
        for key in names.split()
    }


ALIASES = {
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "method": "finetuning_type",
    "tuner_type": "finetuning_type",
    "training_type": "finetuning_type",
    "datasets": "dataset",
    "train_file": "dataset",
    "train_dataset": "dataset",
    "local_dataset": "dataset",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "length": "max_length",
    "excess_length_strategy": "truncation",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr": "learning_rate",
    "adam_eps": "adam_epsilon",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "torch_dtype": "dtype",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "r": "lora_r",
    "random_seed": "seed",
    "lora_rank": "lora_r",
    "lora_target": "target_modules",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "additional_target": "modules_to_save",
    "peft_use_dora": "use_dora",
    "use_peft_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "train_on_inputs": "train_on_prompt",
    "chat_template_path": "chat_template",
    "test_datasets": "eval_dataset",
    "test_file": "eval_dataset",
    "validation_file": "eval_dataset",
    "val_set_size": "val_size",
    "test_split_size": "val_size",
    "evaluation_strategy": "eval_strategy",
    "early_stopping_steps": "early_stopping_patience",
    "preprocessing_num_workers": "dataset_num_proc",
    "dataset_processes": "dataset_num_proc",
    "lora_model_dir": "adapter_name_or_path",
    "lora_target_parameters": "target_parameters",
    "wandb_name": "run_name",
    "trackio_run_name": "run_name",
    "mlflow_run_name": "run_name",
}

# Foreign key -> the fields its rule may set, in the order in which the rules are asked. Where the
# command line sets one of these fields, the file's foreign key no longer counts.
DERIVED: dict[str, tuple[str, ...]] = {
    "stage": (),
    "rl": (),
    "template": (),
    "full_finetuning": ("finetuning_type",),
    "adapter": ("finetuning_type",),
    "use_peft": ("finetuning_type",),
    "load_in_4bit": ("finetuning_type",),
    "load_in_8bit": ("finetuning_type",),
    "quantization_bit": ("finetuning_type",),
    "freeze_trainable_layers": ("unfrozen_parameters",),
    "freeze_trainable_modules": ("unfrozen_parameters",),
    "freeze_extra_modules": ("unfrozen_parameters",),
    "model_revision": ("model_name_or_path",),
    "revision_of_model": ("model_name_or_path",),
    "revision": ("model_name_or_path",),
    "tokenizer_config": (),
    "per_device_train_batch_size": ("batch_size",),
    "gradient_accumulation_steps": ("batch_size",),
    "bf16": ("dtype",),
    "fp16": ("dtype",),
    "pure_bf16": ("dtype",),
    "bfloat16": ("dtype",),
    "float16": ("dtype",),
    "float32": ("dtype",),
    "use_cpu": ("devices",),
    "no_cuda": ("devices",),
    "flash_attention": ("attn_implementation",),
    "flash_attn": ("attn_implementation",),
    "use_flash_attention_2": ("attn_implementation",),
    "flex_attention": ("attn_implementation",),
    "sage_attention": ("attn_implementation",),
    "sdp_attention": ("attn_implementation",),
    "xformers_attention": ("attn_implementation",),
    "eager_attention": ("attn_implementation",),
    "lora_target_linear": ("target_modules",),
    "pissa_init": ("peft",),
    "pissa_iter": ("peft",),
    "bias": ("peft",),
    "init_lora_weights": ("peft",),
    "loftq_config": ("peft",),
    "layers_to_transform": ("peft",),
    "layers_pattern": ("peft",),
    "lora_fan_in_fan_out": ("peft",),
    "lora_rank_pattern": ("peft",),
    "lora_alpha_pattern": ("peft",),
    "peft_init_lora_weights": ("peft",),
    "peft_layer_replication": ("peft",),
    "peft_layers_pattern": ("peft",),
    "peft_layers_to_transform": ("peft",),
    "peft_trainable_token_indices": ("peft",),
    "assistant_only_loss": ("train_on_prompt",),
    "completion_only_loss": ("train_on_prompt",),
    "train_on_completions": ("train_on_prompt",),
    "sample_packing": ("packing",),
    "neat_packing": ("packing",),
    "group_by_length": ("train_sampling_strategy",),
    "disable_shuffling": ("train_sampling_strategy",),
    "curriculum_sampling": ("train_sampling_strategy",),
    "warmup_ratio": ("warmup_steps",),
    "evals_per_epoch": ("eval_strategy", "eval_steps"),
    "saves_per_epoch": ("save_strategy", "save_steps"),
    "auto_resume_from_checkpoints": ("resume_from_checkpoint",),
    "random_state": ("seed",),
    "wandb_mode": ("report_to",),
    "use_wandb": ("report_to",),
    "enable_wandb": ("report_to",),
    "wandb_project": ("report_to",),
    "use_mlflow": ("report_to",),
    "mlflow_experiment_name": ("report_to",),
    "use_trackio": ("report_to",),
    "trackio_project_name": ("report_to",),
    "use_tensorboard": ("report_to",),
    "enable_tensorboard": ("report_to",),
    "eos_token": ("special_tokens",),
    "tokens": ("special_tokens",),
    "plugins": (),
    "chat_template_jinja": ("chat_template",),
    "dataset_dir": (),
    "pretraining_dataset": ("dataset",),
    "dataset_name": ("dataset",),
    "dataset_config": ("dataset",),
    "dataset_train_split": ("dataset",),
    "dataset_test_split": ("eval_dataset",),
    "dataset_text_field": (),
    "dataset_kwargs": (),
    "format_type": (),
    "max_samples": (),
}

NEEDLESS = _by_key(trainer.NEEDLESS for trainer in _TRAINERS)
REFUSED = _by_key(trainer.REFUSED for trainer in _TRAINERS)
NEUTRAL = {key: values for trainer in _TRAINERS for key, values in trainer.NEUTRAL.items()}

# Keys that hold keys: what is in them counts as if it stood at the top, some under another name.
UNFOLDED: dict[str, dict[str, str]] = {
    "data": {},
    "dataset_mixture": {},
    "bnb_config": {},
    "lora_config": {},
    "peft_config": {},
    "sft_config": {},
    "training_args": {},
    "training_arguments": {},
    "training": {"batch_size": "per_device_train_batch_size"},  # of one device
    "lora": {},
    "logging": {},
    "model_init_kwargs": {},
    "quantization_config": {},
}

# Settings of an adapter that peft has and we have no key for.
TO_PEFT = {
    "bias": "bias",
    "init_lora_weights": "init_lora_weights",
    "loftq_config": "loftq_config",
    "layers_to_transform": "layers_to_transform",
    "layers_pattern": "layers_pattern",
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "lora_rank_pattern": "rank_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_init_lora_weights": "init_lora_weights",
    "peft_layer_replication": "layer_replication",
    "peft_layers_pattern": "layers_pattern",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_trainable_token_indices": "trainable_token_indices",
}
