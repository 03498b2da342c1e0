from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from roundpipe.errors import ConfigError
from roundpipe.finetune.model import fingerprint as module
from roundpipe.finetune.model.fingerprint import BLOCK, fingerprint
from roundpipe.finetune.model.source import ModelSource, locate_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "a")


def of(folder: Path) -> str:
    return fingerprint(locate_model(str(folder)))


def test_it_is_the_same_wherever_and_whenever_the_files_were_written(
    folder: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / "b")
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    config = json.loads((copied / "config.json").read_text())
    told = {"_name_or_path": "x", **dict(reversed(config.items())), "transformers_version": "4.0"}
    (copied / "config.json").write_text(json.dumps(told))
    (copied / "tokenizer.json").unlink()
    assert of(copied) == of(folder)


@pytest.mark.parametrize("what", ["weights", "names", "config", "dtype"])
def test_another_model_has_another(folder: Path, what: str) -> None:
    before = of(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "weights":
        weights[name] += 1e-3
    elif what == "names":
        weights = {key.replace("up_proj", "up"): value for key, value in weights.items()}
    elif what == "dtype":
        weights = {key: value.half() for key, value in weights.items()}
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-9}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert of(folder) != before


def test_of_a_large_file_a_few_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(3 << 30)  # a file with a hole
    source = ModelSource("m.gguf", str(tmp_path), gguf_file="m.gguf")
    first = fingerprint(source)
    pieces = list(module._pieces(path, 64))
    assert sum(map(len, pieces)) <= 65 * BLOCK
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert fingerprint(source) != first


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    source = locate_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a weight file cannot be read|index"):
        fingerprint(source)
