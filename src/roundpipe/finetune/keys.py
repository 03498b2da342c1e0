"""The keys of other trainers' configs, as data: what each becomes here.

A key that is not a field of TrainConfig is in exactly one table below. ``ALIASES`` are renames;
``DERIVED`` keys need a look at their value (`translate.py` has the rule for each); ``NEEDLESS``
keys ask for what is already so; ``LATER`` keys are not there yet and ``REFUSED`` ones will not be.
A null, false or empty value of a foreign key asks for nothing and is dropped without a word.
"""

from __future__ import annotations

ALIASES = {
    "model": "model_name_or_path",
    "base_model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "method": "finetuning_type",
    "tuner_type": "finetuning_type",
    "datasets": "dataset",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "length": "max_length",
    "num_epochs": "num_train_epochs",
    "epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr": "learning_rate",
    "adam_eps": "adam_epsilon",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "cosine_min_lr_ratio": "min_lr_ratio",
    "torch_dtype": "dtype",
    "r": "lora_r",
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
    "val_set_size": "val_size",
    "evaluation_strategy": "eval_strategy",
    "sample_packing": "packing",
    "neat_packing": "packing",
    "preprocessing_num_workers": "dataset_num_proc",
    "dataset_processes": "dataset_num_proc",
    "lora_model_dir": "adapter_name_or_path",
    "lora_target_parameters": "target_parameters",
}

# Foreign key -> the fields its rule may set. Where the command line sets one of these fields, the
# file's foreign key no longer counts.
DERIVED: dict[str, tuple[str, ...]] = {
    "adapter": ("finetuning_type",),
    "use_peft": ("finetuning_type",),
    "load_in_4bit": ("finetuning_type",),
    "load_in_8bit": ("finetuning_type",),
    "quantization_bit": ("finetuning_type",),
    "model_revision": ("model_name_or_path",),
    "per_device_train_batch_size": ("batch_size",),
    "gradient_accumulation_steps": ("batch_size",),
    "bf16": ("dtype",),
    "fp16": ("dtype",),
    "flash_attention": ("attn_implementation",),
    "flash_attn": ("attn_implementation",),
    "sdp_attention": ("attn_implementation",),
    "lora_target_linear": ("target_modules",),
    "assistant_only_loss": ("train_on_prompt",),
    "completion_only_loss": ("train_on_prompt",),
    "lr_scheduler_kwargs": ("min_lr_ratio",),
    "stage": (),
    "rl": (),
    "template": (),
}

NEEDLESS = {
    "accelerator_config": "one process drives every device",
    "bf16_full_eval": "evaluation uses the working weights",
    "dataloader_drop_last": "a short last batch is trained as it is",
    "dataloader_num_workers": "samples are tokenised before the first step",
    "dataloader_pin_memory": "host memory is pinned at exact size",
    "dataloader_prefetch_factor": "samples are tokenised before the first step",
    "dataset_prepared_path": "tokenising is quick and is not cached",
    "ddp_backend": "one process drives every device",
    "ddp_find_unused_parameters": "a parameter without gradient is legal",
    "ddp_timeout": "one process drives every device",
    "debug": "ROUNDPIPE_DEBUG=1 shows tracebacks",
    "deepspeed": "weights and optimizer state live in host memory anyway",
    "device_map": "devices= says where to train",
    "do_eval": "eval_dataset or val_size turns evaluation on",
    "do_train": "this command trains",
    "eager_attention": "attn_implementation says it",
    "fsdp": "weights and optimizer state live in host memory anyway",
    "fsdp_config": "weights and optimizer state live in host memory anyway",
    "fsdp_version": "weights and optimizer state live in host memory anyway",
    "gradient_checkpointing": "recompute is always on",
    "gradient_checkpointing_kwargs": "recompute is always on",
    "is_llama_derived_model": "the model is split by structure",
    "liger_kernel": "logits exist for one microbatch at a time",
    "local_rank": "one process drives every device",
    "logging_first_step": "the first step is logged",
    "low_cpu_mem_usage": "weights are loaded once",
    "model_type": "the model's own config says it",
    "optim_target_modules": "every trained parameter is optimized",
    "overwrite_cache": "nothing is cached",
    "pad_to_max_length": "a batch is padded to its longest sample",
    "pad_to_sequence_len": "a batch is padded to its longest sample",
    "plot_loss": "training_loss.png is always drawn",
    "remove_unused_columns": "columns that are not used are named",
    "strict": "weights are always loaded strictly",
    "tf32": "full precision is used",
    "tokenizer_type": "the tokenizer's own config says it",
    "torch_compile": "layers run as they are",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "upcast_layernorm": "master weights are fp32",
    "use_cache": "training keeps no key-value cache",
    "use_fast_tokenizer": "the fast tokenizer is used where there is one",
    "use_gradient_checkpointing": "recompute is always on",
    "use_liger_kernel": "logits exist for one microbatch at a time",
    "use_unsloth": "no other trainer is used",
    "xformers_attention": "sdpa attention is used",
}

# Keys of ours that are still to come, with the value that asks for nothing and the way out.
LATER: dict[str, tuple[object, str]] = {
    "adapter_name_or_path": (None, "leave it out: a new adapter is trained"),
    "dataset_num_proc": (1, "leave it out: the tokenizer uses every core"),
    "early_stopping_patience": (None, "leave it out, or set max_steps"),
    "evals_per_epoch": (None, "eval_strategy=epoch, or eval_steps=N"),
    "fp16_accumulation": (False, "leave it out"),
    "freeze_trainable_layers": (None, "finetuning_type=lora"),
    "group_by_length": (False, "leave it out: the order is random"),
    "host_memory_limit": (None, "leave it out"),
    "load_best_model_at_end": (False, "leave it out: the last weights are saved"),
    "metric_for_best_model": (None, "leave it out: the last weights are saved"),
    "neftune_noise_alpha": (None, "leave it out"),
    "optim_state_dtype": ("fp32", "leave it out: moments are fp32"),
    "packing": (False, "leave it out: batches are padded to their longest sample"),
    "pinned_memory_limit": (None, "leave it out"),
    "project": (None, "leave it out: trainer_log.jsonl has every value"),
    "resume_from_checkpoint": ("auto", "leave it out"),
    "run_name": (None, "leave it out: output_dir names the run"),
    "save_minutes": (None, "leave it out: the model is saved at the end"),
    "save_only_model": (True, "leave it out: only the model is saved"),
    "save_steps": (None, "leave it out: the model is saved at the end"),
    "save_strategy": ("no", "leave it out: the model is saved at the end"),
    "save_total_limit": (None, "leave it out: the model is saved at the end"),
    "saves_per_epoch": (None, "leave it out: the model is saved at the end"),
    "schedule": ("auto", "leave it out: round-robin is used"),
    "target_parameters": (None, "target_modules=all-linear"),
    "train_sampling_strategy": ("random", "leave it out: the order is random"),
    "unfrozen_parameters": (None, "finetuning_type=lora"),
    "wandb_entity": (None, "leave it out: trainer_log.jsonl has every value"),
    "wandb_log_model": (None, "leave it out"),
    "wandb_name": (None, "leave it out: output_dir names the run"),
    "wandb_project": (None, "leave it out: trainer_log.jsonl has every value"),
    "wandb_run_id": (None, "leave it out"),
    "wandb_watch": (None, "leave it out"),
}

REFUSED = {
    "dataset_dir": "give the file itself: dataset=FOLDER/FILE.jsonl",
    "dataset_text_field": "name the column: dataset='{path: FILE.jsonl, columns: {text: COLUMN}}'",
    "plugins": "leave it out: no code from outside is loaded",
    "push_to_hub": "leave it out, and upload output_dir when it is done",
    "quantization_config": "finetuning_type=lora: quantized base weights are still to come",
    "special_tokens": "use a tokenizer that has them; no token is added to a vocabulary",
    "streaming": "leave it out: samples are tokenised before the first step",
    "tokens": "use a tokenizer that has them; no token is added to a vocabulary",
}

# Keys of one entry of `dataset` in other trainers' configs.
ENTRY_COLUMNS = {
    "field": "text",
    "field_input": "input",
    "field_instruction": "instruction",
    "field_messages": "messages",
    "field_output": "output",
    "field_system": "system",
}
ENTRY_TYPES: dict[str, str | None] = {
    "alpaca": "instruction/output",
    "chat_template": None,  # the shape is recognised from the columns
    "completion": "text",  # in that trainer the word means raw text
    "openai": "messages",
    "prompt_completion": "prompt/completion",
    "query_response": "query/response",
    "question_answer": "question/answer",
    "sharegpt": "conversations",
}
ENTRY_ALIASES = {"file_name": "path", "formatting": "type", "num_samples": "max_samples"}
ENTRY_NEEDLESS = ("chat_template", "conversation", "ds_type", "roles", "shards")
ENTRY_LATER = ("data_files", "name", "revision", "split", "weight")

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_torch_fused": "adamw_torch",
    "paged_adamw_32bit": "adamw_torch",
}
OPTIMIZERS_LATER = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
DTYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
}
