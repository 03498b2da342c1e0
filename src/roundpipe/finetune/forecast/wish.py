"""What `roundpipe plan` is asked: the keys of `roundpipe train`, judged as training judges them.

Model and data may be missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.account import is_empty
from roundpipe.finetune.settings.config import make_config, read_layers
from roundpipe.finetune.settings.translate import unfolded
from roundpipe.models.estimate.method import Lora, Method

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roundpipe.finetune.settings.account import Became
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.plan.machine import Machine

_PLACEHOLDER = "-"  # for a model or a dataset that is not given


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be planned.

    ``keys``: what each key that was given became; ``beyond``: notes that say more than these.
    """

    config: TrainConfig
    method: Method = field(default_factory=Method)
    has_model: bool = True
    has_dataset: bool = True
    given: frozenset[str] = frozenset()  # fields that were said
    notes: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    keys: tuple[Became, ...] = ()

    @property
    def model(self) -> str:
        """As it was given."""
        return self.config.model_name_or_path

    @property
    def fp16_accumulation(self) -> bool:
        """Whether products of fp16 are summed in fp16."""
        return self.config.fp16_accumulation

    @property
    def kept(self) -> int | None:
        """Checkpoints that stay on the disk; None: all that are made."""
        if self.config.save_strategy == "no":
            return 0
        limit = self.config.save_total_limit
        return None if limit is None else limit + int(self.config.load_best_model_at_end)

    @property
    def schedule(self) -> str:
        """What the schedule may be."""
        return self.config.schedule


def read_wish(
    file: Mapping[str, Any], command_line: Mapping[str, Any], count_devices: Callable[[Any], int]
) -> Wish:
    """The wish of a config file's keys and those of the command line, which win.

    ``count_devices`` is asked where a batch is given per device. Raises ConfigError.
    """
    missing = {
        target: _PLACEHOLDER
        for target in ("model_name_or_path", "dataset")
        if not any(_has(layer, target) for layer in (file, command_line))
    }
    reading = read_layers(file, {**missing, **command_line}, count_devices)
    config = reading.config
    return Wish(
        config=config,
        method=method_of(config.finetuning_type, config),
        has_model="model_name_or_path" not in missing,
        has_dataset="dataset" not in missing,
        given=frozenset(config.model_fields_set) - missing.keys(),
        notes=tuple(reading.notes),
        beyond=tuple(reading.beyond),
        keys=tuple(each for each in reading.keys if each.key not in missing),
    )


def method_of(name: str, config: TrainConfig) -> Method:
    """The method of an estimate; raises ConfigError for one that cannot be."""
    lora = Lora(
        r=config.lora_r,
        target_modules=config.target_modules,
        modules_to_save=config.modules_to_save or (),
        target_parameters=tuple(
            config.target_parameters or (config.peft or {}).get("target_parameters") or ()
        ),
    )
    # The adapter's settings say nothing without one, and would hide what is known of a model.
    return Method(
        name=name,  # type: ignore[arg-type]  # Method checks it
        lora=lora if name in ("lora", "qlora") else Lora(),
        unfrozen=config.unfrozen_parameters or (),
    )


def trains_today(**values: Any) -> bool:
    """Whether training accepts these keys: a hint that it refuses would be none."""
    try:
        make_config({"model": _PLACEHOLDER, "dataset": _PLACEHOLDER, **values})
    except ConfigError:  # whatever is wrong with them
        return False
    return True


def _has(layer: Mapping[str, Any], target: str) -> bool:
    """Whether a layer says anything of the model, or of the dataset, under whatever name."""
    return any(
        target in (keys.ALIASES.get(key, key), *keys.DERIVED.get(key, ())) and not is_empty(value)
        for key, value in unfolded(layer).items()
    )


def dtype_of(config: TrainConfig, machine: Machine) -> str:
    """What devices compute in: as said, else fp32 where a CPU takes part, else bf16, else fp16."""
    if config.dtype != "auto":
        return config.dtype
    if any(card.in_host for card in machine.cards):
        return "fp32"
    if config.fp16_accumulation or any("bf16" not in card.flops for card in machine.cards):
        return "fp16"
    return "bf16"


def limit_bytes(limit: float | None, machine: Machine) -> int | None:
    """A limit of host memory in bytes, None without one; up to 1 it is a share of what is free."""
    if limit is None:
        return None
    return int(limit * machine.host.memory_bytes if limit <= 1 else limit)
