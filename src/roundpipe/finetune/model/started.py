"""Start from an adapter that exists: its own settings, its own weights, on the base of this run.

Its folder comes from anywhere, and peft would open a pickle and import a module that a config names
(``megatron_core``); so the folder is looked at first. What a file holds must be what the adapter
is made of on this base, key by key and shape by shape: peft only warns of what is missing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.adapters import quiet_peft, set_base
from roundpipe.finetune.model.hub import named
from roundpipe.finetune.model.peft_quietly import LoraConfig, PeftModelForCausalLM
from roundpipe.finetune.settings.peft_fields import why_not_loaded
from roundpipe.models.loading.distrust import check_texts, read_json
from roundpipe.models.loading.hub import open_adapter
from roundpipe.models.loading.shards import read_header

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import PeftModel
    from transformers import PreTrainedModel

    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.models.loading.hub import Hub

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_LARGEST_CONFIG = 16 << 20  # bytes
_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^@\s]+))?")
_ELSEWHERE = ("megatron_config",)  # what peft imports of this comes from the file
_READS_BASE = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga")


def adapter_folder(given: str, *, hub: Hub | None = None) -> Path:
    """The folder of an adapter, fetched from the hub where ``given`` is an id; may block on it.

    Raises ConfigError where there is none that can be opened.
    """
    folder = Path(given).expanduser()
    match = _ID.fullmatch(given)
    if not folder.is_dir():
        if match is None or given.startswith("."):
            raise ConfigError(
                f"adapter_name_or_path: no such folder: {given}\n"
                "hint: give a folder that exists, or a hub id such as owner/name"
            )
        with named("adapter_name_or_path"):
            folder = open_adapter(match["id"], match["revision"], hub)
    if not (folder / _CONFIG).is_file():
        is_model = (folder / "config.json").is_file()
        raise ConfigError(
            f"adapter_name_or_path: {'a whole model' if is_model else f'no {_CONFIG} in'}: {given}"
            f"\nhint: {f'model_name_or_path={given}' if is_model else 'give a folder of peft'}"
        )
    if not (folder / _WEIGHTS).is_file():
        raise ConfigError(
            f"adapter_name_or_path: no {_WEIGHTS} in: {given}\n"
            "hint: a pickle (adapter_model.bin) can run any code, so it is not opened; where you "
            "trust it, load it with peft once and save it again"
        )
    return folder


def start_from(
    model: PreTrainedModel,
    given: str,
    source: ModelSource,
    *,
    is_packed: bool = False,
    hub: Hub | None = None,
    say: Callable[[str], None],
) -> PeftModel:
    """Put the adapter that ``given`` names on ``model``, ready to be trained on.

    Freezes the base in place. ``is_packed``: its weights are in 4 bits and cannot be read. Raises
    ConfigError for an adapter of another kind, of another base, or whose file lacks a key.
    """
    folder = adapter_folder(given, hub=hub)
    with named("adapter_name_or_path"):
        check_texts(folder)
        lora = _settings(folder, given, is_packed=is_packed)
        _require_numbers(folder / _WEIGHTS)
    told = lora.base_model_name_or_path
    say(f"starts from the adapter {given} (r={lora.r}); its settings count, lora_* keys do not")
    if told and told not in (source.given, source.hub_id, source.location):
        say(f"that adapter was trained on {told}; here it is on {source.given}")
    try:
        with quiet_peft():
            wrapped: Any = PeftModelForCausalLM(
                model, lora, autocast_adapter_dtype=False, low_cpu_mem_usage=False
            )
            loaded = wrapped.load_adapter(
                str(folder),
                "default",
                is_trainable=True,
                torch_device="cpu",
                autocast_adapter_dtype=False,
                key_mapping=getattr(model, "_checkpoint_conversion_mapping", {}),
            )
    except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as error:
        raise ConfigError(_why_not(given, source, error)) from error
    wrong = [*loaded.missing_keys, *loaded.unexpected_keys]
    if wrong:
        kind = "lacks" if loaded.missing_keys else "holds what the model has no place for:"
        is_its_base = told in (source.given, source.hub_id, source.location)
        hint = f"model_name_or_path={told or 'its own base'}"
        raise ConfigError(
            f"adapter_name_or_path: {given} does not fit {source.given}: its file {kind} "
            f"{wrong[0]} ({len(wrong)} in all)\n"
            f"hint: {'the file is not as peft wrote it: save it again' if is_its_base else hint}"
        )
    set_base(wrapped, source)
    return wrapped  # type: ignore[no-any-return, unused-ignore]


def _require_numbers(path: Path) -> None:
    """Raise ConfigError for a torn file, and for whole numbers, which peft would put in place."""
    tensors = read_header(path).values()
    whole = (t for t in tensors if ".lora_" in t.name and not t.dtype.is_floating_point)
    found = next(whole, None)
    if found is not None:
        raise ConfigError(
            f"weights that are no floating point numbers: {path}: {found.name} is "
            f"{str(found.dtype).removeprefix('torch.')}\nhint: save the adapter again with peft"
        )


def _settings(folder: Path, given: str, *, is_packed: bool) -> LoraConfig:
    fields = read_json(folder / _CONFIG, _LARGEST_CONFIG, pairs=dict)
    kind = fields.get("peft_type") if isinstance(fields, dict) else None
    if kind != "LORA":
        raise ConfigError(
            f"adapter_name_or_path: not a LoRA adapter: {given}: {kind}\n"
            "hint: give a LoRA adapter (DoRA and rsLoRA are kinds of it)"
        )
    named = next((key for key in _ELSEWHERE if fields.get(key)), None)
    if named is not None:
        raise ConfigError(
            f"adapter_name_or_path: its config names code of its own: {given}: {named}\n"
            f"hint: take {named} out of {_CONFIG}"
        )
    against = why_not_loaded(fields)
    if against is not None:
        raise ConfigError(f"adapter_name_or_path: {given}: {against}")
    start = fields.get("init_lora_weights")
    if is_packed and (fields.get("use_dora") or str(start).lower().startswith(_READS_BASE)):
        what = "use_dora" if fields.get("use_dora") else f"init_lora_weights: {start}"
        raise ConfigError(
            f"adapter_name_or_path: {what} takes the base weights apart, and qlora packs them: "
            f"{given}\nhint: finetuning_type=lora"
        )
    try:
        with quiet_peft():
            lora = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"adapter_name_or_path: its {_CONFIG} cannot be read: {given}: {error}\n"
            "hint: pip install -U peft"
        ) from error
    lora.inference_mode = False
    # Where no task was said peft writes a module and a class to import in its place; here none is.
    lora.auto_mapping = None
    lora.task_type = lora.task_type or "CAUSAL_LM"
    return lora  # type: ignore[no-any-return, unused-ignore]


def _why_not(given: str, source: ModelSource, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    sizes = next((line for line in lines if "size mismatch" in line or "mismatch" in line), None)
    reason = sizes or (lines[0] if lines else type(error).__name__)
    return (
        f"adapter_name_or_path: {given} does not fit {source.given}: {reason}\n"
        "hint: model_name_or_path must be the model that the adapter was trained on"
    )
