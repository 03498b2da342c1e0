"""Models of the hub, from a hub on this machine that answers as the real one."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from tests.models.fake_hub import COMMIT, FakeHub, fake_hub

from roundpipe.errors import ConfigError, PlanError
from roundpipe.models.loading import hub as model_hub
from roundpipe.models.loading.hub import (
    Hub,
    fetch_weights,
    open_adapter,
    open_snapshot,
    require_room,
)
from roundpipe.models.loading.hub_errors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDED = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"}
SHARDS = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with fake_hub() as server:
        yield server


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.endpoint, tmp_path / "cache", token=False)


@pytest.fixture
def repo(server: FakeHub, tmp_path: Path) -> Path:
    """A repository of two shards, and much that nobody needs."""
    folder = tmp_path / "repo"
    (folder / "onnx").mkdir(parents=True)
    for name in (*NEEDED, "README.md", "onnx/model.json", "modeling.py", ".gitattributes"):
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "consolidated.00.safetensors", "model.fp16.safetensors"):
        (folder / name).write_bytes(b"twice")
    places = {}
    for index, name in enumerate(sorted(SHARDS)):
        save_file({f"w{index}": torch.ones(500)}, folder / name)
        places[f"w{index}"] = name
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    server.repos["own/er"] = folder
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_small_files_come_first_then_the_weights_and_nothing_twice(repo: Path, hub: Hub) -> None:
    snapshot = open_snapshot("own/er", None, hub)
    small = NEEDED | {"model.safetensors.index.json"}
    assert names(snapshot.folder) == small
    assert (snapshot.commit, set(snapshot.missing)) == (COMMIT, SHARDS)
    assert snapshot.missing_bytes == sum((repo / name).stat().st_size for name in SHARDS)
    done: list[int] = []
    fetch_weights(snapshot, done.append)
    assert names(snapshot.folder) == small | SHARDS
    assert done == sorted(done)
    assert done[-1] == sum((repo / name).stat().st_size for name in SHARDS)
    assert snapshot.missing == ()


def test_what_is_there_is_not_fetched_again_nor_asked_for_by_its_commit(
    repo: Path, hub: Hub, server: FakeHub
) -> None:
    fetch_weights(open_snapshot("own/er", None, hub))
    server.log.clear()
    fetch_weights(open_snapshot("own/er", None, hub))
    assert not any("resolve" in line for line in server.log)
    server.log.clear()
    assert open_snapshot("own/er", COMMIT, hub).missing == ()
    assert server.log == []


def test_one_file_is_preferred_to_shards_as_the_loader_prefers_it(repo: Path, hub: Hub) -> None:
    save_file({"w": torch.ones(3)}, repo / "model.safetensors")
    assert open_snapshot("own/er", None, hub).weights == ("model.safetensors",)


def test_a_download_that_was_broken_off_goes_on(repo: Path, hub: Hub, server: FakeHub) -> None:
    snapshot = open_snapshot("own/er", None, hub)
    name = sorted(SHARDS)[0]
    body = (repo / name).read_bytes()
    blobs = snapshot.folder.parents[1] / "blobs"
    (blobs / f"{hashlib.sha256(body).hexdigest()}.incomplete").write_bytes(body[:1000])
    assert snapshot.partial_bytes == 1000
    fetch_weights(snapshot)
    assert any(line.endswith(f"{name} from 1000") for line in server.log)
    assert (snapshot.folder / name).read_bytes() == body
    assert not list(blobs.glob("*.incomplete"))


@pytest.mark.parametrize("left", [b"not its beginning", b"x" * 10_000])
def test_what_came_with_errors_is_thrown_away(
    repo: Path, hub: Hub, server: FakeHub, left: bytes
) -> None:
    snapshot = open_snapshot("own/er", None, hub)
    name = sorted(SHARDS)[0]
    body = (repo / name).read_bytes()
    part = snapshot.folder.parents[1] / "blobs" / f"{hashlib.sha256(body).hexdigest()}.incomplete"
    part.write_bytes(left)
    if len(left) < len(body):
        with pytest.raises(ConfigError, match=r"came with errors and was thrown away"):
            fetch_weights(snapshot)
        assert not part.exists()
    fetch_weights(snapshot)
    assert (snapshot.folder / name).read_bytes() == body


def test_a_server_that_does_not_go_on_within_a_file_sends_it_whole(
    repo: Path, hub: Hub, server: FakeHub
) -> None:
    server.ranges = False
    snapshot = open_snapshot("own/er", None, hub)
    name = sorted(SHARDS)[0]
    body = (repo / name).read_bytes()
    part = snapshot.folder.parents[1] / "blobs" / f"{hashlib.sha256(body).hexdigest()}.incomplete"
    part.write_bytes(body[:1000])
    fetch_weights(snapshot)
    assert (snapshot.folder / name).read_bytes() == body


def test_a_download_that_is_stopped_keeps_what_has_come(
    repo: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = open_snapshot("own/er", None, hub)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 700)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_weights(snapshot, stop)
    assert not any(t.name.startswith("download") for t in threading.enumerate())
    assert snapshot.partial_bytes in (700, 1400)
    fetch_weights(snapshot)
    assert snapshot.missing == ()


@pytest.mark.parametrize(
    "refusal",
    [(401, "GatedRepo"), (403, "GatedRepo"), (429, ""), (503, ""), (401, "RepoNotFound")],
)
def test_a_hub_that_refuses_does_not_matter_to_who_has_the_model(
    repo: Path, hub: Hub, server: FakeHub, refusal: tuple[int, str]
) -> None:
    fetch_weights(open_snapshot("own/er", None, hub))
    server.refuse = refusal
    snapshot = open_snapshot("own/er", None, hub)
    assert snapshot.missing == ()
    assert snapshot.note is not None
    assert snapshot.note.endswith(f"its cached copy is used, commit {COMMIT[:8]}")


def test_without_a_network_the_cache_is_enough_if_it_has_all(
    repo: Path, hub: Hub, tmp_path: Path
) -> None:
    gone = Hub("http://127.0.0.1:9", tmp_path / "cache")
    snapshot = open_snapshot("own/er", None, hub)
    with pytest.raises(ConfigError, match=r"cannot be reached \(it does not answer\), and its ca"):
        open_snapshot("own/er", None, gone)
    fetch_weights(snapshot)
    found = open_snapshot("own/er", None, gone)
    assert (found.commit, found.folder, found.missing) == (COMMIT, snapshot.folder, ())
    assert "its cached copy is used" in (found.note or "")


REFUSALS = [
    ((401, "GatedRepo"), r"(?s)gated model, and nobody is logged in: own/er.*hf auth login"),
    ((403, "GatedRepo"), r"(?s)licence is not accepted yet.*accept it at http://.*/own/er"),
    ((401, "RepoNotFound"), r"(?s)no such model on the hub, or a private one.*hint: check"),
    ((404, "RevisionNotFound"), r"(?s)no such revision: own/er\nhint: the branches"),
    ((429, ""), r"(?s)asked too often: own/er\nhint: run the same again in some minutes"),
    ((500, ""), r"(?s)has trouble \(500\): own/er\nhint: run the same again later"),
    ((403, ""), r"(?s)refuses access: own/er\nhint: hf auth login"),
]
ASKED_AGAIN = (429, 500)  # by the client, for half a minute, when it is about a file


@pytest.mark.parametrize(
    ("refusal", "words", "is_for_files"),
    [(refusal, words, False) for refusal, words in REFUSALS]
    + [(refusal, words, True) for refusal, words in REFUSALS if refusal[0] not in ASKED_AGAIN],
)
def test_each_refusal_has_a_message_of_its_own(
    repo: Path, hub: Hub, server: FakeHub, refusal: tuple[int, str], words: str, is_for_files: bool
) -> None:
    """The list of files is public where the files are not."""
    if is_for_files:
        server.refuse_files = refusal
    else:
        server.refuse = refusal
    with pytest.raises(ConfigError, match=words):
        open_snapshot("own/er", None, hub)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), r"(?s)the disk is full.*hint: HF_HOME=FOLDER"),
        (type("ProxyError", (Exception,), {})("503"), r"(?s)the proxy.*hint: HTTPS_PROXY="),
        (
            type("ConnectError", (Exception,), {})("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"),
            r"(?s)the certificate of https://huggingface.co is not trusted.*SSL_CERT_FILE=",
        ),
        (
            type("ConnectError", (Exception,), {})("[Errno -2] Name or service not known"),
            r"(?s)cannot be reached \(its name is not found\).*HF_ENDPOINT=MIRROR",
        ),
        (type("FileMetadataError", (OSError,), {})("no header"), "is no model hub"),
        (
            type("UnsupportedProtocol", (Exception,), {})("x"),
            r"(?s)HF_ENDPOINT is no address.*hint",
        ),
        (type("HFValidationError", (ValueError,), {})("a..b"), "not an id of the model hub"),
        (ValueError("something else"), r"(?s)ValueError: something else: own/er\nhint: the same"),
    ],
)
def test_what_the_system_says_has_a_way_out(error: Exception, words: str) -> None:
    told = explain(error, "own/er", repo="own/er", endpoint=None)
    with pytest.raises(
        PlanError if isinstance(error, OSError) and error.errno else ConfigError
    ) as e:
        raise told
    assert re.search(words, str(e.value))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("config.json", "pytorch_model.bin"), r"(?s)only pickled weights.*convert it once"),
        (("config.json", "flax_model.msgpack"), "no weights"),
        (("m-Q4.gguf", "README.md"), r"(?s)only GGUF.*hf download own/er m-Q4.gguf --local-dir"),
        (("adapter_config.json",), r"(?s)an adapter, not a model.*adapter_name_or_path=own/er"),
        (("model_index.json", "unet.safetensors"), "a model that makes images"),
        (("config.json", "weights.safetensors"), "its weight files have no index"),
    ],
)
def test_a_repository_without_a_model_that_we_open_is_refused_before_a_weight(
    server: FakeHub, hub: Hub, tmp_path: Path, files: tuple[str, ...], words: str
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    server.repos["own/er"] = folder
    with pytest.raises(ConfigError, match=words):
        open_snapshot("own/er", None, hub)
    assert not any("weights" in line for line in server.log if line.startswith("GET"))


@pytest.mark.parametrize("place", ["../w.safetensors", "/etc/passwd", "w.bin", "no.safetensors"])
def test_an_index_of_the_hub_leads_nowhere_else(repo: Path, hub: Hub, place: str) -> None:
    index = repo / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(ConfigError, match=r"is not opened|index names are not there"):
        open_snapshot("own/er", None, hub)


def test_weights_that_do_not_fit_the_disk_are_not_begun(
    repo: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, server: FakeHub
) -> None:
    snapshot = open_snapshot("own/er", None, hub)
    usage = type("Usage", (), {"free": 64 << 20})
    monkeypatch.setattr(model_hub.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PlanError, match=r"(?s)no room to download own/er: 0.0 GB.*HF_HOME=FOLDER"):
        fetch_weights(snapshot)
    assert not any("00002.safetensors" in line for line in server.log)
    usage.free += snapshot.missing_bytes
    require_room(snapshot)


def test_a_revision_that_moves_gives_another_commit(repo: Path, hub: Hub, server: FakeHub) -> None:
    fetch_weights(open_snapshot("own/er", None, hub))
    (repo / "config.json").write_text('{"new": 1}')
    server.commits["own/er"] = other = "ab" * 20
    snapshot = open_snapshot("own/er", "main", hub)
    assert (snapshot.commit, set(snapshot.missing)) == (other, SHARDS)
    fetch_weights(snapshot)  # its bytes are in the cache
    assert json.loads((snapshot.folder / "config.json").read_text()) == {"new": 1}


def test_an_adapter_is_two_files(server: FakeHub, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        (folder / name).write_text("{}")
    server.repos["own/adapter"] = folder
    found = open_adapter("own/adapter", None, hub)
    assert names(found) == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(ConfigError, match="no such model on the hub"):
        open_adapter("own/none", None, hub)


def test_downloads_show_nothing(repo: Path, hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    fetch_weights(open_snapshot("own/er", None, hub))
    assert capfd.readouterr().err == ""
