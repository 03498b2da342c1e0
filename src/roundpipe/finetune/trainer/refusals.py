"""What transformers' and TRL's trainers have and this one has not, each with a way out."""

from __future__ import annotations

from typing import Any

from roundpipe.errors import ConfigError

# Methods that a subclass may override there: here nobody would call them.
HOOKS = {
    "_inner_training_loop": "callbacks=[…] follow every step",
    "_prepare_dataset": "a train_dataset that is prepared already, or formatting_func=…",
    "_save_checkpoint": "a callback's on_save",
    "compute_loss": "compute_loss_func=function(outputs, labels, num_items_in_batch)",
    "compute_loss_context_manager": "dtype, bf16 or fp16 in args say the precision",
    "create_optimizer": "optimizers=(optimizer, scheduler), over the model's parameters",
    "create_optimizer_and_scheduler": "optimizers=(optimizer, scheduler)",
    "create_scheduler": "optimizers=(optimizer, scheduler), or lr_scheduler_type in args",
    "evaluation_loop": "evaluate(), which may be overridden",
    "get_batch_samples": "data_collator=… makes the batches",
    "get_eval_dataloader": "eval_dataset=… and data_collator=…",
    "get_decay_parameter_names": "optimizers=(optimizer, scheduler) with groups of your own",
    "get_optimizer_cls_and_kwargs": "optimizers=(optimizer, scheduler)",
    "get_train_dataloader": "train_dataset=… and data_collator=…; train_sampling_strategy in args",
    "prediction_step": "model.generate(…), or the model itself, called under torch.no_grad()",
    "training_step": "compute_loss_func=…, or RoundPipe itself: forward_backward and step",
}

# Other names, as attributes or methods.
_ABSENT = {
    "compute_metrics": "evaluate() gives the loss; for exact matches: `roundpipe eval`",
    "autocast_smart_context_manager": "dtype, bf16 or fp16 in args say the precision",
    "call_model_init": "model=model_init()",
    "create_accelerator_and_postprocess": "one process drives all devices: none is needed",
    "create_model_card": "save_model() writes one",
    "floating_point_ops": "state.num_input_tokens_seen and tokens_per_second of the log",
    "get_cp_size": "one process drives all devices",
    "get_learning_rates": "lr_scheduler.get_last_lr()",
    "get_num_trainable_parameters": "sum(p.numel() for p in model.parameters() if p.requires_grad)",
    "get_optimizer_group": "optimizer.param_groups",
    "get_sp_size": "one process drives all devices",
    "get_test_dataloader": "evaluate(dataset)",
    "get_total_train_batch_size": "config.batch_size",
    "get_tp_size": "one process drives all devices",
    "hyperparameter_search": "a loop over trainers, each in a `with` block",
    "init_hf_repo": "hf upload NAME FOLDER, after save_model()",
    "loss_is_scaled_for_ga": "the loss of a step is one mean over its trained tokens",
    "metrics_format": "evaluate() and train() return their metrics",
    "num_examples": "len(trainer.train_dataset)",
    "log_metrics": "evaluate() and train() return their metrics",
    "predict": "evaluate(dataset) for its loss, chat(prompt) or model.generate(…) for answers",
    "push_to_hub": "save_model(), then: hf upload NAME FOLDER",
    "set_initial_training_values": "state.max_steps, from the first step on",
    "store_flos": "state.num_input_tokens_seen and tokens_per_second of the log",
    "save_metrics": "trainer_log.jsonl in output_dir holds all of them",
    **HOOKS,
}

# Arguments of their constructors.
_ARGUMENTS = {
    "compute_metrics": "evaluate() gives the loss of eval_dataset; for exact matches: "
    "`roundpipe eval RUN dataset=… answer_pattern=…`, or chat(prompts) and a comparison",
    "dataset_text_field": "args=SFTConfig(dataset_text_field=…)",
    "max_seq_length": "args=SFTConfig(max_length=…)",
    "model_init": "model=model_init()",
    "model_init_kwargs": "args=SFTConfig(model_init_kwargs=…)",
    "optimizer_cls_and_kwargs": "optimizers=(cls(model.parameters(), **kwargs), None), or optim, "
    "optim_args in args",
    "packing": "args=SFTConfig(packing=True)",
    "preprocess_logits_for_metrics": "no logits come to the host",
    "tokenizer": "processing_class=tokenizer",
}


class AbsentError(ConfigError, AttributeError):
    """A name of transformers' Trainer that this trainer has not; ``hasattr`` says so too."""


def refuse_arguments(others: dict[str, Any]) -> None:
    """Raise ConfigError for an argument that there is none of."""
    for name, value in others.items():
        if value is None and name in _ARGUMENTS:
            continue
        way_out = _ARGUMENTS.get(name, "model, args, train_dataset, eval_dataset, … as in TRL")
        raise ConfigError(f"no argument of RoundPipeTrainer: {name}\nhint: {way_out}")


def refuse_overridden(kind: type, own: type) -> None:
    """Raise ConfigError where a subclass overrides what here nobody would call."""
    for each in kind.__mro__[: kind.__mro__.index(own)]:
        for name, way_out in HOOKS.items():
            if name in vars(each):
                raise ConfigError(
                    f"{each.__name__} overrides {name}, which RoundPipeTrainer does not call"
                    f"\nhint: {way_out}"
                )


def absent(name: str) -> AttributeError:
    """The error for a name that is not here."""
    if name in _ABSENT:
        return AbsentError(f"RoundPipeTrainer has no {name}\nhint: {_ABSENT[name]}")
    return AttributeError(f"'RoundPipeTrainer' object has no attribute {name!r}")


def refuse_launcher(arguments: Any) -> None:
    """Raise ConfigError where several processes were started to do what one does."""
    if arguments.world_size > 1:
        raise ConfigError(
            f"{arguments.world_size} processes were started, and one drives all devices\n"
            "hint: python SCRIPT in place of torchrun, accelerate launch or deepspeed"
        )
