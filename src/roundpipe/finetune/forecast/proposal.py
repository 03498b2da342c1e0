"""A first config for a model and data: values that fit this machine and this data, each with why.

The data is looked into for its lengths, the plan is asked for what fits; nothing is trained or
downloaded. What cannot be found out (a model that is not on this machine, data of the hub) keeps
its default, and its line says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roundpipe.errors import ConfigError, PlanError
from roundpipe.finetune.forecast.forecast import forecast
from roundpipe.finetune.forecast.wish import read_wish
from roundpipe.finetune.settings.config import dump_config, make_config
from roundpipe.plan.amounts import write_bytes
from roundpipe.report.forecast_text import duration_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from roundpipe.finetune.forecast.data import DataSize
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.plan.machine import Machine
    from roundpipe.report.forecast import Forecast

    Waiting = Callable[[str], AbstractContextManager[object]]

_LENGTHS = tuple(2**power for power in range(7, 18))  # 128 and up
_COVERED = 0.99  # of the samples are not cut
_METHODS = ("lora", "qlora")
_EPOCHS = 3
_BATCH = 16
_FEW_STEPS = 50  # of a job: fewer want smaller batches
_LEAST_BATCH = 4
_HELD_OUT = 0.05
_LEAST_HELD_OUT = 10  # samples, fewer tell nothing
_MOST_HELD_OUT = 500  # samples: more only take time
_UNKNOWN_LENGTH = 10**7  # tokens that no sample has


@dataclass(frozen=True)
class Line:
    """One setting and why it is so."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Proposal:
    """Settings by group, and what could not be found out."""

    title: str
    groups: dict[str, list[Line]]
    unknown: list[str] = field(default_factory=list)
    does_not_fit: str = ""


def propose(
    given: Mapping[str, Any],
    machine: Callable[[], Machine],
    *,
    environment: Mapping[str, str],
    waiting: Waiting,
) -> Proposal:
    """Find values for a model and a dataset; ``given`` holds these two and any other key.

    ``machine`` is asked once the data was read. Takes seconds: the data is tokenised where the
    tokenizer is at hand. Raises ConfigError for keys that are wrong and DataError for a file that
    cannot be read.
    """
    said = read_wish({}, given, lambda devices: machine().num_devices).config
    dumped = said.model_dump(mode="json")
    given = {name: dumped[name] for name in said.model_fields_set}
    unknown: list[str] = []
    with waiting("reading the data"):
        data, has_tokens = _measured(given, unknown)
    values = dict(given)
    words = {
        "max_length": _choose_length(values, data, given, has_tokens=has_tokens),
        "batch_size": _choose_batch(values, data, given),
    }
    held_out = _held_out(data, given)
    values |= {line.key: line.value for line in held_out}
    with waiting("choosing what fits"):
        made, values = _fitting(values, machine(), environment, unknown)
    found = _Found(make_config(values)[0], made, data, frozenset(given))
    groups = _groups(found, words, held_out, machine().num_devices)
    there = {line.key for lines in groups.values() for line in lines}
    others = [
        Line(name, given[name], "as given") for name in sorted(given.keys() - there - {"machine"})
    ]
    title = said.model_name_or_path if made is None else made.title
    return Proposal(title, {**groups, "more": others}, unknown, _lacking(made))


@dataclass(frozen=True)
class _Found:
    """The config that is proposed, its plan, its data, and the fields that were given."""

    config: TrainConfig
    made: Forecast | None
    data: DataSize | None
    given: frozenset[str]

    def line(self, key: str, why: str) -> Line:
        """A field's value; what was given needs no other reason."""
        return Line(key, _plain(self.config, key), "as given" if key in self.given else why)


def _groups(
    found: _Found, words: Mapping[str, str], held_out: list[Line], num_devices: int
) -> dict[str, list[Line]]:
    """The lines, those together that belong together."""
    line, config = found.line, found.config
    has_adapter = config.finetuning_type in ("lora", "qlora")
    rate = f"usual for {config.finetuning_type}; the first thing to try others of"
    return {
        "model": [
            Line("model_name_or_path", config.model_name_or_path, "what is trained"),
            line("finetuning_type", _method_words(found)),
            *([line("lora_r", "rank; more for much or unusual data")] if has_adapter else []),
        ],
        "data": [
            Line("dataset", _plain(config, "dataset"), _data_words(found.data)),
            *held_out,
            line("max_length", words["max_length"]),
        ],
        "steps": [
            line("batch_size", words["batch_size"]),
            *_micro_line(found, num_devices),
            line("num_train_epochs", _steps_words(found)),
        ],
        "optimizer": [
            line("learning_rate", rate),
            line("lr_scheduler_type", "how the rate falls"),
            line("warmup_steps", "below 1 a share of all steps"),
        ],
        "output": [
            Line("output_dir", _output_dir(found), "adapter or model, log, checkpoints"),
            line("save_minutes", _save_words(found.made)),
            line("save_total_limit", "older ones are removed"),
            line("seed", "the same command gives the same bits"),
        ],
    }


def _plain(config: TrainConfig, key: str) -> Any:
    """A field as a saved config has it."""
    return yaml.safe_load(dump_config(config))[key]


def _measured(given: Mapping[str, Any], unknown: list[str]) -> tuple[DataSize | None, bool]:
    """The lengths of the data, uncut, and whether they are tokens; None for data not at hand."""
    from roundpipe.finetune.data.files import is_hub_id  # noqa: PLC0415, torch
    from roundpipe.finetune.forecast.data import local_tokenizer, measure_data  # noqa: PLC0415

    config, _ = make_config({**given, "max_length": _UNKNOWN_LENGTH, "packing": False})
    if any(is_hub_id(entry) for entry in config.dataset):
        unknown.append("how long the samples are: the dataset is not on this machine")
        return None, False
    tokenizer = local_tokenizer(config.model_name_or_path)
    if tokenizer is None:
        unknown.append("how many tokens a sample has: guessed by characters, without a tokenizer")
    return measure_data(config, tokenizer), tokenizer is not None


def _choose_length(
    values: dict[str, Any], data: DataSize | None, given: Mapping[str, Any], *, has_tokens: bool
) -> str:
    if "max_length" in given:
        return "tokens of one sample; as given"
    if data is None or not data.lengths:
        values["max_length"] = 2048
        return "tokens of one sample; longer ones are cut"
    longest = data.lengths[-1]
    wanted = data.lengths[min(math.ceil(_COVERED * len(data.lengths)), len(data.lengths)) - 1]
    if not has_tokens:  # characters tell little, and nothing of a chat template
        wanted = 2 * wanted + _LENGTHS[0]
    length = next((each for each in _LENGTHS if each >= wanted), _LENGTHS[-1])
    values["max_length"] = length
    if not has_tokens:
        return "tokens of one sample; longer ones are cut; guessed by characters"
    middle = data.lengths[len(data.lengths) // 2]
    cut = sum(each > length for each in data.lengths)
    share = f"{100 * cut / len(data.lengths):.1f} % are cut" if cut else "none is cut"
    return f"tokens; half of the samples have {middle:,}, the longest {longest:,}: {share}"


def _choose_batch(values: dict[str, Any], data: DataSize | None, given: Mapping[str, Any]) -> str:
    if "batch_size" in given:
        return "samples per optimizer step; as given"
    batch = _BATCH
    if data is not None:
        while batch > _LEAST_BATCH and _EPOCHS * data.samples / batch < _FEW_STEPS:
            batch //= 2
    values["batch_size"] = batch
    few = " (fewer for little data)" if batch < _BATCH else ""
    return f"samples per optimizer step{few}"


def _held_out(data: DataSize | None, given: Mapping[str, Any]) -> list[Line]:
    """How much is held out; nothing where there is too little, or other data for it."""
    if "eval_dataset" in given or "val_size" in given or data is None:
        return []
    if _HELD_OUT * data.samples < _LEAST_HELD_OUT:
        return []
    if _HELD_OUT * data.samples > _MOST_HELD_OUT:
        return [Line("val_size", _MOST_HELD_OUT, "samples held out to evaluate on after an epoch")]
    why = f"held out to evaluate on after an epoch: {round(_HELD_OUT * data.samples)} samples"
    return [Line("val_size", _HELD_OUT, why)]


def _fitting(
    values: dict[str, Any], machine: Machine, environment: Mapping[str, str], unknown: list[str]
) -> tuple[Forecast | None, dict[str, Any]]:
    """The first method whose plan fits; where none does, the one that lacks least."""
    trials = [values]
    if "finetuning_type" not in values:
        trials = [{**values, "finetuning_type": name} for name in _METHODS]
    found: list[tuple[Forecast, dict[str, Any]]] = []
    for trial in trials:
        wish = read_wish({}, trial, lambda devices: machine.num_devices)
        try:
            made = forecast(wish, machine, environment=environment).forecast
        except PlanError:
            continue
        except ConfigError as problem:
            unknown.append(f"whether it fits: {str(problem).partition(chr(10))[0]}")
            break
        found.append((made, trial))
        if made.fits:
            return found[-1]
    if found:
        return min(found, key=lambda pair: _excess(pair[0]))
    return None, {"finetuning_type": "lora", **values}


def _excess(made: Forecast) -> int:
    return sum(max(0, need.needs - (need.has or need.needs)) for need in made.needs)


def _method_words(found: _Found) -> str:
    words = {
        "lora": "a small adapter beside the frozen model; also: qlora, full",
        "qlora": "the frozen model in 4 bits, an adapter beside it",
        "full": "the whole model; also: lora",
        "freeze": "a part of the weights; also: lora",
    }[found.config.finetuning_type]
    only = found.config.finetuning_type == "qlora" and found.made is not None and found.made.fits
    return f"{words} (lora does not fit)" if only else words


def _micro_line(found: _Found, num_devices: int) -> list[Line]:
    made = found.made
    if made is None or made.pace is None or {"num_microbatch", "micro_batch_size"} & found.given:
        return []
    devices = "device" if num_devices == 1 else "devices"
    why = f"of these in one microbatch, planned for {num_devices} {devices} like these"
    return [Line("micro_batch_size", made.pace.micro_batch_size, why)]


def _data_words(data: DataSize | None) -> str:
    return "what it is trained on" if data is None else f"{data.samples:,} samples"


def _steps_words(found: _Found) -> str:
    if found.data is None:
        return "passes over the data"
    steps, made, lasts = found.data.steps(found.config), found.made, ""
    if made is not None and made.duration is not None:
        lasts = f", about {duration_text(made.duration.seconds)}"
    return f"passes over the data: {steps:,} steps{lasts}"


def _save_words(made: Forecast | None) -> str:
    if made is None:
        return "a checkpoint so often; Ctrl-C saves one too"
    return f"a checkpoint so often, {write_bytes(made.needs[-1].needs)} of disk in all"


def _output_dir(found: _Found) -> str:
    if "output_dir" in found.given:
        return found.config.output_dir
    name = Path(found.config.model_name_or_path.partition("@")[0]).name or "run"
    return f"out/{name.removesuffix('.gguf')}"


def _lacking(made: Forecast | None) -> str:
    if made is None or made.fits:
        return ""
    hints = ", or ".join(map(str, made.hints))
    return f"{made.limit}{f'; what would do: {hints}' if hints else ''}"
