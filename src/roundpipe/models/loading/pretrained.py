"""A causal LM from its files, ready to be trained: in memory or mapped, under adapters or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from roundpipe.errors import ConfigError
from roundpipe.models.loading.load import open_causal_lm

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftConfig

    from roundpipe.models.loading.fill import Progress
    from roundpipe.models.loading.load import LoadedModel


def load_pretrained(  # noqa: PLR0913 - what RoundPipe.from_pretrained is told
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | str,
    quantization: Literal["nf4"] | None,
    peft_config: PeftConfig | None,
    mapped: bool | str,
    cache_folder: Path | None,
    attn_implementation: str | None,
    revision: str | None,
    progress: Progress | None,
) -> LoadedModel:
    """Read a model as ``RoundPipe.from_pretrained`` describes it, in training mode.

    Weights are on the CPU, whatever the caller's default device is. With ``peft_config`` they are
    frozen and adapters are added. Blocks on the disk. Raises ConfigError before anything is read
    for what cannot be meant together.
    """
    if mapped not in (True, False, "auto"):
        raise ConfigError(f"mapped must be True, False or 'auto': {mapped!r}")
    if quantization is not None:
        _require_whole_base(peft_config)
    is_frozen = peft_config is not None
    if mapped is True and not is_frozen:
        raise ConfigError(
            "mapped weights cannot be trained: mapped=True\nhint: peft_config=LoraConfig(…)"
        )
    with torch.device("cpu"):
        opened = open_causal_lm(
            name_or_path,
            dtype=dtype,
            quantization=quantization,
            attn_implementation=attn_implementation,
            revision=revision,
        )
        if mapped is True or (mapped == "auto" and is_frozen and not opened.fits_memory):
            loaded = opened.load_mapped(cache_folder=cache_folder, progress=progress)
        else:
            loaded = opened.load(progress=progress)
        loaded.model.train()
        if peft_config is not None:
            from peft import get_peft_model  # noqa: PLC0415 (takes seconds)

            loaded.model = get_peft_model(loaded.model, peft_config)
    return loaded


def _require_whole_base(peft_config: Any) -> None:
    """Raise ConfigError for adapters that begin with the values of weights that are packed."""
    start = getattr(peft_config, "init_lora_weights", True)
    takes_apart = isinstance(start, str) and start not in ("gaussian", "orthogonal")
    if takes_apart or getattr(peft_config, "use_dora", False):
        what = f"init_lora_weights={start!r}" if takes_apart else "use_dora=True"
        raise ConfigError(
            f"adapters that take the base weights apart cannot start from 4-bit ones: {what}\n"
            "hint: leave it out, or quantization=None"
        )
