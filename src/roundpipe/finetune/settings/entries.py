"""The list of datasets, from all the ways in which other trainers write one.

A list of mappings with keys of their own (axolotl, TRL), names that a ``dataset_info.json`` knows,
several in one string (LLaMA-Factory), one hub id with its configuration and splits in keys beside
it (TRL). What holds for every entry (``max_samples``, ``dataset_text_field``) is put into each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import NOTHING, is_empty, text_of
from roundpipe.finetune.settings.cadence import has_evaluation
from roundpipe.finetune.settings.dataset_info import DEFAULT_FOLDER, FILE, entry_of, read_info
from roundpipe.finetune.settings.entry_keys import read_entry

if TYPE_CHECKING:
    from roundpipe.finetune.settings.account import Account

_SHAPES = {
    "alpaca": "instruction/output",
    "chatml": None,
    "conversational": None,
    "auto": None,
    "raw": "text",
    "sharegpt": "conversations",
}
_SPLIT = "train"


def build_datasets(values: dict[str, Any], account: Account) -> None:
    """Put lists of our own entries for ``dataset`` and ``eval_dataset``. Raises ConfigError."""
    _named_dataset(values, account)
    _pretraining(values, account)
    info = _info(values)
    if info is None and account.has("template", "cutoff_len"):
        _refuse_bare_names(values)
    if account.has("base_model"):
        _say_prompts(values, account)
    is_text = values.pop("stage", None) == "pt"
    each_has = _ForEach(
        shape="text" if is_text else _shape(values),
        most=values.pop("max_samples", None),
        text=values.pop("dataset_text_field", None),
    )
    for field in ("dataset", "eval_dataset"):
        if values.get(field) is None:
            continue
        entries: list[Any] = []
        for each in _listed(values[field], info):
            if isinstance(each, str) and info is not None:
                entries.append(_by_name(each, *info, is_text=is_text))
            else:
                entries += read_entry(each)
        values[field] = [each_has.put_into(entry) for entry in entries]
    account.sets("dataset_dir", ["dataset"])
    account.sets("format_type", ["dataset"])
    account.sets("dataset_text_field", ["dataset"])
    account.sets("max_samples", ["dataset"])
    _without_evaluation(values, account)


def _say_prompts(values: dict[str, Any], account: Account) -> None:
    """Prompts that axolotl writes around rows itself; here a chat template does."""
    given = values.get("dataset")
    for entry in given if isinstance(given, list | tuple) else [given]:
        if not isinstance(entry, dict):
            continue
        kind, named = str(entry.get("type") or ""), entry.get("conversation")
        is_alpaca = kind.partition(".")[0].partition(":")[0] == "alpaca"
        if is_alpaca or not is_empty(named):
            what = "the prompt of type: alpaca" if is_alpaca else f"conversation: {named}"
            account.say(
                f"not used: {what} (the model's chat template counts; see the marked sample)"
            )


@dataclass(frozen=True)
class _ForEach:
    """What holds for each entry that does not say it itself."""

    shape: str | None
    most: Any
    text: Any

    def put_into(self, entry: Any) -> Any:
        given = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(given, dict):
            return entry
        more: dict[str, Any] = {}
        has_shape = given.get("type") or given.get("columns")
        if self.shape is not None and not given.get("type"):
            more["type"] = self.shape
        elif self.text not in (None, "text") and not has_shape:
            more |= {"type": "text", "columns": {"text": self.text}}
        if self.most is not None and not given.get("max_samples"):
            more["max_samples"] = self.most
        return {**given, **more} if more else entry


def _listed(given: Any, info: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return [part for each in given for part in _listed(each, info)]
    if isinstance(given, str) and "," in given and not Path(given).expanduser().exists():
        names = [part.strip() for part in given.split(",") if part.strip()]
        if info is not None or all(Path(name).expanduser().exists() for name in names):
            return names
    return [given]


def _by_name(name: str, folder: Path, info: dict[str, Any], *, is_text: bool) -> Any:
    """What a name means where there is a ``dataset_info.json``: what lies there comes first."""
    if name not in info and (Path(name).expanduser().exists() or not info or "/" in name):
        return name
    return entry_of(name, folder, info, is_text=is_text)


def _info(values: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
    """The ``dataset_info.json`` that counts: a named folder's, or that of the usual one.

    Of the usual one only names count that it has.
    """
    folder = values.pop("dataset_dir", None)
    if isinstance(folder, dict):
        return Path(), folder
    found = read_info(None if folder is None else str(folder))
    if folder is None and found is not None:
        given = [values.get("dataset"), values.get("eval_dataset")]
        names = [name for each in given if isinstance(each, str) for name in each.split(",")]
        if not any(name.strip() in found[1] for name in names):
            return None
    return found


def _refuse_bare_names(values: dict[str, Any]) -> None:
    """Names that only a ``dataset_info.json`` could explain, of a config that relies on one."""
    given = values.get("dataset")
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else []
    for name in names:
        if name and not set(name) & set("/.*@") and not Path(name).expanduser().exists():
            raise ConfigError(
                f"dataset: {name} is neither a file nor a hub id, and there is no "
                f"{DEFAULT_FOLDER}/{FILE} that says what it is"
                "\nhint: dataset_dir=FOLDER that has one, or dataset=FILE.jsonl"
            )


def _shape(values: dict[str, Any]) -> str | None:
    given = values.pop("format_type", None)
    if given is not None and (not isinstance(given, str) or given not in _SHAPES):
        raise ConfigError(
            f"format_type: {text_of(given)} is none of {', '.join(_SHAPES)}\nhint: format_type=auto"
        )
    return None if given is None else _SHAPES[given]


def _named_dataset(values: dict[str, Any], account: Account) -> None:
    """One dataset of the hub with its configuration and splits, as TRL's scripts take it.

    There, evaluation is over the split ``test`` unless another is named.
    """
    name = values.pop("dataset_name", None)
    beside = {
        key: values.pop(key, None)
        for key in ("dataset_config", "dataset_train_split", "dataset_test_split")
    }
    if name is None:
        for key, value in beside.items():
            account.leaves(key, NOTHING)
            if value not in (None, "train", "test"):
                account.say(f"not used: {key}: {value} (no dataset_name beside it)")
        return
    if values.get("dataset") is not None and values["dataset"] != name:
        raise ConfigError(
            f"dataset is given twice: dataset: {text_of(values['dataset'])}, dataset_name: {name}"
            "\nhint: leave one of them out"
        )
    entry = {"path": name}
    if beside["dataset_config"] is not None:
        entry["name"] = beside["dataset_config"]
    split = beside["dataset_train_split"]
    values["dataset"] = {**entry, "split": split} if split not in (None, _SPLIT) else entry
    for key in ("dataset_name", "dataset_config", "dataset_train_split"):
        account.sets(key, ["dataset"])
    wanted = values.get("eval_strategy") in ("steps", "epoch") or values.get("eval_steps")
    if wanted and not has_evaluation(values):
        values["eval_dataset"] = {**entry, "split": beside["dataset_test_split"] or "test"}
        account.sets("dataset_test_split", ["eval_dataset"])
        account.say(f"eval_dataset: split {values['eval_dataset']['split']} of {name}")
    else:
        account.leaves("dataset_test_split", "not used: no evaluation is asked for")


def _pretraining(values: dict[str, Any], account: Account) -> None:
    """Running text, packed, as axolotl's ``pretraining_dataset``."""
    given = values.pop("pretraining_dataset", None)
    if given is None:
        return
    entries = []
    for each in given if isinstance(given, list) else [given]:
        if not isinstance(each, str | dict):
            raise ConfigError(
                f"not a dataset: pretraining_dataset: {text_of(each)}"
                "\nhint: dataset='[{path: FILE.jsonl, type: text}]' packing=true"
            )
        entry: dict[str, Any] = {"path": each} if isinstance(each, str) else dict(each)
        if not is_empty(entry.pop("skip", None)):
            raise ConfigError(
                "not supported: pretraining_dataset: skip\nhint: split='train[1000:]' of the entry"
            )
        entry["type"] = "text"
        column = entry.pop("text_column", None) or "text"
        if column != "text":
            entry["columns"] = {"text": column}
        entries.append(entry)
    if values.get("dataset") is not None:
        raise ConfigError(
            "dataset and pretraining_dataset are both given\nhint: leave one of them out"
        )
    values["dataset"] = entries
    values.setdefault("packing", True)
    account.sets("pretraining_dataset", ["dataset", "packing"])


def _without_evaluation(values: dict[str, Any], account: Account) -> None:
    """Where a config says that nothing is held out, when to evaluate asks for nothing."""
    if has_evaluation(values) or "val_size" not in values:
        return
    for key in ("eval_steps", "eval_strategy"):
        if values.get(key) not in (None, "no", False):
            del values[key]
            account.leaves(key, "not used: there is no data to evaluate on")
            account.say(f"not used: {key} (there is no data to evaluate on)")
