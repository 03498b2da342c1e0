"""How a model is loaded, in the words of ``from_pretrained`` (``SFTConfig.model_init_kwargs``)."""

from __future__ import annotations

from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import text_of

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "auto"}
_NEEDLESS = (
    "device_map",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "trust_remote_code",
    "use_cache",
    "use_kernels",
    "use_safetensors",
)
_OF_THE_ENVIRONMENT = {
    "cache_dir": "HF_HOME",
    "local_files_only": "HF_HUB_OFFLINE=1",
    "token": "HF_TOKEN",
}


def model_values(
    given: dict[str, Any], model_name: str
) -> tuple[dict[str, Any], str | None, list[str]]:
    """Settings, the dtype if one is named, and lines to be said. Raises ConfigError by name.

    No code of a checkpoint is ever run, whatever ``trust_remote_code`` says.
    """
    values: dict[str, Any] = {}
    rest = {key: value for key, value in given.items() if value is not None and value is not False}
    dtype = str(rest.pop("dtype", None) or rest.pop("torch_dtype", None) or "")
    dtype = dtype.removeprefix("torch.")
    if dtype and dtype not in _DTYPES:
        raise ConfigError(
            f"model_init_kwargs: dtype={dtype}\nhint: one of {', '.join(sorted(_DTYPES))}"
        )
    if (revision := rest.pop("revision", None)) not in (None, "main"):
        values["model_name_or_path"] = f"{model_name.partition('@')[0]}@{revision}"
    if (attention := rest.pop("attn_implementation", None)) is not None:
        values["attn_implementation"] = attention
    needless = [name for name in _NEEDLESS if rest.pop(name, None) is not None]
    for name, value in rest.items():
        way_out = (
            f"set {_OF_THE_ENVIRONMENT[name]}"
            if name in _OF_THE_ENVIRONMENT
            else ("model=AutoModelForCausalLM.from_pretrained(…) with it")
        )
        raise ConfigError(
            f"not supported: model_init_kwargs: {name}={text_of(value)}\nhint: {way_out}"
        )
    notes = [f"not needed here: model_init_kwargs: {', '.join(needless)}"] if needless else []
    return values, _DTYPES.get(dtype), notes
