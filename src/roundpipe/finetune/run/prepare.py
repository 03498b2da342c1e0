"""Everything a run needs before its first step, in the order in which mistakes are cheapest."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.device.host_memory import host_memory
from roundpipe.device.resolve import resolve_devices
from roundpipe.device.survey import Place, survey_devices
from roundpipe.errors import ConfigError
from roundpipe.finetune.data.dataset import Dataset, load_dataset, marked_sample
from roundpipe.finetune.forecast.forecast import check_host, job_of
from roundpipe.finetune.forecast.wish import Wish, method_of
from roundpipe.finetune.model.adapters import (
    ParameterCounts,
    add_adapter,
    count_parameters,
    refuse_packed,
    short_count,
)
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.from_transformers import DTYPES, load_tokenizer
from roundpipe.finetune.model.source import ModelSource, locate_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from roundpipe.device.api import Device
    from roundpipe.finetune.model.base_model import BaseModel
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.plan.machine import Machine

logger = logging.getLogger(__name__)

_SMALL = 64  # times a GGUF file: more than its training takes


@dataclass(frozen=True)
class Job:
    """A run that is ready to begin.

    ``model`` is what is trained, ``base`` what it was loaded as; ``pinned_memory_limit``: bytes.
    """

    config: TrainConfig
    source: ModelSource
    devices: Sequence[Device]
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    model: nn.Module
    base: BaseModel
    pinned_memory_limit: int | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether only an adapter is trained and saved."""
        return self.config.finetuning_type != "full"

    @property
    def counts(self) -> ParameterCounts:
        """How many weights there are."""
        return count_parameters(self.model)

    @property
    def pad_token_id(self) -> int:
        """What fills short rows; masked, so that any token will do."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if isinstance(token, int):
                return token
        return 0

    def header(self) -> str:
        """The line that says what is trained on what, with what."""
        config, stats = self.config, self.dataset.stats
        name = "QLoRA" if self.base.is_packed else "LoRA"
        method = f"{name} r={config.lora_r} ({self.counts})"
        if not self.is_adapter:
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


@contextlib.contextmanager
def prepare(
    config: TrainConfig, terminal: Terminal, *, environment: Mapping[str, str] | None = None
) -> Iterator[Job]:
    """Make devices, read tokenizer and data, load the model and put the adapter on it.

    Shows what it does. The devices are closed when the block ends. Raises ConfigError, and
    PlanError where host memory would not hold the run: before a weight is read.
    """
    source = locate_model(config.model_name_or_path)
    devices = resolve_devices(config.devices, environment=environment)
    try:
        with terminal.waiting(f"loading the tokenizer of {source.name}"):
            tokenizer = load_tokenizer(source)
        dataset = _read_data(config, tokenizer, terminal)
        machine = survey_devices(devices, place=Place(folder=Path(config.output_dir)))
        wish = _wish(config, dataset)
        if not _is_small(source, machine):
            with terminal.waiting("counting the model"):
                _check_host(wish, machine, environment or {})
        dtype = job_of(wish, machine).dtype
        base = _load(config, source, DTYPES[dtype], terminal)
        model = base.model
        if config.finetuning_type != "full":
            model = add_adapter(model, config, source, seed=config.seed)
            if base.is_packed:
                refuse_packed(model)
        job = Job(
            config=config,
            source=source,
            devices=devices,
            tokenizer=tokenizer,
            dataset=dataset,
            model=model,
            base=base,
            pinned_memory_limit=_bytes_of(config.pinned_memory_limit, machine),
        )
        terminal.line(job.header())
        for line in dataset.describe()[1:]:  # the header has the first
            terminal.line(line)
        terminal.line(f"sample: {marked_sample(dataset.samples[0], tokenizer)}    ▌trained▐")
        yield job
    finally:
        for device in devices:
            device.close()


def _read_data(config: TrainConfig, tokenizer: Any, terminal: Terminal) -> Dataset:
    with terminal.waiting("reading the data"):
        return load_dataset(config, tokenizer)


def _wish(config: TrainConfig, dataset: Dataset) -> Wish:
    """What a plan of this run would be asked: no sample is longer than the longest there is."""
    longest = max(len(sample.input_ids) for sample in dataset.samples)
    length = max(2, min(config.max_length, longest))
    return Wish(
        config=config.model_copy(update={"max_length": length}),
        method=method_of(config.finetuning_type, config),
    )


def _is_small(source: ModelSource, machine: Machine) -> bool:
    """Whether a GGUF file is small: to read its config alone takes seconds.

    A weight has half a byte there at least, and takes 18 in training at most.
    """
    if source.gguf_file is None:
        return False
    file = Path(source.location, source.gguf_file)
    return file.stat().st_size * _SMALL < machine.host.memory_bytes


def _check_host(wish: Wish, machine: Machine, environment: Mapping[str, str]) -> None:
    """Raise PlanError if host memory would not hold the run; a model that cannot be counted may."""
    if host_memory() is None and wish.config.host_memory_limit is None:
        return  # nobody knows how much there is
    try:
        check_host(wish, machine, environment=environment)
    except ConfigError as error:
        logger.info("host memory is not checked beforehand: %s", str(error).partition("\n")[0])


def _load(
    config: TrainConfig, source: ModelSource, dtype: torch.dtype, terminal: Terminal
) -> BaseModel:
    what = f"loading {source.name}"
    if source.gguf_file is not None:
        what = f"unpacking {source.name} from GGUF"
    with terminal.waiting(what):
        return load_base(
            source,
            config.finetuning_type,
            dtype=dtype,
            attn_implementation=config.attn_implementation,
        )


def _bytes_of(limit: float | None, machine: Machine) -> int | None:
    """A limit in bytes; a share is of the host memory that is free."""
    if limit is None:
        return None
    return int(limit * machine.host.memory_bytes if limit <= 1 else limit)
