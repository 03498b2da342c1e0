"""What `roundpipe plan` is asked: the keys of `roundpipe train`, and what only a plan knows as yet.

Model and data may be missing. A key or word that training does not know yet (``freeze``,
``fp16_accumulation``) is planned all the same where it matters for memory or speed, and left aside
where it does not; both are said. Everything else is judged as training judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.config import layered_config, make_config
from roundpipe.finetune.settings.translate import KNOWN
from roundpipe.finetune.settings.words import is_empty, text_of
from roundpipe.models.estimate.method import Lora, Method

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.models.estimate.method import MethodName

_METHODS = ("freeze",)  # that training does not have yet
_PLACEHOLDER = "-"  # for a model or a dataset that is not given


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be planned. ``later``: what of it training would refuse today."""

    config: TrainConfig
    method: Method = field(default_factory=Method)
    has_model: bool = True
    has_dataset: bool = True
    fp16_accumulation: bool = False
    save_total_limit: int | None = None
    given: frozenset[str] = frozenset()  # fields that were said
    notes: tuple[str, ...] = ()
    later: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """As it was given."""
        return self.config.model_name_or_path

    def with_config(self, **changes: Any) -> Wish:
        """The same with other fields of the config."""
        return replace(self, config=self.config.model_copy(update=changes))

    @property
    def schedule(self) -> str:
        """What the schedule may be."""
        return self.config.schedule

    def with_method(self, name: MethodName) -> Wish:
        """The same trained by another method."""
        return replace(self, method=method_of(name, self.config))


def read_wish(
    file: Mapping[str, Any], command_line: Mapping[str, Any], count_devices: Callable[[Any], int]
) -> Wish:
    """The wish of a config file's keys and those of the command line, which win.

    ``count_devices`` is asked where a batch is given per device. Raises ConfigError.
    """
    said = frozenset(target for key in command_line for target in _targets(key))
    layers = [_Layer(file, silenced=said), _Layer(command_line)]
    plain = [layer.plain() for layer in layers]
    taken = {**layers[0].taken, **layers[1].taken}
    for target, value in (("model_name_or_path", _PLACEHOLDER), ("dataset", _PLACEHOLDER)):
        if not any(_has(layer, target) for layer in plain):
            plain[0][target] = value
    config, notes = layered_config(plain[0], plain[1], count_devices)
    name = taken.get("finetuning_type", config.finetuning_type)
    unfrozen = taken.get("unfrozen_parameters") or ()
    return Wish(
        config=config,
        method=method_of(name, config, unfrozen=_names(unfrozen)),
        has_model=config.model_name_or_path != _PLACEHOLDER,
        has_dataset=config.dataset[0].path != _PLACEHOLDER,
        fp16_accumulation=_truth("fp16_accumulation", taken.get("fp16_accumulation", False)),
        save_total_limit=_count("save_total_limit", taken.get("save_total_limit")),
        given=frozenset(keys.ALIASES.get(key, key) for layer in plain for key in layer),
        notes=tuple(notes),
        later=tuple(dict.fromkeys(said for layer in layers for said in layer.said)),
    )


def method_of(name: str, config: TrainConfig, *, unfrozen: tuple[str, ...] = ()) -> Method:
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
        unfrozen=unfrozen,
    )


def trains_today(**values: Any) -> bool:
    """Whether training accepts these keys: a hint that it refuses would be none."""
    try:
        make_config({"model": _PLACEHOLDER, "dataset": _PLACEHOLDER, **values})
    except ConfigError:  # whatever is wrong with them
        return False
    return True


class _Layer:
    """Takes out of one layer of keys what only a plan understands.

    ``silenced``: fields that the command line sets, so that what the file says of them is moot.
    """

    def __init__(self, given: Mapping[str, Any], *, silenced: frozenset[str] = frozenset()) -> None:
        self._given, self._silenced = given, silenced
        self.taken: dict[str, Any] = {}
        self.said: list[str] = []

    def plain(self) -> dict[str, Any]:
        """What is left for training's own rules."""
        return {
            key: value
            for key, value in self._given.items()
            if not self._takes(key, keys.ALIASES.get(key, key), value)
        }

    def _takes(self, key: str, target: str, value: Any) -> bool:
        if key not in KNOWN or key in keys.REFUSED:
            return False
        if target in keys.LATER:
            nothing, _ = keys.LATER[target]
            if not is_empty(value) and value != nothing:
                self._take(target, value, f"{key}: {text_of(value)}")
            return True
        return self._takes_word(key, target, value)

    def _takes_word(self, key: str, target: str, value: Any) -> bool:
        """Words of keys that training has."""
        said = f"{key}: {text_of(value)}"
        if (target == "finetuning_type" or key == "adapter") and value in _METHODS:
            return self._take("finetuning_type", value, said)
        if target in ("report_to", "lr_scheduler_type") and _is_later(target, value):
            return self._take(target, value, said)
        return False

    def _take(self, target: str, value: Any, said: str) -> bool:
        if target not in self._silenced:
            self.taken[target] = value
            self.said.append(said)
        return True


def _is_later(key: str, value: Any) -> bool:
    """Whether training says of this word that it is still to come."""
    try:
        make_config({"model": _PLACEHOLDER, "dataset": _PLACEHOLDER, key: value})
    except ConfigError as problem:
        return str(problem).startswith("not yet")
    return False


def _targets(key: str) -> tuple[str, ...]:
    """The fields that a key sets."""
    name = keys.ALIASES.get(key, key)
    return keys.DERIVED.get(name, (name,)) if name not in keys.LATER else (name,)


def _has(layer: Mapping[str, Any], target: str) -> bool:
    return any(keys.ALIASES.get(key, key) == target and value for key, value in layer.items())


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def _truth(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"neither true nor false: {key}={value}\nhint: {key}=true")
    return value


def _count(key: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"not a number of checkpoints: {key}={value}\nhint: {key}=2")
    return value
