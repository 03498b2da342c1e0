"""Values of our own keys in the words of other trainers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import is_empty, text_of
from roundpipe.finetune.settings.parse import parse_value
from roundpipe.finetune.settings.reporters import reporters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.settings.account import Account

_WORDS: dict[str, dict[str, str]] = {
    "optim": dict.fromkeys(
        (
            "adamw",
            "adamw_apex_fused",
            "adamw_hf",
            "adamw_torch_fused",
            "adamw_torch_npu_fused",
            "adamw_torch_xla",
            "optimi_adamw",
            "paged_adamw",
            "paged_adamw_32bit",
        ),
        "adamw_torch",
    ),
    "dtype": {
        "bfloat16": "bf16",
        "float32": "fp32",
        "float": "fp32",
        "float16": "fp16",
        "half": "fp16",
    },
    "lr_scheduler_type": {"wsd": "warmup_stable_decay"},
    "truncation": {"truncate": "cut", "raise": "error"},
    "metric_for_best_model": {"loss": "eval_loss"},
    "chat_template": {"tokenizer_default": "auto"},
}
OPTIMIZERS_8BIT = (
    "adamw_8bit",
    "adamw_bnb_8bit",
    "adamw_torch_8bit",
    "ao_adamw_8bit",
    "paged_adamw_8bit",
)
_FAST_ATTENTION = re.compile(r"fa[234]|sage|xformers|flex_attention|.*flash.*")
# Templates that axolotl and unsloth bring along under names of their own.
_TEMPLATES = re.compile(
    r"(alpaca|aya|cohere|command_a|deepseek|exaone|falcon_h1|gemma|gpt-?oss|jamba|lfm|llama|llava"
    r"|metharme|mistral|nemotron_h|phi|pixtral|qwen|starling|tokenizer_default|unsloth|vicuna"
    r"|yi-chat|zephyr)[-_.a-z0-9]*"
)
_WHOLE = ("embed_tokens", "lm_head")
_UNSAID_STEPS = 500  # between evaluations, and between checkpoints
_SCHEDULE_ARGUMENTS = (
    "decay_type",
    "num_cycles",
    "num_decay_steps",
    "num_stable_steps",
    "warmup_type",
)


def translate_words(values: dict[str, Any], account: Account) -> None:
    """Put our words for those of other trainers, where the key is ours."""
    if isinstance(values.get("dtype"), str):
        values["dtype"] = values["dtype"].removeprefix("torch.")
    for field, words in _WORDS.items():
        _translate_word(field, words, values, account)
    _translate_8bit(values, account)
    _translate_template(values, account)
    attention = values.get("attn_implementation")
    if isinstance(attention, str) and _FAST_ATTENTION.fullmatch(attention):
        _translate_word("attn_implementation", {attention: "sdpa"}, values, account)
    _translate_tokens(values, account)
    _translate_schedule(values, account)
    _count_unsaid(values, account)
    _translate_counts(values, account)
    _translate_adapter(values, account)
    if values.get("report_to") is not None:
        values["report_to"] = reporters(values["report_to"])
    if values.get("sample_prompts") in ([], ["none"], ["None"], [None]):
        del values["sample_prompts"]


def _translate_word(
    field: str, words: Mapping[str, str], values: dict[str, Any], account: Account
) -> None:
    value = values.get(field)
    if isinstance(value, str) and value in words:
        values[field] = words[value]
        account.say(f"{field}: {value} is {words[value]}", in_table=True)


def _translate_8bit(values: dict[str, Any], account: Account) -> None:
    """An optimizer with 8-bit moments; what is said of the moments themselves counts more."""
    value = values.get("optim")
    if value in OPTIMIZERS_8BIT:
        values["optim"] = "adamw_torch"
        state = values.setdefault("optim_state_dtype", "int8")
        account.adds("optim", "optim_state_dtype")
        text = f"optim: {value} is adamw_torch with optim_state_dtype: {state}"
        account.say(text, in_table=True)


def _translate_template(values: dict[str, Any], account: Account) -> None:
    """Another trainer's name of a template: the model's own is used in its place."""
    value = values.get("chat_template")
    if value == "jinja":  # what it is, another key says
        del values["chat_template"]
        account.leaves("chat_template", "not needed: chat_template_jinja says which")
    elif isinstance(value, str) and value != "auto" and _TEMPLATES.fullmatch(value):
        values["chat_template"] = "auto"
        account.say(f"not used: chat_template: {value} (the model's own; see the marked sample)")


def _translate_tokens(values: dict[str, Any], account: Account) -> None:
    """Special tokens but for the one that fills short rows, which is neither read nor learned."""
    given = values.get("special_tokens")
    if is_empty(given) or not isinstance(given, dict):
        return
    kept = {name: token for name, token in given.items() if not is_empty(token)}
    if kept.pop("pad_token", None) is not None and not kept:
        why = "not needed: padding is neither attended to nor trained"
        account.leaves("special_tokens", why)
    values["special_tokens"] = kept or None


def _translate_schedule(values: dict[str, Any], account: Account) -> None:
    """Settings of a schedule: the least rate is a key of ours, a few others go on as they are."""
    rest = _schedule_arguments(values.pop("lr_scheduler_kwargs", None))
    ratios = [rest.pop(name) for name in ("min_lr_rate", "min_lr_ratio") if name in rest]
    if "min_lr" in rest:
        ratios.append(_as_ratio(rest.pop("min_lr"), values))
    for ratio in ratios:
        if ratio is not None:
            values["min_lr_ratio"] = ratio
            account.adds("lr_scheduler_kwargs", "min_lr_ratio")
    if values.get("lr_scheduler_type") == "cosine_with_restarts":
        if rest.pop("num_cycles", 1) != 1:
            raise ConfigError(
                "not supported: lr_scheduler_type: cosine_with_restarts with more than one cycle"
                "\nhint: lr_scheduler_type=cosine"
            )
        values["lr_scheduler_type"] = "cosine"
        account.say("lr_scheduler_type: cosine_with_restarts is cosine (one cycle)")
    unknown = [name for name in rest if name not in _SCHEDULE_ARGUMENTS]
    if unknown:
        raise ConfigError(
            f"not supported: lr_scheduler_kwargs: {unknown[0]}: {text_of(rest[unknown[0]])}"
            f"\nhint: min_lr_ratio=0.1, or one of {', '.join(_SCHEDULE_ARGUMENTS)}"
        )
    if rest:
        values["lr_scheduler_kwargs"] = rest


def _schedule_arguments(given: Any) -> dict[str, Any]:
    """As a mapping, which may be given as text."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = parse_value(given)
    if is_empty(given):
        return {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"not settings of a schedule: lr_scheduler_kwargs: {text_of(given)}"
            "\nhint: lr_scheduler_kwargs='{num_decay_steps: 100}'"
        )
    return dict(given)


def _as_ratio(least: Any, values: Mapping[str, Any]) -> float | None:
    """An absolute least rate as a share of the peak rate."""
    if least is None:
        return None
    try:
        return round(float(least) / float(values["learning_rate"]), 12)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ConfigError(
            f"min_lr: {text_of(least)} is a share of a learning_rate that is not given"
            "\nhint: min_lr_ratio=0.1 in its place"
        ) from None


def _count_unsaid(values: dict[str, Any], account: Account) -> None:
    """Every so many steps, but not how many: what transformers takes then."""
    logged = values.get("logging_steps")
    if isinstance(logged, bool) or not isinstance(logged, int | float) or logged <= 0:
        logged = None
    for what, other in (("eval", logged), ("save", None)):
        steps = f"{what}_steps"
        if values.get(f"{what}_strategy") != "steps" or values.get(f"{what}s_per_epoch"):
            continue
        if values.get(steps) in (None, False):
            values[steps] = other or _UNSAID_STEPS
            account.adds(f"{what}_strategy", steps)
            why = "logging_steps, as" if other else "as"
            account.say(f"{steps}: {values[steps]:g} ({why} nothing else is said)")


def _translate_counts(values: dict[str, Any], account: Account) -> None:
    """Numbers that mean none, and steps beside another way to say when."""
    if values.get("neftune_noise_alpha") == 0:
        values["neftune_noise_alpha"] = None
    for field in ("eval_steps", "save_steps", "max_steps", "save_total_limit", "val_size"):
        value = values.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            values[field] = None
            if value < 0 and field not in ("max_steps", "save_total_limit"):
                values[field] = value  # a mistake
    if values.get("max_grad_norm") in (0, "0") and values["max_grad_norm"] is not False:
        values["max_grad_norm"] = None
        account.say("max_grad_norm: 0 is max_grad_norm: null (nothing is clipped)", in_table=True)
    for what in ("eval", "save"):
        strategy = values.get(f"{what}_strategy")
        counts_steps = strategy not in ("epoch", "no", "best", "minutes", False)
        if not counts_steps and values.pop(f"{what}_steps", None) is not None:
            said = f"{what}_strategy: {'no' if strategy is False else strategy} counts"
            account.leaves(f"{what}_steps", f"not used: {said}")
            account.say(f"not used: {what}_steps ({said})", in_table=True)
    every = values.get("logging_steps")
    if isinstance(every, float) and 0 < every < 1:
        values["logging_steps"] = 1
        account.say(f"logging_steps: {every:g} is 1: a share of all steps is not known yet")


def _translate_adapter(values: dict[str, Any], account: Account) -> None:
    """What an adapter is put on, as names."""
    targets = values.get("target_modules")
    if isinstance(targets, list) and targets in (["all"], ["all-linear"]):
        targets = "all-linear"
    if isinstance(targets, str):
        values["target_modules"] = _targets(targets)
    for field in ("modules_to_save", "target_parameters"):
        if isinstance(values.get(field), str):
            values[field] = _names(values[field])
    if account.has("use_gradient_checkpointing", "model_name", "embedding_learning_rate"):
        _train_embeddings(values, account)


def _targets(text: str) -> str | list[str]:
    if text in ("all", "all-linear"):
        return "all-linear"
    # A comma list is names; anything else may be a regular expression, which peft reads itself.
    return _names(text) if "," in text or text.isidentifier() else text


def _train_embeddings(values: dict[str, Any], account: Account) -> None:
    """Embedding and head among an adapter's targets: unsloth trains these whole."""
    named = values.get("target_modules")
    whole = [name for name in named if name in _WHOLE] if isinstance(named, list | tuple) else []
    if named is None or not whole:
        return
    values["target_modules"] = [name for name in named if name not in whole]
    kept = values.get("modules_to_save") or []
    values["modules_to_save"] = [*kept, *(name for name in whole if name not in kept)]
    account.adds("target_modules", "modules_to_save")
    account.say(f"modules_to_save: {', '.join(whole)} (unsloth trains these whole)")


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
