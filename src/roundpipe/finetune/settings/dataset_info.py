"""Datasets by the names of LLaMA-Factory's ``dataset_info.json``, which its users have at hand.

The file maps a name to a file or hub id and says what its rows look like: ``alpaca`` rows with
three columns, or conversations with tags for who speaks and what is said. An entry of it becomes
one of ours; what we do not read (images, preference pairs) is refused by name.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.entry_keys import KNOWN_ROLES

FILE = "dataset_info.json"
DEFAULT_FOLDER = "data"
_ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
}
_REFUSED = ("images", "videos", "audios", "chosen", "rejected", "kto_tag")
_OTHER_HUBS = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "system_tag": "system",
}


def read_info(folder: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The folder of datasets and what its file says of them; None where there is no such file.

    Raises ConfigError where ``folder`` was named and has none.
    """
    if folder is not None and folder.upper() == "ONLINE":
        return Path(), {}
    path = Path(folder or DEFAULT_FOLDER).expanduser() / FILE
    if not path.is_file():
        if folder is None:
            return None
        raise ConfigError(
            f"no {FILE} in dataset_dir: {folder}\nhint: dataset=FILE.jsonl, the file itself"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read: {path}: {problem}\nhint: dataset=FILE.jsonl") from problem
    if not isinstance(found, dict):
        raise ConfigError(f"not a list of datasets by name: {path}\nhint: dataset=FILE.jsonl")
    return path.parent, found


def entry_of(name: str, folder: Path, info: dict[str, Any], *, is_text: bool) -> dict[str, Any]:
    """The entry of the dataset ``name``; ``is_text``: for training on running text.

    Raises ConfigError for a name that is not there, and for rows that cannot be read.
    """
    if name not in info:
        near = difflib.get_close_matches(name, info, n=1)
        way_out = f"dataset={near[0]}" if near else "dataset=FILE.jsonl, the file itself"
        raise ConfigError(f"no such dataset in {folder / FILE}: {name}\nhint: {way_out}")
    about = info[name]
    columns = about.get("columns") or {}
    unread = [column for column in _REFUSED if columns.get(column)]
    if unread or about.get("ranking"):
        what = ", ".join(unread) or "ranking"
        raise ConfigError(
            f"not supported: dataset {name}: {what}\nhint: only supervised fine-tuning on text"
        )
    entry: dict[str, Any] = {"path": _place(name, folder, about)}
    for theirs, ours in (("subset", "name"), ("split", "split"), ("num_samples", "max_samples")):
        if about.get(theirs) is not None:
            entry[ours] = about[theirs]
    if is_text:
        entry["type"] = "text"
        if columns.get("prompt", "text") != "text":
            entry["columns"] = {"text": columns["prompt"]}
    elif about.get("formatting", "alpaca") == "alpaca":
        entry["type"] = "instruction/output"
        named = {ours: columns[theirs] for theirs, ours in _ALPACA.items() if columns.get(theirs)}
        if named:
            entry["columns"] = named
    else:
        entry |= _conversation(name, about, columns)
    return entry


def _place(name: str, folder: Path, about: dict[str, Any]) -> str:
    if about.get("file_name"):
        return str(folder / str(about["file_name"]))
    if about.get("hf_hub_url"):
        return str(about["hf_hub_url"])
    other = next((key for key in _OTHER_HUBS if about.get(key)), "no file_name")
    raise ConfigError(
        f"not supported: dataset {name}: {other}\nhint: a file_name or an hf_hub_url in {FILE}"
    )


def _conversation(name: str, about: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    tags = about.get("tags") or {}
    is_openai = about.get("formatting") == "openai"
    role = tags.get("role_tag") or ("role" if is_openai else "from")
    content = tags.get("content_tag") or ("content" if is_openai else "value")
    if tags.get("function_tag") not in (None, "function_call"):
        raise ConfigError(
            f"not supported: dataset {name}: function_tag: {tags['function_tag']}"
            "\nhint: rename the role in the file to function_call"
        )
    roles = {
        ours: [tags[tag]]
        for tag, ours in _ROLES.items()
        if tags.get(tag) not in (None, *KNOWN_ROLES[ours])
    }
    shape = "messages" if role == "role" else "conversations"
    default = "messages" if is_openai else "conversations"
    named = {shape: columns.get("messages") or default}
    if (role, content) not in (("from", "value"), ("role", "content")):
        named |= {"role": role, "content": content}
    for column in ("system", "tools"):
        if columns.get(column):
            named[column] = columns[column]
    entry: dict[str, Any] = {"type": shape}
    if named != {shape: shape}:
        entry["columns"] = named
    return {**entry, "roles": roles} if roles else entry
