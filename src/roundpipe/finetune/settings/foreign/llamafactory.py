"""LLaMA-Factory: its model, data, fine-tuning, generating and training arguments."""

from __future__ import annotations

_OTHER_METHODS = """
    apollo_layerwise apollo_proj apollo_proj_type apollo_rank apollo_scale apollo_scale_front
    apollo_scale_type apollo_target apollo_update_interval asft_alpha badam_mask_mode badam_mode
    badam_start_block badam_switch_interval badam_switch_mode badam_update_ratio badam_verbose
    dpo_label_smoothing eaft_alpha galore_layerwise galore_proj_type galore_rank galore_scale
    galore_target galore_update_interval kto_chosen_weight kto_rejected_weight ld_alpha
    loraplus_lr_embedding module_dropout oft_block_size oft_rank oft_target ppo_buffer_size
    ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards pref_bco_weight pref_beta pref_ftx
    pref_loss ref_model ref_model_adapters ref_model_quantization_bit reward_model_adapters
    reward_model_quantization_bit reward_model_type simpo_gamma"""

NEEDLESS = {
    "it is read by methods alone that are not used here": _OTHER_METHODS,
    "only text is trained": """
        audio_sampling_rate crop_to_patches freeze_multi_modal_projector freeze_vision_tower
        image_do_pan_and_scan image_max_pixels image_min_pixels media_dir use_audio_in_video
        video_fps video_max_pixels video_maxlen video_min_pixels visual_inputs""",
    "the model's own chat template says it": "enable_thinking preserve_thinking tool_format",
    "tokens are kept on disk and read from there": """
        buffer_size data_shared_file_system preprocessing_batch_size tokenized_path""",
    "files are read anew where they have changed": "overwrite_cache",
    "padding is neither attended to nor trained": "ignore_pad_token_for_loss",
    "a packed sample sees itself alone": "block_diag_attn",
    "evaluation gives the loss over all of eval_dataset": "compute_accuracy eval_on_each_dataset",
    "nothing is generated while training": """
        do_sample eval_num_beams length_penalty max_new_tokens min_p num_beams repetition_penalty
        skip_special_tokens temperature top_k top_p infer_backend infer_dtype sglang_config
        sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size use_kv_cache
        vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank vllm_maxlen""",
    "another command does it": """
        download_mode export_device export_dir export_hub_model_id export_legacy_format
        export_quantization_bit export_quantization_dataset export_quantization_maxlen
        export_quantization_nsamples export_size lang n_shot save_dir task task_dir""",
    "HF_HOME says where downloads are kept": "cache_dir",
    "HF_TOKEN in the environment is used": "hf_hub_token om_hub_token ms_hub_token",
    "no token is added to a vocabulary": "init_special_tokens",
    "recompute is always on": """
        disable_gradient_checkpointing use_reentrant_gc use_unsloth_gc""",
    "logits exist for one microbatch at a time": "enable_liger_kernel",
    "layers run as they are": """
        kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num
        kt_use_lora_experts kt_weight_path use_kt use_v1_kernels""",
    "no other trainer is used": "use_unsloth",
    "one process drives every device": """
        hyper_parallel_args master_addr master_port ray_init_kwargs ray_num_workers ray_run_name
        ray_storage_filesystem ray_storage_path resources_per_worker placement_strategy
        use_hyper_parallel use_mca use_ray""",
    "master weights are fp32": "upcast_layernorm upcast_lmhead_output",
    "dtype says what is computed in": "compute_dtype fp8_backend fp8_enable_fsdp_float8_all_gather",
    "max_length says it": "model_max_length",
    "weights in 4 bits are made on the host": "quantization_device_map",
    "training_loss.png is always drawn": "plot_loss",
    "trainer_log.jsonl has the rate": "include_effective_tokens_per_second",
    "what is trained is said before the first step": "print_param_status",
    "roundpipe trace shows the steps": """
        enable_torch_profiler profile_modules profiler_active_steps profiler_output_dir
        profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps
        profiler_warmup_steps profiler_with_stack""",
    "no logger of that name is used": """
        swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode
        swanlab_project swanlab_run_name swanlab_workspace""",
}

REFUSED = {
    "give each entry a weight: dataset='[{path: a.jsonl, weight: 2}, {path: b.jsonl}]'": (
        "interleave_probs mix_strategy"
    ),
    "write it into the system column of the dataset": "default_system default_system_message",
    "adamw_torch is the optimizer: leave it out": """
        use_adam_mini use_apollo use_badam use_galore use_muon""",
    "leave it out: the loss is the plain mean over trained tokens": """
        use_asft_loss use_dft_loss use_eaft_loss""",
    "leave it out: all adapters learn at one rate": "loraplus_lr_ratio",
    "leave it out: an adapter is saved as it was trained": "pissa_convert",
    "merge the adapter first, and train on the merged model": "create_new_adapter",
    "adapter_name_or_path=FOLDER of the adapter itself": "adapter_folder",
    "unfrozen_parameters='[…]' finetuning_type=freeze": "use_llama_pro",
    "leave it out: the language model is what is trained": "freeze_language_model",
    "use a tokenizer that has them; no token is added to a vocabulary": """
        add_special_tokens add_tokens new_special_tokens_config resize_vocab""",
    "leave it out: special tokens of a chat are never split": "split_special_tokens",
    "set it in the model's config.json": "rope_scaling",
    "leave it out: attention is the model's own": "mixture_of_depths shift_attn",
    "leave it out: the router is trained by the loss alone": "moe_aux_loss_coef",
    "leave it out: training starts from a model's weights": "train_from_scratch",
    "finetuning_type=qlora packs the base weights into 4 bits": "quantization_method",
    "dtype=bf16": "fp8",
    "leave it out: only supervised fine-tuning": "reward_model",
    "report_to=tensorboard, wandb, mlflow or trackio": "use_swanlab",
}

NEUTRAL: dict[str, tuple[object, ...]] = {
    "mix_strategy": ("concat",),
    "moe_aux_loss_coef": (0,),
    "quantization_method": ("bnb", "bitsandbytes"),
    "rope_scaling": ("none",),
}
