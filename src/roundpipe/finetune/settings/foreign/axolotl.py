"""axolotl: the keys of its config files, those of its plugins among them."""

from __future__ import annotations

NEEDLESS = {
    "one process drives every device": """
        context_parallel_size ddp device dp_replicate_size dp_shard_size expert_parallel_backend
        expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
        expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity
        heads_k_stride ring_attn_func sequence_parallel_degree tensor_parallel_size world_size""",
    "weights and optimizer state live in host memory anyway": """
        cpu_offload experimental_skip_move_to_device fsdp_final_state_dict_type gpu_memory_limit
        layer_offloading lora_on_cpu ple_cpu_offload qlora_sharded_model_loading""",
    "recompute is always on": "selective_checkpointing",
    "layers run as they are": """
        batch_flattening cut_cross_entropy deepcompile dsv4_bf16_all dsv4_fp4_grouped_mode
        dsv4_fp8_lora_kernel dsv4_fp8_nonexpert_mode dsv4_shared_mlp_lora_kernel expert_backend
        experts_implementation flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
        flash_attn_fuse_qkv flash_attn_rms_norm flex_attn_compile_kwargs flash_optimum
        fused_attn_kernel gemma4_fp8_nonexpert gemma4_hybrid_attn_impl gemma4_nf4_nonexpert
        large_head_attention llama4_linearized_experts lora_embedding_kernel lora_mlp_kernel
        lora_o_kernel lora_qkv_kernel moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend
        sdpa_varlen tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp
        torch_compile_options unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_o
        unsloth_lora_qkv unsloth_rms_norm unsloth_rope use_dsv4_kernels use_glm_dsa_kernels
        use_kernels use_scattermoe use_sonicmoe""",
    "models are saved as Hugging Face does": "lora_out_dir",
    "logits exist for one microbatch at a time": """
        chunked_cross_entropy chunked_cross_entropy_num_chunks liger_cross_entropy
        liger_fused_linear_cross_entropy liger_glu_activation liger_kernel liger_kernel_impl
        liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope liger_swiglu
        liger_use_token_scaling""",
    "weights in 4 bits are those of experts too": "quantize_moe_experts",
    "master weights are fp32": "embeddings_skip_upcast fp32_norm_classes fp32_norms",
    "dtype says what is computed in": "fp8_config peft_autocast_adapter_dtype",
    "a row is packed with whole samples, wherever there is room": """
        eval_sample_packing multipack_real_batches pretrain_multipack_attn
        pretrain_multipack_buffer_size pretraining_sample_concatenation sample_packing_bin_size
        sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
        sample_packing_sequentially streaming_multipack_buffer_size""",
    "a batch is padded to its longest sample": "pad_to_max_length pad_to_sequence_len",
    "max_length holds for evaluation too": "eval_sequence_len",
    "train_sampling_strategy says the order": """
        shuffle_before_merging_datasets shuffle_merged_datasets""",
    "tokens are kept on disk and read from there": """
        dataset_keep_in_memory is_preprocess num_dataset_shards_to_save preprocess_iterable
        total_num_tokens total_supervised_tokens""",
    "the chat template says what ends a turn": "eot_tokens",
    "evaluation gives the loss": """
        bench_dataset bench_split do_bench_eval do_causal_lm_eval eval_causal_lm_metrics
        eval_max_new_tokens eval_table_size lm_eval_batch_size lm_eval_model lm_eval_post_train
        lm_eval_tasks""",
    "sample_prompts are answered before and after": """
        generate_samples generation_do_sample generation_max_new_tokens generation_prompt_ratio
        generation_temperature generation_top_k generation_top_p num_generation_samples""",
    "tokens are always counted": "include_tkps",
    "a step without a finite loss is left out, and several stop the run": """
        loss_watchdog_patience loss_watchdog_threshold""",
    "memory is given back where it is short": "gc_collect_steps gc_steps",
    "touch output_dir/save-now saves a checkpoint": "dynamic_checkpoint",
    "roundpipe trace shows the steps": "profiler_steps profiler_steps_start",
    "the first step is logged, and a checkpoint follows by the clock": "save_first_step",
    "an evaluation's loss is better where it is lower": "greater_is_better",
    "the run's folder keeps what its logger needs": "wandb_run_id",
    "wandb reads it from the environment: WANDB_ENTITY, WANDB_WATCH, WANDB_LOG_MODEL": """
        wandb_entity wandb_log_model wandb_watch""",
    "mlflow reads it from the environment": "hf_mlflow_log_artifacts mlflow_tracking_uri",
    "no logger of that name is used": """
        comet_api_key comet_experiment_config comet_experiment_key comet_mode comet_online
        comet_project_name comet_workspace otel_metrics_host otel_metrics_port
        swanlab_api_host swanlab_completion_log_interval swanlab_completion_max_buffer
        swanlab_description swanlab_experiment_name swanlab_log_completions swanlab_log_model
        swanlab_web_host""",
    "HF_TOKEN in the environment is used": "hf_use_auth_token",
    "another command does it": """
        axolotl_config_path gradio_max_new_tokens gradio_server_name gradio_server_port
        gradio_share gradio_temperature gradio_title merge_lora merge_method""",
    "the model's own config says it": """
        base_model_config base_model_ignore_patterns cls_model_config is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model model_type
        processor_kwargs processor_type tokenizer_legacy tokenizer_type tokenizer_use_fast
        type_of_model""",
    "the chat template is saved beside the tokenizer": "tokenizer_save_jinja_files",
    "weights are always loaded strictly": "strict",
    "only text is trained": """
        freeze_mm_modules image_resize_algorithm image_size role_boundaries""",
    "tied weights stay tied": "peft_ensure_weight_tying",
    "it is read by methods alone that are not used here": """
        adam_beta3 adam_epsilon2 capabilities cpo_alpha dion_learning_rate dion_lr dion_momentum
        dion_rank_fraction dion_rank_multiple_of dpo_beta dpo_generate_during_eval dpo_loss_type
        dpo_loss_weights dpo_norm_loss dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep
        dpo_use_weighting eaft_k env_capabilities grokfast_lamb
        jagged_restart_anneal_steps jagged_restart_warmup_steps kd_alpha kd_beta kd_ce_alpha
        kd_normalize_topk kd_online_server kd_online_server_base_url kd_online_timeout
        kd_online_topk kd_temperature kd_temperature_min kto_desirable_weight
        kto_undesirable_weight lisa_layers_attribute lisa_step_interval mora_type
        nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets
        nemo_gym_dir nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name
        nemo_gym_multi_turn nemo_gym_run_timeout nemo_gym_server_timeout
        nemo_gym_verify_timeout
        nvfp4_merge_aware_start_step orpo_alpha precompute_ref_log_probs qgalore_cos_threshold
        qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
        qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap
        relora_anneal_steps relora_cpu_offload relora_prune_method relora_prune_ratio
        relora_warmup_steps rl_beta rpo_alpha scaling_softmax_bias scaling_softmax_factor
        spectrum_model_name torchdistx_path trl use_wandb_artifacts vllm""",
}

REFUSED = {
    "use a tokenizer that has them; no token is added to a vocabulary": """
        added_tokens added_tokens_overrides fix_untrained_tokens mean_resizing_embeddings
        resize_token_embeddings_to_32x shrink_embeddings tokenizer_use_mistral_common""",
    "leave it out: training starts from a model's weights": "reinit_weights",
    "leave it out: no code from outside is loaded": "trainer_cls",
    "leave it out: only supervised fine-tuning": """
        diffusion ebft kd_trainer nemo_gym_enabled process_reward_model hatchery""",
    "leave it out: only supervised fine-tuning of whole models or adapters": """
        lisa_n_layers mora relora relora_steps""",
    "dtype=bf16": """
        llmcompressor model_quantization_config model_quantization_config_kwargs
        nonexpert_quantization nvfp4_merge_aware qat quantization use_onebitllms""",
    "finetuning_type=qlora packs the base weights into 4 bits": "gptq",
    "max_samples=N of a dataset's entry": "dataset_shard_idx dataset_shard_num",
    "leave it out: samples with nothing to train are left out": "min_sample_len",
    "leave it out: it is read by preference training": "max_prompt_len",
    "leave it out: every sample is tokenised": "skip_prepare_dataset",
    "leave it out, and upload output_dir when it is done": "push_dataset_to_hub",
    "leave it out: attention is the model's own": """
        landmark_attention pose_max_context_len pose_num_chunks pose_split_on_token_ids s2_attention
        scaling_softmax use_pose xpos_rope""",
    "leave it out: the loss is the plain mean over trained tokens": "use_eaft",
    "leave it out: experts are chosen as the model chooses them": "dense_mixer",
    "leave it out: every sample counts": "dataset_exact_deduplication",
    "unfrozen_parameters='[…]' finetuning_type=freeze": "spectrum_top_fraction",
    "leave it out: adamw_torch gets gradients as they are": "grokfast_alpha",
    "packing=true max_length=N": "max_packed_sequence_len",
    "set it in the model's config.json": """
        model_config model_kwargs overrides_of_model_config overrides_of_model_kwargs""",
    "leave it out: every parameter learns at one rate": """
        embedding_lr embedding_lr_scale lr_groups""",
    "lr_scheduler_type=cosine warmup_steps=0.03": """
        cosine_constant_lr_ratio jagged_restart_steps lr_div_factor lr_quadratic_warmup""",
    "report_to=tensorboard, wandb, mlflow or trackio": "use_comet use_otel_metrics",
}

NEUTRAL: dict[str, tuple[object, ...]] = {}
