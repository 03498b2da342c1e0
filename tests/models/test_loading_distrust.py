from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import check_folder, own_code, weight_files
from roundpipe.models.loading.fetch import read_config

if TYPE_CHECKING:
    from pathlib import Path


def folder_with(path: Path, **fields: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return path


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"_attn_implementation_internal": "own/kernel"}, "_attn_implementation_internal"),
        ({"_attn_implementation_internal": "sdpa"}, "_attn_implementation_internal"),
        ({"_experts_implementation_internal": "x"}, "_experts_implementation_internal"),
        ({"attn_implementation": "own/kernel:flash"}, "attn_implementation"),
        ({"text_config": {"_attn_implementation": "own/kernel"}}, "_attn_implementation"),
        ({"attn_implementation": {"text_config": "own/kernel"}}, "attn_implementation"),
    ],
)
def test_a_config_that_names_code_to_fetch_is_refused(
    tmp_path: Path, fields: dict[str, Any], key: str
) -> None:
    folder = folder_with(tmp_path / "m", **fields)
    for opens in (check_folder, read_config):
        with pytest.raises(ConfigError, match=rf"(?s)fetched and run: .*config.json: {key}: .*hin"):
            opens(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation_internal": None},
        {"attn_implementation": "eager"},
        {"attn_implementation": {"text_config": "sdpa"}},
    ],
)
def test_plain_words_and_nothing_are_no_code(tmp_path: Path, fields: dict[str, Any]) -> None:
    check_folder(folder_with(tmp_path / "m", **fields))


@pytest.mark.parametrize(
    "place", ["../w.safetensors", "a/w.safetensors", "/w.safetensors", "w.bin"]
)
def test_an_index_leads_to_safetensors_beside_it_alone(tmp_path: Path, place: str) -> None:
    folder = folder_with(tmp_path / "m")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(ConfigError, match="an index names a file that is not opened"):
        check_folder(folder)
    index.write_text('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')
    with pytest.raises(ConfigError, match="a key twice: w"):
        weight_files(index)


def test_an_index_that_the_config_names_is_looked_at_too(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", transformers_weights="other.json")
    (folder / "other.json").write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    with pytest.raises(ConfigError, match=r"other\.json"):
        check_folder(folder)


def test_a_text_file_is_no_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m")
    (tmp_path / "secret").write_text("{}")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"(?s)a link out of .*chat_template.jinja.*secret\nhint"):
        check_folder(folder)


def test_links_within_to_weights_and_into_the_cache_of_the_hub_are_fine(tmp_path: Path) -> None:
    repo = tmp_path / "cache" / "models--a--b"
    folder = folder_with(repo / "snapshots" / "c0ffee")
    (repo / "blobs").mkdir()
    for blobs in (repo / "blobs", tmp_path / "cache" / "blobs"):
        blobs.mkdir(exist_ok=True)
        (blobs / "1").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/1")
    (folder / "vocab.json").symlink_to(tmp_path / "cache" / "blobs" / "1")
    (folder / "same.json").symlink_to("config.json")
    (tmp_path / "elsewhere").write_bytes(b"")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    check_folder(folder)
    (tmp_path / "link").symlink_to(folder)
    check_folder(tmp_path / "link")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "not the config"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\xff", "not JSON"),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    folder = folder_with(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{words}.*config.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "new"}, "does not know this type of model: new"),
        ({"model_type": "new", "auto_map": {"AutoConfig": "a.C"}}, r"never run: .*: a\.C"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": None, "_diffusers_version": "0.3"}, "that makes images"),
        ({"hidden_size": "many"}, "its config cannot be read"),
    ],
)
def test_each_config_that_gives_no_model_has_its_own_words(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{words}(?s:.*)\nhint: "):
        read_config(folder_with(tmp_path / "m", **fields))


def test_code_beside_a_model_that_transformers_has_is_ignored(tmp_path: Path) -> None:
    fields = {"auto_map": {"AutoConfig": "evil.C", "AutoModel": ["evil.M", None]}}
    folder = folder_with(tmp_path / "m", **fields)
    (folder / "evil.py").write_text("raise SystemExit")
    assert type(read_config(folder)).__name__ == "LlamaConfig"
    assert own_code({"auto_map": {"AutoConfig": "a.C", "AutoModel": "a.C"}}) == "a.C"
    assert own_code({}) is None
