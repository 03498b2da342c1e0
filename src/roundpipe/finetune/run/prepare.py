"""Everything a run needs before its first step, in the order in which mistakes are cheapest."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.device.accumulation import fp16_accumulation
from roundpipe.device.host_memory import host_memory
from roundpipe.device.resolve import resolve_devices
from roundpipe.device.survey import Place, survey_devices
from roundpipe.errors import ConfigError
from roundpipe.finetune.data.dataset import Dataset, load_dataset, marked_sample
from roundpipe.finetune.data.order import Order
from roundpipe.finetune.data.samples import Sample
from roundpipe.finetune.forecast.forecast import check_host, job_of
from roundpipe.finetune.forecast.wish import Wish, limit_bytes, method_of
from roundpipe.finetune.model.adapters import ParameterCounts, count_parameters, short_count
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.fingerprint import fingerprint
from roundpipe.finetune.model.from_transformers import DTYPES, load_tokenizer
from roundpipe.finetune.model.hub import fetch, fetch_weights
from roundpipe.finetune.model.methods import prepare_method
from roundpipe.finetune.model.positions import check_lengths
from roundpipe.finetune.model.source import ModelSource, locate_model
from roundpipe.finetune.model.started import adapter_folder
from roundpipe.finetune.model.vocabulary import pad_token_of, require_rows
from roundpipe.finetune.output.result_files import tokenizer_bytes
from roundpipe.finetune.run.batches import Rows
from roundpipe.finetune.run.content import Content, data_digest
from roundpipe.finetune.run.loggers import require_loggers
from roundpipe.finetune.run.room import Room, require_room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from roundpipe.device.api import Device
    from roundpipe.finetune.model.base_model import BaseModel
    from roundpipe.finetune.output.earlier import Earlier
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.run.batches import Batches
    from roundpipe.finetune.run.own_loss import OwnLoss
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.plan.machine import Machine

logger = logging.getLogger(__name__)

_SMALL = 64  # times a GGUF file: more than its training takes


@dataclass(frozen=True)
class Job:
    """A run that is ready to begin.

    ``model`` is what is trained, ``base`` what it was loaded as; ``order``: which samples each step
    takes; ``content``: digests of what it works on; ``batches``: how samples become tensors;
    ``loss``: in place of the model's own; ``pinned_memory_limit``: bytes.
    """

    config: TrainConfig
    source: ModelSource
    devices: Sequence[Device]
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    order: Order
    model: nn.Module
    base: BaseModel
    content: Mapping[str, str | None]
    environment: Mapping[str, str]
    batches: Batches
    pinned_memory_limit: int | None = None
    loss: OwnLoss | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether only an adapter is trained and saved."""
        return self.config.finetuning_type in ("lora", "qlora")

    @property
    def counts(self) -> ParameterCounts:
        """How many weights there are."""
        return count_parameters(self.model)

    @property
    def pad_token_id(self) -> int:
        """What fills short rows."""
        return pad_token_of(self.tokenizer, self.model)

    @property
    def base_folder(self) -> Path | None:
        """Where the files of the base model lie, if that is known."""
        folder = Path(self.base.folder or self.source.location)
        return folder if folder.is_dir() else None

    def header(self) -> str:
        """The line that says what is trained on what, with what."""
        config, stats = self.config, self.dataset.stats
        name = "QLoRA" if self.base.is_packed else "LoRA"
        if self.is_adapter:  # its own rank, which an adapter that was started from brings along
            rank = getattr(self.model, "peft_config")["default"].r  # noqa: B009, of peft alone
            method = f"{name} r={rank} ({self.counts})"
        elif config.finetuning_type == "freeze":
            method = f"part of the weights ({self.counts})"
        else:
            method = f"full fine-tuning ({short_count(self.counts.total)})"
        kinds = Counter(device.torch_device.type for device in self.devices)
        return " · ".join(
            (
                self.source.name,
                method,
                f"{stats.samples:,} samples, {stats.tokens:,} tokens, "
                f"{stats.trained_share * 100:.0f} % trained",
                " + ".join(f"{count} \u00d7 {kind}" for kind, count in kinds.items()),
            )
        )


@dataclass(frozen=True)
class Read:
    """Data that is ready, and the config as it is with it. ``batches`` None: as usual."""

    config: TrainConfig
    dataset: Dataset
    order: Order
    batches: Batches | None = None


@dataclass(frozen=True)
class Loaded:
    """A model that is there already. ``digest``: of its content; ``is_ready``: what of it is
    trained is settled; ``devices``: it is on them."""

    base: BaseModel
    source: ModelSource
    digest: str
    is_ready: bool = False
    devices: Sequence[Device] | None = None


@dataclass(frozen=True)
class Given:
    """What whoever starts a run has in place of what its config names; None: nothing.

    ``data`` is called with config, tokenizer and what `load_dataset` calls counting. ``lora``: the
    adapter's settings, of peft.
    """

    tokenizer: Any = None
    data: Callable[[TrainConfig, Any, Any], Read] | None = None
    model: Loaded | None = None
    lora: LoraConfig | None = None
    loss: OwnLoss | None = None


@contextlib.contextmanager
def prepare(
    config: TrainConfig,
    terminal: Terminal,
    *,
    environment: Mapping[str, str] | None = None,
    earlier: Earlier | None = None,
    given: Given = Given(),
) -> Iterator[Job]:
    """Make devices, read tokenizer and data, load the model and say what of it is trained.

    Shows what it does. The devices are closed when the block ends. ``earlier``: the run that is
    gone on with, if any. Raises ConfigError, also where base or data are others than its, and
    PlanError where memory or disk would not hold the run.
    """
    environment = environment or {}
    require_loggers(config)
    content = Content.of(earlier, terminal.line)
    loaded = given.model
    source = locate_model(config.model_name_or_path) if loaded is None else loaded.source
    with contextlib.ExitStack() as parts:
        devices = _devices(config, loaded, environment, parts)
        if loaded is None:
            source = fetch(source, terminal)
        if config.adapter_name_or_path is not None:
            adapter_folder(config.adapter_name_or_path)
        tokenizer = given.tokenizer or _tokenizer(source, terminal)
        folder = Path(config.output_dir).expanduser()
        read = (given.data or _reader(environment, folder))(config, tokenizer, terminal.counting)
        config = read.config
        content.note("data", data_digest(read.dataset))
        machine = survey_devices(devices, place=Place(folder=folder))
        if loaded is None:
            base = _base(config, read.order, source, machine, terminal, environment)
            loaded = Loaded(base, source, fingerprint(source))
        base = loaded.base
        content.note("base", loaded.digest)
        if config.fp16_accumulation:
            parts.enter_context(fp16_accumulation(devices, _dtype(base.model)))
        _check_data(base, source, tokenizer, read.dataset, terminal)
        model = _ready(loaded, config, tokenizer, terminal, lora=given.lora)
        require_room(Room.of(model, config, beside=tokenizer_bytes(tokenizer)), config, folder)
        job = Job(
            config,
            source,
            devices,
            tokenizer,
            read.dataset,
            read.order,
            model,
            base,
            {**content.found, "commit": source.commit},
            environment,
            read.batches or Rows(pad_token_of(tokenizer, model), config.packing),
            pinned_memory_limit=limit_bytes(config.pinned_memory_limit, machine),
            loss=given.loss,
        )
        _show(job, terminal)
        yield job


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _devices(
    config: TrainConfig,
    loaded: Loaded | None,
    environment: Mapping[str, str],
    parts: contextlib.ExitStack,
) -> Sequence[Device]:
    """The devices that a model is on already, or new ones, closed with ``parts``."""
    if loaded is not None and loaded.devices is not None:
        return loaded.devices
    devices = resolve_devices(config.devices, environment=environment)
    for device in devices:
        parts.callback(device.close)
    return devices


def _tokenizer(source: ModelSource, terminal: Terminal) -> PreTrainedTokenizerBase:
    with terminal.waiting(f"loading the tokenizer of {source.name}"):
        return load_tokenizer(source)


def _reader(
    environment: Mapping[str, str], folder: Path
) -> Callable[[TrainConfig, Any, Any], Read]:
    """Reads the data that a config names."""

    def read(config: TrainConfig, tokenizer: Any, counting: Any) -> Read:
        dataset = load_dataset(
            config, tokenizer, counting=counting, environment=environment, folder=folder
        )
        return Read(config, dataset, Order.of(config, dataset))

    return read


def _base(
    config: TrainConfig,
    order: Order,
    source: ModelSource,
    machine: Machine,
    terminal: Terminal,
    environment: Mapping[str, str],
) -> BaseModel:
    """Load the base model, if memory and disk will hold the run."""
    folder = Path(config.output_dir).expanduser()
    wish = _wish(config, order)
    dtype = DTYPES[job_of(wish, machine).dtype]
    if not _is_small(source, machine):
        with terminal.waiting("counting the model"):
            _check_counted(wish, machine, environment, folder)
    fetch_weights(source, terminal)
    return _load(config, source, dtype, terminal)


def _show(job: Job, terminal: Terminal) -> None:
    """The header, what is to be known of the data, and one sample."""
    terminal.line(job.header())
    for line in (*job.dataset.describe()[1:], *job.order.describe()):  # the header has the first
        terminal.line(line)
    first = job.dataset.samples[0]
    if isinstance(first, Sample):
        terminal.line(f"sample: {marked_sample(first, job.tokenizer)}    ▌trained▐")


def _wish(config: TrainConfig, order: Order) -> Wish:
    """What a plan of this run would be asked: no row is longer than the longest there is."""
    length = max(2, min(config.max_length, order.longest))
    return Wish(
        config=config.model_copy(update={"max_length": length}),
        method=method_of(config.finetuning_type, config),
    )


def _lengths(dataset: Dataset) -> NDArray[np.int64]:
    """Tokens of each sample that the model will see."""
    return np.concatenate([dataset.samples.lengths, dataset.eval_samples.lengths])


def _is_small(source: ModelSource, machine: Machine) -> bool:
    """Whether a GGUF file is small: to read its config alone takes seconds.

    A weight has half a byte there at least, and takes 18 in training at most.
    """
    if source.gguf_file is None:
        return False
    file = Path(source.location, source.gguf_file)
    return file.stat().st_size * _SMALL < machine.host.memory_bytes


def _check_counted(
    wish: Wish, machine: Machine, environment: Mapping[str, str], folder: Path
) -> None:
    """Raise PlanError if host memory or the disk would not hold the run, before it is loaded.

    A model that cannot be counted may go on: what it takes of the disk is known when it is here.
    """
    if host_memory() is None and wish.config.host_memory_limit is None:
        return  # nobody knows how much there is
    try:
        case = check_host(wish, machine, environment=environment)
    except ConfigError as error:
        logger.info("host memory is not checked beforehand: %s", str(error).partition("\n")[0])
        return
    _, disk = case.disk(wish.config.save_total_limit)
    require_room(Room(disk.result, disk.checkpoint - disk.result), wish.config, folder)


def _load(
    config: TrainConfig, source: ModelSource, dtype: torch.dtype, terminal: Terminal
) -> BaseModel:
    return load_base(
        source,
        config.finetuning_type,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        terminal=terminal,
    )


def _check_data(
    base: BaseModel,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    terminal: Terminal,
) -> None:
    """Raise ConfigError for data that the model cannot read."""
    check_lengths(base.model, _lengths(dataset), terminal.line)
    if isinstance(dataset.samples[0], Sample):
        samples = itertools.chain(dataset.samples, dataset.eval_samples)
        require_rows(base.model, tokenizer, samples, source)


def _ready(
    loaded: Loaded,
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    terminal: Terminal,
    *,
    lora: LoraConfig | None,
) -> nn.Module:
    """What is trained of a model. Raises ConfigError where nothing can be."""
    base = loaded.base
    _end_at(base.model, tokenizer.eos_token_id)
    if loaded.is_ready:
        return base.model  # type: ignore[no-any-return]
    return prepare_method(base, config, loaded.source, say=terminal.line, lora=lora)


def _end_at(model: nn.Module, token: int | None) -> None:
    """Let generation end at the tokenizer's end token too: the result is saved with what says so.

    Texts are trained with that token behind them.
    """
    settings: Any = getattr(model, "generation_config", None)
    if settings is None or token is None:
        return
    ends = settings.eos_token_id
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token not in listed:
        settings.eos_token_id = [*listed, token]
