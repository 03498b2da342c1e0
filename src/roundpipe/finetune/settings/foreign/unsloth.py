"""unsloth: what its notebooks give to FastLanguageModel, and the config files of its program."""

from __future__ import annotations

NEEDLESS = {
    "recompute is always on": """
        checkpoint_skip_layers unsloth_tiled_mlp use_gradient_checkpointing""",
    "weights and optimizer state live in host memory anyway": """
        device_map_planner_kwargs offload_embedding offload_layers""",
    "weights are not packed unless finetuning_type=qlora": "load_in_16bit",
    "nothing is generated while training": """
        disable_log_stats fast_inference float8_kv_cache gpu_memory_utilization max_lora_rank
        return_logits unsloth_vllm_standby""",
    "layers run as they are": "fullgraph unsloth_force_compile",
    "master weights are fp32": "float32_mixed_precision",
    "the model's own config says it": """
        auto_config auto_model fix_tokenizer num_labels on_model_resolved supports_sdpa
        use_exact_model_name whisper_language whisper_task""",
    "only text is trained": """
        finetune_audio_layers finetune_vision_layers text_only vision_all_linear""",
    "answers are told by the chat template": "instruction_part response_part",
    "tied weights stay tied": "ensure_weight_tying",
    "HF_TOKEN in the environment is used": "hf_token token",
    "WANDB_API_KEY in the environment is used": "wandb_token",
    "logs stand in output_dir": "tensorboard_dir",
    "models are saved as Hugging Face does": """
        maximum_memory_usage save_method temporary_location""",
    "one process drives every device": "is_main_process",
}

REFUSED = {
    "dtype=bf16": "load_in_fp8 qat_scheme",
    "peft='{init_lora_weights: loftq, …}'": "use_loftq",
    "leave it out: the language model is what is trained": "finetune_language_layers",
    "name the layers' parts: target_modules='[q_proj, …]'": """
        finetune_attention_modules finetune_last_n_layers finetune_mlp_modules""",
    "use a tokenizer that has them; no token is added to a vocabulary": "resize_model_vocab",
    "leave it out: the model's own tokenizer is used": "tokenizer_name tokenizer_revision",
    "leave it out: the embedding learns at the rate of all": "embedding_learning_rate",
}

# True is what is done anyway; false would train less than all.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "finetune_attention_modules": (True,),
    "finetune_language_layers": (True,),
    "finetune_mlp_modules": (True,),
}
