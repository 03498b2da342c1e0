"""A model that a Trainer is given: wrapped or not, with or without an adapter."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.base_model import BaseModel
from roundpipe.finetune.model.from_transformers import DTYPES
from roundpipe.finetune.model.source import ModelSource, locate_model
from roundpipe.finetune.run.prepare import Loaded
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.finetune.settings.config import TrainConfig

_SAMPLES = 64  # of each weight


def model_given(model: Any) -> Any:
    """A model, or its name or folder as a text. Raises ConfigError for what is neither."""
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if isinstance(model, str | nn.Module):
        return model
    raise ConfigError(
        f"model is a {type(model).__name__}"
        "\nhint: model=FOLDER or a hub id, a model of transformers, or a RoundPipe"
    )


def loaded(
    model: nn.Module | RoundPipe,
    config: TrainConfig,
    say: Callable[[str], None],
    *,
    is_ready: bool,
) -> Loaded:
    """Take a model as it is, in the dtype that ``config`` asks for.

    ``is_ready``: what of it is trained is what wants a gradient.

    A `RoundPipe` stays on its devices and in its dtype. Raises ConfigError for a model that is
    quantised by another library, that lies on a device, or has nothing to train.
    """
    inner: Any = model.model if isinstance(model, RoundPipe) else model
    if isinstance(model, RoundPipe):
        devices = model.planner.devices
    else:
        devices = None
        _refuse(inner)
        _cast(inner, config, say)
    if is_ready and not any(p.requires_grad for p in inner.parameters()):
        raise ConfigError(
            "nothing would be trained: every weight of the model is frozen\n"
            "hint: peft_config=LoraConfig(…), or model.requires_grad_(True)"
        )
    return Loaded(
        BaseModel(inner),
        source_of(inner),
        digest_of(inner),
        is_ready=is_ready,
        devices=devices,
    )


def method_of(model: nn.Module) -> str:
    """The ``finetuning_type`` that a model is trained by, as it is."""
    if getattr(model, "peft_config", None):
        return "lora"
    return "full" if all(p.requires_grad for p in model.parameters()) else "freeze"


def source_of(model: Any) -> ModelSource:
    """Where a model says that it came from, as far as it can be told."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    if name:
        try:
            return locate_model(name)
        except ConfigError:  # a folder that is gone
            return ModelSource(given=name, location=name)
    kind = type(model).__name__
    return ModelSource(given=kind, location=kind)


def digest_of(model: nn.Module) -> str:
    """Sum up the weights of a model: names, shapes, dtypes and some values of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // _SAMPLES)
        digest.update(flat[::step].to(torch.float64).numpy().tobytes())
    return digest.hexdigest()


def num_matrix_weights(model: Any) -> int:
    """Weights that each token is multiplied with: all but the table of embeddings."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return int(total - model.get_input_embeddings().weight.numel())


def _refuse(model: Any) -> None:
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        raise ConfigError(
            "the model is quantised by another library already\n"
            "hint: model=NAME with quantization_config=BitsAndBytesConfig(load_in_4bit=True), "
            "or args={'load_in_4bit': True}"
        )
    away = next((p for p in model.parameters() if p.device.type != "cpu"), None)
    if away is not None:
        where = away.device
        raise ConfigError(
            f"the model is on {where}: its weights must be in host memory\n"
            "hint: load it without device_map, or model.to('cpu') before"
        )


def _cast(model: nn.Module, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Have the model in the dtype that is asked for; masters are fp32 in every case."""
    wanted = DTYPES.get(config.dtype)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    if wanted is None or all(p.dtype is wanted for p in floating):
        return
    before = floating[0].dtype
    model.to(wanted)
    say(f"the model's weights are {config.dtype} now, as args say ({before} before); masters: fp32")
