"""Everything a run needs before its first step, in the order in which mistakes are cheapest."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.device.resolve import resolve_devices
from roundpipe.finetune.adapters import ParameterCounts, add_adapter, count_parameters, short_count
from roundpipe.finetune.data import Dataset, load_dataset, marked_sample
from roundpipe.finetune.model import DTYPES, load_model, load_tokenizer
from roundpipe.finetune.source import ModelSource, locate_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from roundpipe.device.api import Device
    from roundpipe.finetune.config import TrainConfig
    from roundpipe.finetune.terminal import Terminal


@dataclass(frozen=True)
class Job:
    """A run that is ready to begin."""

    config: TrainConfig
    source: ModelSource
    devices: Sequence[Device]
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    model: nn.Module
    counts: ParameterCounts

    @property
    def is_adapter(self) -> bool:
        """Whether only an adapter is trained and saved."""
        return self.config.finetuning_type == "lora"

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
        method = f"LoRA r={config.lora_r} ({self.counts})"
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

    Shows what it does. The devices are closed when the block ends. Raises ConfigError.
    """
    source = locate_model(config.model_name_or_path)
    devices = resolve_devices(config.devices, environment=environment)
    try:
        with terminal.waiting(f"loading the tokenizer of {source.name}"):
            tokenizer = load_tokenizer(source)
        dataset = _read_data(config, tokenizer, terminal)
        model = _load(config, source, devices, terminal)
        if config.finetuning_type == "lora":
            model = add_adapter(model, config, source, seed=config.seed)
        job = Job(
            config=config,
            source=source,
            devices=devices,
            tokenizer=tokenizer,
            dataset=dataset,
            model=model,
            counts=count_parameters(model),
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


def _load(
    config: TrainConfig, source: ModelSource, devices: Sequence[Device], terminal: Terminal
) -> Any:
    what = f"loading {source.name}"
    if source.gguf_file is not None:
        what = f"unpacking {source.name} from GGUF"
    with terminal.waiting(what):
        return load_model(
            source,
            dtype=DTYPES[_dtype_name(config, devices)],
            attn_implementation=config.attn_implementation,
        )


def _dtype_name(config: TrainConfig, devices: Sequence[Device]) -> str:
    """bf16 on cards, fp32 where a CPU takes part, unless the config says it."""
    if config.dtype != "auto":
        return config.dtype
    on_cpu = any(device.torch_device.type == "cpu" for device in devices)
    return "fp32" if on_cpu else "bf16"
