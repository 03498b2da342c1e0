"""From an id to a model in memory, mistakes before downloads."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.models.fake_hub import COMMIT, FakeHub, fake_hub

from roundpipe.errors import ConfigError, PlanError
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.fingerprint import fingerprint
from roundpipe.finetune.model.from_transformers import load_tokenizer
from roundpipe.finetune.model.hub import fetch, fetch_weights
from roundpipe.finetune.model.source import locate_model
from roundpipe.models.loading import hub as model_hub
from roundpipe.models.loading.hub import Hub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Shown:
    """A terminal that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.counted: list[tuple[str, int, list[int]]] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def counting(self, what: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
        self.counted.append((what, total, []))
        yield self.counted[-1][2].append


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with fake_hub() as server:
        server.repos["own/tiny"] = tiny_folder
        yield server


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.endpoint, tmp_path / "cache", token=False)


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_an_id_becomes_a_folder_with_its_commit_and_keeps_its_name(
    hub: Hub, shown: Shown, tiny_folder: Path
) -> None:
    source = fetch(locate_model("own/tiny@main"), shown, hub=hub)
    assert (source.commit, source.hub_id, source.revision) == (COMMIT, "own/tiny", "main")
    assert (source.is_hub, source.is_here, source.name) == (True, True, "tiny")
    assert load_tokenizer(source).chat_template
    fetch_weights(source, shown)
    ((what, total, done),) = shown.counted
    assert (what, total) == (
        "downloading tiny",
        (tiny_folder / "model.safetensors").stat().st_size,
    )
    assert done[-1] == total
    shown.counted.clear()
    model = load_base(source, "lora", dtype=torch.float32, terminal=shown).model
    ((what, total, done),) = shown.counted
    assert (what, done[-1]) == ("loading tiny", total)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    shown.counted.clear()
    fetch_weights(fetch(source, shown), shown)
    assert shown.counted == []
    assert fingerprint(source) == fingerprint(locate_model(str(tiny_folder)))


def test_a_cached_copy_is_taken_without_a_network_and_that_is_said(
    hub: Hub, shown: Shown, tmp_path: Path
) -> None:
    fetch_weights(fetch(locate_model("own/tiny"), shown, hub=hub), shown)
    gone = Hub("http://127.0.0.1:9", tmp_path / "cache")
    source = fetch(locate_model("own/tiny"), shown, hub=gone)
    assert source.commit == COMMIT
    assert shown.lines == [
        "own/tiny: http://127.0.0.1:9 cannot be reached (it does not answer); "
        f"its cached copy is used, commit {COMMIT[:8]}"
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"gptq\nhint.*=qlora"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"model_type": "new"}, "does not know this type"),
        ({"_attn_implementation_internal": "own/kernel"}, "fetched and run"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "8 bits"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_its_weights_are_fetched(
    server: FakeHub,
    hub: Hub,
    shown: Shown,
    tiny_folder: Path,
    tmp_path: Path,
    fields: dict[str, Any],
    words: str,
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    server.repos["own/edited"] = folder
    for given in ("own/edited", str(folder)):
        with pytest.raises(ConfigError, match=rf"(?s)^model_name_or_path: .*{words}"):
            fetch(locate_model(given), shown, hub=hub)
    assert not any("safetensors" in line for line in server.log)


def test_a_disk_without_room_is_told_before_the_data_is_read(
    hub: Hub, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(model_hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PlanError, match=r"^model_name_or_path: no room to download own/tiny"):
        fetch(locate_model("own/tiny"), shown, hub=hub)


def test_a_model_without_a_tokenizer_says_how_to_give_it_one(
    server: FakeHub, hub: Hub, shown: Shown, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(tiny_folder / name, folder / name)
    server.repos["own/bare"] = folder
    with pytest.raises(ConfigError, match=r"(?s)tokenizer of own/bare.*hf download own/bare --loc"):
        load_tokenizer(fetch(locate_model("own/bare"), shown, hub=hub))
    with pytest.raises(ConfigError, match=r"(?s)hint: copy tokenizer\.json"):
        load_tokenizer(fetch(locate_model(str(folder)), shown))
