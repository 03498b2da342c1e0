"""From the keys people bring to the fields of TrainConfig, with an account of whatever changed.

The file and the command line are merged before anything is derived, so
``gradient_accumulation_steps=8`` on the command line and ``per_device_train_batch_size: 2`` in the
file work together; but a field that the command line sets silences every foreign key of the file
that would set it too.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.account import (
    NOTHING,
    Account,
    is_empty,
    is_secret,
    short_text,
    text_of,
)
from roundpipe.finetune.settings.batch import BATCH, derive_batch
from roundpipe.finetune.settings.derive import ANSWERS_ONLY, derive
from roundpipe.finetune.settings.entries import build_datasets
from roundpipe.finetune.settings.fields import TrainConfig
from roundpipe.finetune.settings.meant import mean_method
from roundpipe.finetune.settings.parse import parse_value
from roundpipe.finetune.settings.words import translate_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIELDS = frozenset(TrainConfig.model_fields)
# Foreign keys that say something by false or a blank: no to an adapter or to a logger, or that
# more than the answers is trained.
_SAY_NO = ("adapter", "enable_wandb", "use_peft", "use_wandb", *ANSWERS_ONLY)
# Lists of names that may come as text, and keys of other trainers whose value is text.
_LISTED = ("modules_to_save", "report_to", "target_modules", "target_parameters")
_TEXT = re.compile(r"revision|project|experiment|dataset|template|tokens|plugins|adapter|config")
# Fields whose null says nothing in a file; of the others none is a setting.
_UNSAID = FIELDS - {"max_grad_norm", "save_total_limit"}
KNOWN = FIELDS.union(keys.ALIASES, keys.DERIVED, keys.NEEDLESS, keys.REFUSED, keys.UNFOLDED)


def translate(
    file: Mapping[str, Any], command_line: Mapping[str, Any], count_devices: Callable[[Any], int]
) -> tuple[dict[str, Any], Account]:
    """The values of TrainConfig's fields that two layers of keys ask for, and what became of each.

    ``count_devices(devices)`` is asked only where a batch is given per device. Raises ConfigError
    for keys that are unknown or refused, and for two that disagree.
    """
    account = Account()
    file, command_line = unquoted(unfolded(file)), unquoted(unfolded(command_line))
    _refuse_unknown({**file, **command_line})
    for key, value in {**file, **command_line}.items():
        account.read(key, value, keys.ALIASES.get(key, key))
    # On the command line a short name is meant as one and needs no word.
    ours = _rename(_without_nothings(file, account), account, is_said=True)
    said = _rename(command_line, account, is_said=False)
    values = _merge(ours, said)
    for target in (ours.keys() - values.keys()) | (ours.keys() & said.keys()):
        account.leaves(target, "the command line says it", but=command_line)
    _refuse(values, account)
    _drop_needless(values, account)
    translate_words(values, account)
    for key in [key for key in keys.DERIVED if key in values and key not in BATCH]:
        derive(key, values, account)
    mean_method(file or command_line, values, account)
    derive_batch(values, account, count_devices)
    build_datasets(values, account)
    _refuse_other_work(file, values)
    if "overwrite_output_dir" not in command_line:
        _mean_overwriting(values, account)
    return values, account


def unfolded(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Put the keys of sections where they count. Raises ConfigError for one that is given twice."""
    flat: dict[str, Any] = {}
    for key, value in layer.items():
        if key not in keys.UNFOLDED:
            inner = {key: value}
        elif is_empty(value):
            continue
        elif not isinstance(value, dict) or _is_other_quantization(key, value):
            way_out = (
                "finetuning_type=qlora packs the base weights into 4 bits"
                if key == "quantization_config"
                else "a section of keys, or the keys alone"
            )
            raise ConfigError(f"not supported: {key}: {text_of(value)}\nhint: {way_out}")
        else:
            names = keys.UNFOLDED[key]
            inner = {names.get(str(name), str(name)): each for name, each in value.items()}
            inner.pop("quant_method", None)
        for name, each in inner.items():
            if name in flat and flat[name] != each:
                raise ConfigError(
                    f"{name} is given twice: {text_of(flat[name])} and {text_of(each)}"
                    "\nhint: leave one of them out"
                )
            flat[name] = each
    return flat


def unquoted(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are text only because somebody quoted them: ``"false"``, ``"-1"``, ``"[a, b]"``.

    Text that stands for itself stays as it is.
    """
    return {key: _unquoted(key, value) for key, value in layer.items()}


def _unquoted(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    target = keys.ALIASES.get(key, key)
    if target in _LISTED and value.startswith("[") and value.endswith("]"):
        found = parse_value(value)
        return found if isinstance(found, list) else value
    info = TrainConfig.model_fields.get(target)
    is_text = re.search("str|Entry", str(info.annotation)) if info else _TEXT.search(key)
    if is_text or (info and "Literal" in str(info.annotation)):
        return value
    found = parse_value(value)
    return found if isinstance(found, bool | int | float) or found is None else value


def _is_other_quantization(key: str, value: Mapping[str, Any]) -> bool:
    method = value.get("quant_method")
    return key == "quantization_config" and (
        method not in (None, "bitsandbytes")
        or not any(name.startswith("load_in_") for name in value)
    )


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    unknown = [key for key in given if key not in KNOWN]
    if not unknown:
        return
    hints = [_nearest(key) for key in unknown]
    if len(unknown) > 1:
        hints = [f"{key} → {hint}" for key, hint in zip(unknown, hints, strict=True) if hint]
    hint = ", ".join(filter(None, hints)) or "roundpipe schema lists every key"
    raise ConfigError(f"unknown key{'s' * (len(unknown) > 1)}: {', '.join(unknown)}\nhint: {hint}")


def _nearest(key: str) -> str:
    """The known key closest to ``key``, ours before foreign ones, or nothing."""
    for pool in (sorted(FIELDS), sorted(KNOWN)):
        for match in difflib.get_close_matches(key.lower(), pool, n=1, cutoff=0.75):
            return keys.ALIASES.get(match, match)
    return ""


def _without_nothings(file: Mapping[str, Any], account: Account) -> dict[str, Any]:
    """A file's keys but for foreign ones that ask for nothing."""
    kept = {}
    for key, value in file.items():
        is_foreign = key not in FIELDS and key not in _SAY_NO
        if (is_foreign and is_empty(value)) or (value is None and key in _UNSAID):
            account.leaves(keys.ALIASES.get(key, key), NOTHING, name=key)
        else:
            kept[key] = value
    return kept


def _rename(layer: Mapping[str, Any], account: Account, *, is_said: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in layer.items():
        target = keys.ALIASES.get(key, key)
        if values.get(target) is not None and value is not None and values[target] != value:
            raise ConfigError(
                f"{target} is given twice: {origin[target]}: {values[target]}, {key}: {value}"
                "\nhint: leave one of them out"
            )
        if value is not None or target not in values:
            values[target], origin[target] = value, key
    renamed = {key: target for target, key in origin.items() if not is_empty(values[target])}
    said = [
        f"{key} is {target}"
        for key, target in renamed.items()
        if key != target and target in FIELDS
    ]
    if said and is_said:
        account.say(f"read as ours: {', '.join(said)}", in_table=True)
    return values


def _merge(file: dict[str, Any], command_line: dict[str, Any]) -> dict[str, Any]:
    """Both layers as one, the command line's word against any of the file's."""
    kept = dict(file)
    for key in command_line:
        targets = keys.DERIVED.get(key, (key,))
        group = BATCH if key in BATCH else set()
        for other in file:
            same_target = set(keys.DERIVED.get(other, (other,))) & set(targets)
            if same_target and other not in group and other in kept:
                del kept[other]
    return {**kept, **command_line}


def _refuse(values: dict[str, Any], account: Account) -> None:
    """Raise ConfigError for every key that is refused, all of them at once."""
    refused: dict[str, list[tuple[str, Any]]] = {}  # by what is said of them
    for key in [key for key in values if key in keys.REFUSED]:
        value = values.pop(key)
        if not is_empty(value) and value not in keys.NEUTRAL.get(key, ()):
            refused.setdefault(keys.REFUSED[key], []).append((key, value))
        else:
            account.leaves(key, NOTHING)
    if refused:
        given = ", ".join(
            f"{key}: {'…' if is_secret(key) else short_text(value)}"
            for each in refused.values()
            for key, value in each
        )
        ways_out = [
            _without([account.name_of(key) for key, _ in each], sentence)
            for sentence, each in refused.items()
        ]
        raise ConfigError(f"not supported: {given}\nhint: {'; '.join(ways_out)}")


def _refuse_other_work(file: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """A config that merges an adapter, or asks a model questions, names no data."""
    if values.get("dataset") is not None:
        return
    for key in ("export_dir", "merge_lora", "infer_backend"):
        if not is_empty(file.get(key)):
            raise ConfigError(
                f"no dataset is given, and {key}: {text_of(file[key])} is not training"
                "\nhint: dataset=FILE.jsonl trains"
            )


def _mean_overwriting(values: dict[str, Any], account: Account) -> None:
    """A file's standing ``overwrite_output_dir`` is no word to throw away an unfinished run of it.

    The command is the same after a power cut; there it would begin anew and lose what was saved.
    """
    if values.get("overwrite_output_dir") is True and "resume_from_checkpoint" not in values:
        values["resume_from_checkpoint"] = "auto"
        account.say(
            "overwrite_output_dir: true in a file: an unfinished run of the same config goes on; "
            "on the command line it begins anew"
        )


def _without(names: list[str], sentence: str) -> str:
    """The sentence on refused keys, with the words that take them out of a config."""
    out = " ".join(f"{name}=none" for name in names)
    if "leave it out" in sentence:
        return sentence.replace("leave it out", out)
    is_setting = "=" in sentence.partition(" ")[0]
    return f"{out} {sentence}" if is_setting else f"{out}, and {sentence}"


def _drop_needless(values: dict[str, Any], account: Account) -> None:
    given = [key for key in values if key in keys.NEEDLESS]
    named = [account.name_of(key) for key in given if not is_empty(values.pop(key))]
    for key in given:
        account.leaves(key, f"not needed: {keys.NEEDLESS[key]}")
    if named:
        account.say(f"not needed here: {', '.join(named)}", in_table=True)
