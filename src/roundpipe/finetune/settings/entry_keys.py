"""One entry of a dataset list with the keys of other trainers, as an entry of ours or several."""

from __future__ import annotations

from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.account import is_empty, short_text, text_of
from roundpipe.finetune.settings.entry import DatasetEntry

COLUMNS = {
    "field": "text",
    "field_input": "input",
    "field_instruction": "instruction",
    "field_messages": "messages",
    "field_output": "output",
    "field_system": "system",
    "field_tools": "tools",
    "message_field_content": "content",
    "message_field_role": "role",
    "text_column": "text",
}
TYPES: dict[str, str | None] = {
    "alpaca": "instruction/output",
    "chat_template": None,  # the shape is recognised from the columns
    "completion": "text",  # in that trainer the word means raw text
    "openai": "messages",
    "pretrain": "text",
    "prompt_completion": "prompt/completion",
    "query_response": "query/response",
    "question_answer": "question/answer",
    "sharegpt": "conversations",
}
ALIASES = {
    "file_name": "path",
    "formatting": "type",
    "num_samples": "max_samples",
    "subset": "name",
}
NEEDLESS = frozenset(
    (
        "chat_template",
        "chat_template_jinja",
        "conversation",
        "ds_type",
        "field_thinking",
        "input_transform",
        "preprocess_shards",
        "split_thinking",
        "template_thinking_key",
        "trust_remote_code",
    )
)
_OURS = frozenset(DatasetEntry.model_fields)
# Key -> values that ask for what is so anyway, and the way out for any other.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "shards": ((1,), "max_samples=N, or weight: 0.1 for a tenth of it in each epoch"),
    "shards_idx": ((0,), "max_samples=N, or weight: 0.1 for a tenth of it in each epoch"),
    "fraction": ((1,), "weight: 0.1 for a tenth of it in each epoch"),
    "skip": ((0,), "split='train[1000:]'"),
    "data_dir": ((), "data_files: FOLDER/*"),
    "roles_to_train": (
        (["assistant"], ["gpt"], ["assistant", "gpt"], ["gpt", "assistant"]),
        "leave it out: answers are trained; train_on_prompt=true trains everything",
    ),
    "train_on_eos": (("turn",), "leave it out: each trained turn ends in a trained end token"),
    "train_on_eot": (("turn",), "leave it out: each trained turn ends in a trained end token"),
    "drop_system_message": ((), "leave the system messages out of the file"),
    "message_field_training": ((), "leave it out: answers are trained; mask_history=true"),
    "message_field_training_detail": ((), "leave it out: answers are trained; mask_history=true"),
    "field_human": ((), "columns: {question: COLUMN, answer: COLUMN}"),
    "field_model": ((), "columns: {question: COLUMN, answer: COLUMN}"),
    "field_chosen": ((), "only supervised fine-tuning"),
    "field_rejected": ((), "only supervised fine-tuning"),
    "ranking": ((), "only supervised fine-tuning"),
    "input_format": ((), "leave it out: the chat template says how a prompt looks"),
    "logprobs_field": ((), "only supervised fine-tuning"),
    "temperature": ((), "only supervised fine-tuning"),
}
# The names of speakers that rows may have without a word.
KNOWN_ROLES = {
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt"),
    "system": ("system",),
    "tool": ("tool", "observation"),
}
_BUILDERS = ("arrow", "csv", "json", "parquet", "text")


def read_entry(entry: Any) -> list[Any]:
    """The entry with its keys and words as ours. Raises ConfigError for what it asks in vain."""
    if not isinstance(entry, dict):
        return [entry]
    ours: dict[str, Any] = {}
    columns: dict[str, str] = {}
    for raw, value in _flat(entry):
        key = ALIASES.get(raw, raw)
        is_list = key == "columns" and isinstance(value, list)  # which of them to load
        if key in NEEDLESS or is_list or value is None or (is_empty(value) and key not in _OURS):
            continue
        if key in COLUMNS and isinstance(value, str):
            columns[COLUMNS[key]] = value
        elif key == "roles":
            if strange := _strange_roles(value):
                ours["roles"] = strange
        elif key in REFUSED:
            _refuse(key, value)
        else:
            ours[key] = value
    kind = ours.pop("type", None)
    if kind is not None:
        base = str(kind).partition(".")[0].partition(":")[0]
        shape = TYPES.get(str(kind), TYPES.get(base, kind))
        ours |= {} if shape is None else {"type": shape}
    if columns:
        _map(ours, columns)
    return _files(ours)


def _flat(entry: dict[Any, Any]) -> list[tuple[str, Any]]:
    """The keys of an entry, with those of a ``type`` that is a mapping among them.

    A mapping may write a prompt in a form of its own, which no model's chat template knows.
    """
    flat: list[tuple[str, Any]] = []
    for raw, value in entry.items():
        key = str(raw)
        if key == "type" and isinstance(value, dict):
            forms = [name for name in value if "format" in str(name) or name == "system_prompt"]
            forms = [name for name in forms if not is_empty(value[name])]
            if any(value[name] != "{instruction}" for name in forms):
                raise ConfigError(
                    f"not supported: type: {forms[0]} of a dataset"
                    "\nhint: write the prompt into the file: type: prompt_completion"
                )
            flat += [(str(k), v) for k, v in value.items() if k not in forms and not is_empty(v)]
            flat.append(("type", "alpaca"))
        elif key == "message_property_mappings" and isinstance(value, dict):
            names = {"role": "message_field_role", "content": "message_field_content"}
            flat += [(names.get(str(k), str(k)), v) for k, v in value.items() if k in names]
        else:
            flat.append((key, value))
    return flat


def _refuse(key: str, value: Any) -> None:
    neutral, way_out = REFUSED[key]
    if value not in neutral:
        raise ConfigError(
            f"not supported: {key}: {short_text(value)} of a dataset\nhint: {way_out}"
        )


def _map(ours: dict[str, Any], columns: dict[str, str]) -> None:
    """Columns of another trainer's keys as ours, and the shape that they tell.

    Who speaks and what is said have two usual pairs of names, one of each of two shapes.
    """
    pair = (columns.get("role"), columns.get("content"))
    if pair in (("from", "value"), ("role", "content")):
        del columns["role"], columns["content"]
        if pair == ("from", "value"):
            columns.setdefault("messages", "conversations")
            ours["type"] = "conversations"
    elif "role" in columns:
        columns.setdefault("messages", "messages")
        ours["type"] = ours.get("type") or "messages"
    if ours.get("type") == "conversations" and "messages" in columns:
        columns["conversations"] = columns.pop("messages")
    named = {**columns, **(ours.get("columns") or {})}
    if any(column != theirs for column, theirs in named.items()) or len(named) > 1:
        ours["columns"] = named


def _strange_roles(roles: Any) -> dict[str, Any]:
    """Who speaks under which names, where these are not known anyway."""
    if not isinstance(roles, dict):
        raise ConfigError(f"not roles: {text_of(roles)}\nhint: roles: {{user: [NAME]}}")
    strange = {}
    for role, names in roles.items():
        listed = [names] if isinstance(names, str) else list(names)
        if any(name not in KNOWN_ROLES.get(str(role), ()) for name in listed):
            strange[str(role)] = listed
    return strange


def _files(ours: dict[str, Any]) -> list[Any]:
    """Files for a path that only names their format."""
    if ours.get("path") not in _BUILDERS or not ours.get("data_files"):
        return [ours]
    files = ours.pop("data_files")
    listed = [files] if isinstance(files, str) else list(files)
    if ours.get("split") == "train":  # of files that are the whole
        del ours["split"]
    return [{**ours, "path": file} for file in listed]
