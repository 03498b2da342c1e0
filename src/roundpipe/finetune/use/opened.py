"""A subject on its devices: loaded as it was trained, wrapped, in evaluation mode.

Nothing of it is trained, so nothing has a gradient, a master or a moment; base weights that memory
has no room for are mapped from files. What was trained over 4 bits is opened over 4 bits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.device.accumulation import fp16_accumulation
from roundpipe.device.resolve import resolve_devices
from roundpipe.device.survey import Place, survey_devices
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import ConfigError
from roundpipe.finetune.data.template import use_chat_template, use_special_tokens
from roundpipe.finetune.forecast.wish import dtype_of, limit_bytes
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.fingerprint import fingerprint
from roundpipe.finetune.model.from_transformers import DTYPES, load_tokenizer
from roundpipe.finetune.model.hub import fetch_weights
from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.model.started import start_from
from roundpipe.finetune.use.merged_weights import bare_copy
from roundpipe.finetune.use.subject import of_run
from roundpipe.roundpipe import RoundPipe
from roundpipe.store.frozen import packed_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from roundpipe.device.api import Device
    from roundpipe.finetune.model.base_model import BaseModel
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.subject import Subject
    from roundpipe.plan.machine import Machine
    from roundpipe.store.packed import PackedTensor

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass
class Loaded:
    """A subject in memory, on the host; not wrapped yet.

    ``model``: with its adapter, frozen; ``base``: as it was loaded; ``packed``: the values of
    weights in 4 bits, whose parameters are stand-ins; ``bare``: the base's modules without data, as
    they were before the adapter, if they were asked for.
    """

    subject: Subject
    model: nn.Module
    base: BaseModel
    dtype: torch.dtype
    packed: Mapping[Tensor, PackedTensor] = field(default_factory=dict)
    bare: Any = None


@dataclass
class Opened:
    """A subject on its devices. ``model`` is in evaluation mode; ``dtype``: what it computes in."""

    subject: Subject
    model: RoundPipe
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    is_packed: bool = False
    settings: TrainConfig | None = None
    devices: Sequence[Device] = ()


@contextlib.contextmanager
def open_subject(
    subject: Subject,
    settings: TrainConfig,
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterator[Opened]:
    """Load a subject and have it on the devices of ``settings`` until the block ends.

    Of the settings count: devices, dtype, method (qlora packs the base into 4 bits), attention,
    chat template, limits, schedule and seed. ``tokenizer``: as `open_tokenizer` gave it, if it did
    already. Downloads what is not here yet. Raises ConfigError.
    """
    with contextlib.ExitStack() as parts:
        devices = resolve_devices(settings.devices, environment=environment)
        for device in devices:
            parts.callback(device.close)
        tokenizer = tokenizer or open_tokenizer(subject, settings, terminal)
        dtype = dtype_on(devices, settings)
        if settings.fp16_accumulation:
            parts.enter_context(fp16_accumulation(devices, dtype))
        loaded = load_subject(subject, settings, terminal, dtype=dtype)
        pool = parts.enter_context(make_pool(settings, devices))
        wrapped = parts.enter_context(wrap(loaded, settings, pool))
        yield Opened(subject, wrapped, tokenizer, dtype, loaded.base.is_packed, settings, devices)


def make_pool(settings: TrainConfig, devices: Sequence[Device]) -> DevicePool:
    """The devices with what their limits say; closing it closes them."""
    limit = limit_bytes(settings.pinned_memory_limit, _machine_of(devices))
    return DevicePool(list(devices), pinned_memory_limit=limit)


def wrap(loaded: Loaded, settings: TrainConfig, pool: DevicePool) -> RoundPipe:
    """A loaded subject on devices, in evaluation mode; takes over where its weights lie."""
    bases, loaded.base.bases = loaded.base.bases, []
    wrapped = RoundPipe(
        loaded.model,
        pool=pool,
        schedule=settings.schedule,
        device_memory_limit=settings.device_memory_limit,
        bases=bases,
        seed=settings.seed,
    )
    wrapped.eval()
    return wrapped


def load_subject(
    subject: Subject,
    settings: TrainConfig,
    terminal: Terminal,
    *,
    dtype: torch.dtype,
    is_packed: bool | None = None,
    with_bare: bool = False,
) -> Loaded:
    """Load base and adapter onto the host; blocks on disk and network.

    ``is_packed``: whether the base is packed into 4 bits; None: as ``settings`` say. ``with_bare``:
    keep a copy of the base's modules. Raises ConfigError for files that are broken, and for an
    adapter that does not fit its base.
    """
    if is_packed is None:
        is_packed = settings.finetuning_type == "qlora"
    fetch_weights(subject.source, terminal)
    _check_base(subject)
    base = load_base(
        subject.source,
        "qlora" if is_packed else "lora",
        dtype=dtype,
        attn_implementation=settings.attn_implementation,
        terminal=terminal,
        is_frozen=True,
    )
    model: Any = base.model
    bare = bare_copy(model) if with_bare else None
    if subject.adapter is not None:
        with of_run(subject.given, folder=subject.adapter):
            model = start_from(
                base.model,
                str(subject.adapter),
                subject.source,
                is_packed=base.is_packed,
                say=lambda _: None,
            )
    model.requires_grad_(False)
    return Loaded(subject, model.eval(), base, dtype, packed_in(base.bases), bare)


def open_tokenizer(
    subject: Subject, settings: TrainConfig, terminal: Terminal
) -> PreTrainedTokenizerBase:
    """The tokenizer of the result, else that of its base; with the template of ``settings``."""
    folder = subject.folder
    source = subject.source
    if folder is not None and any((folder / name).is_file() for name in _TOKENIZER_FILES):
        source = ModelSource(given=subject.given, location=str(folder))
    with terminal.waiting(f"loading the tokenizer of {subject.name}"):
        tokenizer = load_tokenizer(source)
    use_special_tokens(tokenizer, settings.special_tokens)
    use_chat_template(tokenizer, settings.chat_template)
    return tokenizer


def dtype_on(devices: Sequence[Device], settings: TrainConfig) -> torch.dtype:
    """What a model computes in on ``devices``: as `roundpipe train` would choose."""
    return DTYPES[dtype_of(settings, _machine_of(devices))]


def _machine_of(devices: Sequence[Device]) -> Machine:
    return survey_devices(devices, place=Place(folder=Path()))


def _check_base(subject: Subject) -> None:
    """Raise ConfigError where the base is not the one that the adapter was trained on."""
    if subject.adapter is None or subject.base_mark is None:
        return
    if fingerprint(subject.source) == subject.base_mark:
        return
    raise ConfigError(
        f"the base is another than {subject.given} was trained on: {subject.source.given}\n"
        f"hint: give back the files it was trained on, or model_name_or_path="
        f"{subject.source.given} says that this one is meant"
    )
