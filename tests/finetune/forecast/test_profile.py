"""Where a plan's model comes from, without a network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.profile import is_hub_reachable, model_fields, profile_of
from roundpipe.finetune.forecast.wish import read_wish
from roundpipe.models.known import find_known

if TYPE_CHECKING:
    from pathlib import Path

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def fields(given: str) -> tuple[str, dict]:
    return model_fields(given, OFFLINE)


def test_a_config_file_a_folder_and_a_known_name_are_the_same_model(tmp_path: Path) -> None:
    known = find_known("Qwen/Qwen3-0.6B")
    assert known is not None
    folder = tmp_path / "mine"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(dict(known.config)))
    assert fields(str(file)) == fields(str(folder)) == ("mine", dict(known.config))
    assert fields("qwen3-0.6b") == ("Qwen3-0.6B", dict(known.config))


def test_a_folder_of_a_well_known_name_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert fields("Qwen3-0.6B") == ("Qwen3-0.6B", {"model_type": "llama"})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("Qwen/Qwen3-33B", "model=Qwen/Qwen3-3"),
        ("nobody/xyzzy", "model=FOLDER or model=FILE/config.json plans without a network"),
    ],
)
def test_an_unknown_id_without_a_network_has_a_way_out(given: str, hint: str) -> None:
    with pytest.raises(ConfigError) as told:
        fields(given)
    assert str(told.value).startswith(f"no config at hand for {given}: the hub cannot be reached")
    assert hint in str(told.value)


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        fields(str(tmp_path))


def test_what_is_no_name_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no such folder: a/b/c"):
        fields("a/b/c")


def test_the_hub_is_asked_only_where_it_answers() -> None:
    assert not is_hub_reachable(OFFLINE)
    assert not is_hub_reachable({"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert is_hub_reachable({"HTTPS_PROXY": "http://proxy:1"})


def test_a_known_model_is_not_counted_anew() -> None:
    wish = read_wish({}, {"model": "Qwen/Qwen3-32B", "method": "full"}, lambda devices: 1)
    found = profile_of(wish, bits=16)
    assert found.parameters == pytest.approx(32.76e9, rel=1e-3)
    assert len(found.layers) == 66


@pytest.mark.slow  # imports torch and transformers
def test_a_folder_of_ones_own_is_counted(tiny_folder: Path) -> None:
    asked = {"model": str(tiny_folder), "attn_implementation": "eager", "lora_r": 4}
    found = profile_of(read_wish({}, asked, lambda devices: 1), bits=32)
    assert len(found.layers) == 4
    plain = profile_of(
        read_wish({}, {**asked, "attn_implementation": "sdpa"}, lambda devices: 1), bits=32
    )
    # Without a fused kernel the scores of all pairs are kept.
    kept = [each.kinds(512)[1].kept.per_pair for each in (found, plain)]
    assert kept[0] > kept[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "clip"}, "not a causal language model of transformers: CLIPConfig"),
        ({"hidden_size": 2**24, "intermediate_size": 10**15}, "cannot count the model: config"),
    ],
)
def test_a_model_that_cannot_be_counted_is_a_mistake_of_its_config(
    values: dict, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config_of_mine.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, **values}))
    with pytest.raises(ConfigError, match=message):
        profile_of(read_wish({}, {"model": str(file)}, lambda devices: 1), bits=16)
