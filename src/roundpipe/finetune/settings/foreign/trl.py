"""TRL: SFTConfig, ModelConfig, ScriptArguments, and the configs of its other trainers."""

from __future__ import annotations

NEEDLESS = {
    "a batch is padded to its longest sample": "pad_to_multiple_of padding_free",
    "padding is neither attended to nor trained": "pad_token",
    "a row is packed with whole samples": "packing_strategy",
    "evaluation is packed as training is": "eval_packing",
    "train_sampling_strategy says the order": "shuffle_dataset",
    "tokens are kept on disk and read from there": "dataset_streaming streaming",
    "a causal language model is trained": "task_type",
    "weights in 4 bits are NF4 in bytes, their scales quantised too": "bnb_config_kwargs",
    "one process drives every device": "ignore_bias_buffers",
}

REFUSED = {
    "leave it out: only supervised fine-tuning": """
        beta cast_lm_head_to_fp32 center_rewards_coefficient delta desirable_weight disable_dropout
        discopop_tau ds3_gather_for_generation entropy_coef entropy_coef_delta entropy_coef_max
        entropy_coef_min entropy_target epsilon epsilon_high f_alpha_divergence_coef
        f_divergence_type generation_batch_size importance_sampling_level judge label_smoothing
        lmbda log_completions log_completions_hub_repo log_multimodal log_unique_prompts
        loss_weights mask_truncated_completions max_completion_length max_prompt_length
        max_tool_calling_iterations missing_eos_penalty multi_objective_aggregation
        normalize_advantages num_completions_to_print num_generations num_generations_eval
        num_iterations off_policy_mask_threshold precompute_ref_batch_size
        ref_model_mixup_alpha ref_model_sync_steps reward_clip_range reward_funcs
        reward_model_name_or_path reward_weights sapo_temperature_neg sapo_temperature_pos
        scale_rewards steps_per_generation sync_ref_model teacher_model_init_kwargs
        teacher_model_name_or_path teacher_model_revision top_entropy_quantile undesirable_weight
        use_adaptive_entropy use_bias_correction_kl use_weighting vespo_k_neg vespo_k_pos
        vespo_lambda_neg vespo_lambda_pos""",
    "leave it out: nothing is generated while training": """
        cache_implementation generation_kwargs transformers_continuous_batching_config
        use_transformers_continuous_batching use_transformers_paged use_vllm
        vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
        vllm_importance_sampling_cap vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_structured_outputs_regex vllm_tensor_parallel_size""",
    "leave it out: the loss is the plain mean over trained tokens": "loss_type",
    "leave it out: a sample keeps its beginning; max_length=N makes room": "truncation_mode",
    "leave it out: a causal language model is trained": "lora_task_type",
    "leave it out: the router is trained by the loss alone": """
        output_router_logits router_aux_loss_coef""",
    "leave it out: the chat template gets messages and tools alone": "chat_template_kwargs",
    "finetuning_type=qlora: weights in 4 bits are NF4": "bnb_4bit_quant_type quantization_type",
    "set these in the environment of the command": "env",
    "dataset='[{path: ID, split: train_sft, weight: 0.5}]'": """
        dataset_configs dataset_mixer dataset_splits dataset_weights""",
    "write it into the system column of the dataset": "system_prompt",
}

NEUTRAL: dict[str, tuple[object, ...]] = {
    "bnb_4bit_quant_type": ("nf4",),
    "quantization_type": ("nf4",),
    "lora_task_type": ("CAUSAL_LM",),
    "loss_type": ("nll", "chunked_nll"),
    "router_aux_loss_coef": (0,),
    "truncation_mode": ("keep_start",),
}
