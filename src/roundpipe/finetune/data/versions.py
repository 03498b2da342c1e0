"""The key of an entry's tokens: a digest of everything they hang on."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundpipe.finetune.settings.fields import DatasetEntry, TrainConfig

_SETTINGS = ("max_length", "truncation", "train_on_prompt", "mask_history", "on_bad_line")
_ENTRY = ("type", "columns", "roles", "max_samples")
_PACKAGES = ("transformers", "tokenizers", "sentencepiece", "jinja2")
_PLAIN = (bool, int, float, str, type(None))
_PATHS = ("name_or_path", "vocab_file", "tokenizer_file", "merges_file", "cache_dir")


def tokens_key(entry: DatasetEntry, config: TrainConfig, tokenizer: str, content: Any) -> str:
    """A name for the tokens of ``entry``.

    ``tokenizer``: its digest; ``content``: JSON that says what the entry's files hold.
    """
    what = {
        "content": content,
        "entry": {name: getattr(entry, name) for name in _ENTRY},
        "settings": {name: getattr(config, name) for name in _SETTINGS},
        "tokenizer": tokenizer,
        "versions": {name: _version(name) for name in _PACKAGES},
        "code": _code_digest(),
    }
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does: its vocabulary and rules, special tokens, chat template.

    Neither its name nor the folder it lies in.
    """
    if tokenizer.is_fast:
        rules: Any = tokenizer.backend_tokenizer.to_str()
    else:
        rules = [sorted(tokenizer.get_vocab().items()), _file_digest(tokenizer)]
    given = getattr(tokenizer, "init_kwargs", {})
    what = {
        "kind": type(tokenizer).__name__,
        "rules": rules,
        "special": str(sorted(tokenizer.special_tokens_map.items())),
        "added": str(sorted(tokenizer.added_tokens_decoder.items())),
        "settings": {
            name: value
            for name, value in given.items()
            if isinstance(value, _PLAIN) and name not in _PATHS
        },
        "template": tokenizer.chat_template,
    }
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _file_digest(tokenizer: Any) -> str:
    """Of a slow tokenizer's model file, which has more in it than the vocabulary."""
    path = getattr(tokenizer, "vocab_file", None)
    if not path or not Path(path).is_file():
        return ""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _code_digest() -> str:
    """SHA-256 of the code of this room, so that tokens of an older version are not taken."""
    digest = hashlib.sha256()
    for file in sorted(files("roundpipe.finetune.data").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
