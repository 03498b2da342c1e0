"""In how many digits a model is run and saved: as it was trained, and as its files hold it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roundpipe.device.host_memory import host_memory
from roundpipe.finetune.model.from_transformers import DTYPES
from roundpipe.finetune.use.opened import dtype_on
from roundpipe.models.loading.distrust import config_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.device.api import Device
    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.subject import Subject

SHARE_OF_MEMORY = 0.7  # of what is free, that weights may take
_BY_TORCH_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def live_dtype(subject: Subject, settings: TrainConfig, devices: Sequence[Device]) -> torch.dtype:
    """As it was trained, unless memory has no room for more digits than the files hold."""
    dtype, stored = dtype_on(devices, settings), stored_dtype(subject.source)
    memory = host_memory()
    if settings.dtype == "auto" and memory is not None and stored.itemsize < dtype.itemsize:
        needs = _stored_bytes(subject.source) * dtype.itemsize // stored.itemsize
        if needs > SHARE_OF_MEMORY * memory.free_bytes:
            return stored
    return dtype


def stored_dtype(source: ModelSource) -> torch.dtype:
    """What the files of a base hold, as their config says; bf16 for those of a GGUF file."""
    if source.gguf_file is not None or not source.is_here:
        return torch.bfloat16
    fields = config_fields(Path(source.location))
    inner = fields.get("text_config")
    for told in (fields, inner if isinstance(inner, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            name = str(told.get(key)).removeprefix("torch.")
            if name in _BY_TORCH_NAME:
                return _BY_TORCH_NAME[name]
    return torch.float32


def _stored_bytes(source: ModelSource) -> int:
    """Bytes of the weight files of a base, here or still on the hub; 0 where nobody knows."""
    if source.snapshot is not None:
        return sum(source.snapshot.sizes.get(name, 0) for name in source.snapshot.weights)
    if not source.is_here or source.gguf_file is not None:
        return 0
    return sum(path.stat().st_size for path in Path(source.location).glob("model*.safetensors"))
