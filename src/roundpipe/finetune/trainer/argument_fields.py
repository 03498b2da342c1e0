"""Every field of TrainingArguments and SFTConfig, as data: what it becomes here.

A field is in exactly one list. ``TRANSLATED``: what it says is done, a sentence each on where.
``NEEDLESS``: it asks for what is so anyway, or for nothing that training hangs on. ``REFUSED``: a
value other than the default is an error, with a way out. A test goes through the fields of the
installed versions, so that one of a new version shows up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def _by_field(*tables: Mapping[str, str]) -> dict[str, str]:
    return {
        field: sentence
        for table in tables
        for sentence, names in table.items()
        for field in names.split()
    }


TRANSLATED = _by_field(
    {
        "a setting of the same name": """
            adam_beta1 adam_beta2 adam_epsilon data_seed learning_rate load_best_model_at_end
            lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps neftune_noise_alpha
            num_train_epochs optim output_dir packing project run_name save_only_model
            save_total_limit seed train_sampling_strategy warmup_steps weight_decay""",
        "when to log, evaluate and save": """
            eval_delay eval_on_start eval_steps eval_strategy logging_first_step logging_steps
            logging_strategy save_steps save_strategy""",
        "batch_size, with the number of devices": """
            gradient_accumulation_steps per_device_train_batch_size""",
        "whether a short last batch of an epoch is trained": "dataloader_drop_last",
        "samples of one prediction step": "per_device_eval_batch_size",
        "dtype": "bf16 fp16",
        "devices: cpu": "use_cpu",
        "the evaluation whose loss tells the best": "metric_for_best_model",
        "which columns a collator of your own is given": "remove_unused_columns",
        "a progress bar or lines": "disable_tqdm",
        "the loss": "label_smoothing_factor router_aux_loss_coef",
        "callbacks that write to loggers": "report_to",
        "state.num_input_tokens_seen": "include_num_input_tokens_seen",
        "how the model is loaded": "model_init_kwargs",
        "chat_template": "chat_template_path",
        "the column of plain text": "dataset_text_field",
        "whether rows are taken as they are": "dataset_kwargs",
        "special_tokens: eos_token": "eos_token",
        "max_length; none: nothing is cut": "max_length",
        "how rows are packed": "packing_strategy",
        "which tokens are trained": "assistant_only_loss completion_only_loss",
        "the order of rows that are not shuffled otherwise": "shuffle_dataset",
    }
)

NEEDLESS = _by_field(
    {
        "one process drives every device": """
            accelerator_config average_tokens_across_devices ddp_backend ddp_broadcast_buffers
            ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout local_rank
            log_level_replica log_on_each_node parallelism_config save_on_each_node""",
        "weights and optimizer state live in host memory anyway": """
            activation_offloading deepspeed fsdp fsdp_config""",
        "recompute is always on": """
            activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
            gradient_checkpointing_kwargs""",
        "evaluation computes in the dtype of training": "bf16_full_eval fp16_full_eval",
        "torch's own setting counts": "tf32",
        "layers run as they are": """
            torch_compile torch_compile_backend torch_compile_mode""",
        "logits exist for one microbatch at a time": "liger_kernel_config use_liger_kernel",
        "training keeps no key-value cache": "use_cache",
        "memory is given back where it is short": "torch_empty_cache_steps",
        "microbatches are planned to fit": "auto_find_batch_size",
        "a step without a finite loss changes nothing and is counted": "logging_nan_inf_filter",
        "Python's logging says what happens": "debug log_level",
        "TRACKIO_SPACE_ID sends them to a page": """
            trackio_bucket_id trackio_space_id trackio_static_space_id""",
        "evaluation gives the loss and keeps no logits": """
            batch_eval_metrics eval_accumulation_steps eval_do_concat_batches
            eval_use_gather_object include_for_metrics prediction_loss_only""",
        "SIGTERM saves a checkpoint": "enable_jit_checkpoint",
        "nothing is uploaded while training": """
            hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token""",
        "a resumed run goes on at its place in the data": "ignore_data_skip",
        "the same command gives the same bits": "full_determinism",
        "samples are tokenised before the first step": """
            dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
            dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
            dataset_num_proc""",
        "lengths are known from the tokens": "length_column_name",
        "memory stands in the log": "skip_memory_metrics",
        "for scripts, which read it themselves": """
            do_eval do_predict do_train resume_from_checkpoint""",
        "no code of a checkpoint is ever run": "trust_remote_code",
        "a batch is padded to its longest sample": "pad_to_multiple_of padding_free",
        "padding is neither attended to nor trained": "pad_token",
        "a mean over tokens is the same however rows are packed": "eval_packing",
    }
)

REFUSED = {
    "optim_args": "adam_beta1, adam_beta2, adam_epsilon and weight_decay, or optimizers=(…, …)",
    "optim_target_modules": "peft_config=LoraConfig(…) trains less",
    "push_to_hub": "push_to_hub=False, and upload output_dir when it is done",
    "greater_is_better": "greater_is_better=None: the best is the lowest loss",
    "restore_callback_states_from_checkpoint": "leave it out: callbacks begin anew",
    "label_names": "leave it out: what is trained stands in the column labels",
    "truncation_mode": "truncation_mode='keep_start', and max_length=N makes room",
    "loss_type": "loss_type='nll', or compute_loss_func=FUNCTION",
}
# Values that ask for nothing, beside the default.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "greater_is_better": (False,),
    "label_names": (["labels"], ("labels",)),
    "loss_type": ("nll", "chunked_nll"),
    "optim_args": ("",),
}
# Needless fields that the arguments fill in themselves, so that nobody need have set them.
FILLED = (
    "accelerator_config",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "dataloader_multiprocessing_context",
    "dataloader_pin_memory",
    "debug",
    "do_eval",
    "gradient_checkpointing_kwargs",
    "hub_strategy",
    "local_rank",
    "pad_to_multiple_of",
    "torch_compile_backend",
)
