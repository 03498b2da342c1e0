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
    "random_state": "seed",
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
    "wandb_name": "run_name",
    "wandb_project": "project",
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
    "activation_offloading": "weights and optimizer state live in host memory anyway",
    "bf16_full_eval": "evaluation uses the working weights",
    "bnb_4bit_compute_dtype": "dtype says what is computed in",
    "bnb_4bit_quant_storage": "weights in 4 bits lie in bytes",
    "bnb_4bit_quant_type": "weights in 4 bits are NF4",
    "bnb_4bit_use_double_quant": "the scales of weights in 4 bits are quantised too",
    "bnb_config_kwargs": "weights in 4 bits are NF4, their scales are quantised too",
    "dataloader_drop_last": "a short last batch is trained as it is",
    "dataloader_num_workers": "samples are tokenised before the first step",
    "dataloader_pin_memory": "host memory is pinned at exact size",
    "dataloader_prefetch_factor": "samples are tokenised before the first step",
    "dataset_num_proc": "the tokenizer uses every core",
    "ddp_backend": "one process drives every device",
    "ddp_bucket_cap_mb": "one process drives every device",
    "ddp_find_unused_parameters": "a parameter without gradient is legal",
    "ddp_timeout": "one process drives every device",
    "debug": "ROUNDPIPE_DEBUG=1 shows tracebacks",
    "deepspeed": "weights and optimizer state live in host memory anyway",
    "device_map": "devices= says where to train",
    "disable_tqdm": "the progress bar is plain lines where there is no terminal",
    "do_eval": "eval_dataset or val_size turns evaluation on",
    "do_train": "this command trains",
    "double_quantization": "the scales of weights in 4 bits are quantised too",
    "eager_attention": "attn_implementation says it",
    "eval_accumulation_steps": "evaluation keeps no logits",
    "eval_batch_size": "evaluation takes microbatches of its own",
    "eval_on_start": "the answers before training are shown",
    "fsdp": "weights and optimizer state live in host memory anyway",
    "fsdp_config": "weights and optimizer state live in host memory anyway",
    "fsdp_version": "weights and optimizer state live in host memory anyway",
    "gradient_checkpointing": "recompute is always on",
    "gradient_checkpointing_kwargs": "recompute is always on",
    "hub_strategy": "nothing is uploaded",
    "include_num_input_tokens_seen": "tokens are always counted",
    "is_llama_derived_model": "the model is split by structure",
    "liger_kernel": "logits exist for one microbatch at a time",
    "local_rank": "one process drives every device",
    "logging_dir": "logs stand in output_dir",
    "logging_first_step": "the first step is logged",
    "logging_strategy": "logging_steps says it",
    "low_cpu_mem_usage": "weights are loaded once",
    "model_type": "the model's own config says it",
    "optim_target_modules": "every trained parameter is optimized",
    "overwrite_cache": "nothing is cached",
    "pad_to_max_length": "a batch is padded to its longest sample",
    "pad_to_sequence_len": "a batch is padded to its longest sample",
    "padding_free": "a batch is padded to its longest sample",
    "per_device_eval_batch_size": "evaluation takes microbatches of its own",
    "plot_loss": "training_loss.png is always drawn",
    "prediction_loss_only": "evaluation keeps no logits",
    "quantization_type": "weights in 4 bits are NF4",
    "remove_unused_columns": "columns that are not used are named",
    "save_safetensors": "models are always saved as safetensors",
    "strict": "weights are always loaded strictly",
    "task_type": "a causal language model is trained",
    "tf32": "full precision is used",
    "tokenizer_type": "the tokenizer's own config says it",
    "torch_compile": "layers run as they are",
    "trust_remote_code": "no code of a checkpoint is ever run",
    "upcast_layernorm": "master weights are fp32",
    "use_bnb_nested_quant": "the scales of weights in 4 bits are quantised too",
    "use_cache": "training keeps no key-value cache",
    "use_fast_tokenizer": "the fast tokenizer is used where there is one",
    "use_gradient_checkpointing": "recompute is always on",
    "use_liger_kernel": "logits exist for one microbatch at a time",
    "use_unsloth": "no other trainer is used",
    "xformers_attention": "sdpa attention is used",
}

# Keys of ours that are still to come, with the value that asks for nothing and the way out.
LATER: dict[str, tuple[object, str]] = {
    "evals_per_epoch": (None, "eval_strategy=epoch, or eval_steps=N"),
    "freeze_trainable_layers": (None, "finetuning_type=lora"),
    "saves_per_epoch": (None, "save_strategy=epoch, or save_steps=N"),
}

REFUSED = {
    "dataset_dir": "give the file itself: dataset=FOLDER/FILE.jsonl",
    "dataset_kwargs": "leave it out: the rows of a dataset say what they are",
    "dataset_text_field": "name the column: dataset='{path: FILE.jsonl, columns: {text: COLUMN}}'",
    "hub_model_id": "leave it out, and upload output_dir when it is done",
    "max_samples": "dataset='{path: FILE.jsonl, max_samples: N}'",
    "plugins": "leave it out: no code from outside is loaded",
    "push_to_hub": "leave it out, and upload output_dir when it is done",
    "quantization_config": "finetuning_type=qlora packs the base weights into 4 bits",
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
ENTRY_LATER: tuple[str, ...] = ()

OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adamw_torch_fused": "adamw_torch",
    "paged_adamw_32bit": "adamw_torch",
}
OPTIMIZERS_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
DTYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
}
