"""transformers' TrainingArguments, of this version and of earlier ones, and what all share."""

from __future__ import annotations

NEEDLESS = {
    "one process drives every device": """
        accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph
        ddp_timeout local_rank log_level_replica log_on_each_node parallelism_config ray_scope
        save_on_each_node tpu_num_cores""",
    "one process drives every device, started without a launcher": """
        accelerate_config machine_rank main_process_ip main_process_port main_training_function
        nnodes node_rank nproc_per_node num_machines num_processes rdzv_backend""",
    "a parameter without gradient is legal": "ddp_find_unused_parameters",
    "weights and optimizer state live in host memory anyway": """
        activation_offloading deepspeed device_map fsdp fsdp_config fsdp_min_num_params
        fsdp_transformer_layer_cls_to_wrap fsdp_version low_cpu_mem_usage max_memory offload_folder
        offload_state_dict""",
    "recompute is always on": """
        activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs""",
    "dtype says what is computed in": """
        bf16_full_eval bnb_4bit_compute_dtype fp16_backend fp16_full_eval fp16_opt_level
        half_precision_backend mixed_precision""",
    "full precision is used": "tf32",
    "weights in 4 bits are NF4 in bytes, their scales quantised too": """
        bnb_4bit_quant_storage bnb_4bit_use_double_quant double_quantization
        use_bnb_nested_quant""",
    "a short last batch is trained as it is": "dataloader_drop_last",
    "samples are tokenised before the first step": """
        dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_prefetch_factor dispatch_batches split_batches""",
    "host memory is pinned at exact size": "dataloader_pin_memory",
    "lengths are known from the tokens": "length_column_name",
    "columns that are not used are named": "label_names remove_unused_columns",
    "microbatches are planned to fit": "auto_find_batch_size",
    "a mean is over the tokens of the whole step": "average_tokens_across_devices",
    "the same command gives the same bits": "full_determinism",
    "a resumed run goes on at its place in the data": "ignore_data_skip",
    "a resumed run goes on with all its state": "restore_callback_states_from_checkpoint",
    "memory is given back where it is short": "torch_empty_cache_steps",
    "layers run as they are": """
        jit_mode_eval torch_compile torch_compile_backend torch_compile_mode torchdynamo
        use_ipex""",
    "logits exist for one microbatch at a time": "liger_kernel_config use_liger_kernel",
    "every trained parameter is optimized": "optim_target_modules",
    "this command trains": "do_train",
    "eval_dataset or val_size turns evaluation on": "do_eval",
    "evaluation gives the loss and keeps no logits": """
        batch_eval_metrics eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
        include_for_metrics include_inputs_for_metrics prediction_loss_only""",
    "evaluation takes microbatches of its own": "eval_batch_size per_device_eval_batch_size",
    "the answers before training are shown": "eval_on_start",
    "nothing is generated while training": """
        generation_config generation_max_length generation_num_beams predict_with_generate
        sortish_sampler""",
    "logs stand in output_dir": "logging_dir",
    "logging_steps says it": "logging_strategy",
    "the first step is logged": "logging_first_step",
    "a step without a finite loss is counted and shown": "logging_nan_inf_filter",
    "tokens are always counted": "include_num_input_tokens_seen include_tokens_per_second",
    "memory stands in the log": "skip_memory_metrics",
    "the log says what happens": "log_level",
    "the progress bar is plain lines where there is no terminal": "disable_tqdm",
    "ROUNDPIPE_DEBUG=1 shows tracebacks": "debug",
    "TRACKIO_SPACE_ID sends them to a page": """
        trackio_bucket_id trackio_space_id trackio_static_space_id""",
    "models are always saved as safetensors": "save_safetensors",
    "SIGTERM saves a checkpoint": "enable_jit_checkpoint",
    "nothing is uploaded": """
        hub_always_push hub_private_repo hub_revision hub_strategy hub_token push_to_hub_token""",
    "no code of a checkpoint is ever run": "trust_remote_code",
    "training keeps no key-value cache": "use_cache",
    "the fast tokenizer is used where there is one": "use_fast_tokenizer",
    "the tokenizer uses every core": "dataset_num_proc",
}

REFUSED = {
    "leave it out, and upload output_dir when it is done": """
        hub_model_id push_to_hub push_to_hub_model_id push_to_hub_organization""",
    "leave it out: adamw_torch has adam_beta1, adam_beta2, adam_epsilon and weight_decay": (
        "adafactor optim_args"
    ),
    "leave it out: the loss is the plain mean over trained tokens": "label_smoothing_factor",
    "leave it out: eval_steps says when": "eval_delay",
    "leave it out: this command trains, and sample_prompts are answered after it": "do_predict",
}

NEUTRAL: dict[str, tuple[object, ...]] = {
    "label_smoothing_factor": (0,),
    "eval_delay": (0,),
}
