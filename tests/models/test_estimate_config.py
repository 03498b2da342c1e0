"""Configs from anywhere: what is found, what is refused before a module is made."""

from __future__ import annotations

import json
import time

import pytest

from roundpipe.errors import ConfigError
from roundpipe.models.estimate import profile
from roundpipe.models.estimate.config import find_config, make_config

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def test_a_folder_a_file_a_name_and_the_fields_themselves_name_a_model(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert find_config(str(folder)) == ("my-model", TINY)
    assert find_config(folder / "config.json") == ("my-model", TINY)
    assert find_config(TINY) == ("llama", TINY)
    assert find_config("qwen3-8b")[0] == "Qwen3-8B"
    assert profile(str(folder)).parameters == profile(TINY).parameters > 0


def test_an_unknown_name_gets_near_ones():
    with pytest.raises(ConfigError, match=r"no config at hand .*: qwen3-33b\nhint: .*Qwen/Qwen3-"):
        find_config("qwen3-33b")


def test_a_path_is_never_taken_for_a_well_known_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no config at hand"):
        find_config("./qwen3-8b")
    with pytest.raises(ConfigError, match="no config at hand"):
        profile("/models/qwen3-8b")
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    assert find_config("qwen3-8b") == ("qwen3-8b", TINY)
    assert profile("qwen3-8b").parameters < 10**6


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"a": 1e999}'])
def test_a_broken_file_is_an_error_of_ours(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        make_config(find_config(tmp_path)[1])


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        find_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "made-up"}, "model_type: not one that the installed transformers knows"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: no model has that many"),
        ({"hidden_size": 10**12}, "hidden_size: no model has that many"),
        ({"vocab_size": float("nan")}, "vocab_size: no model has that many"),
        ({"rope_scaling": {"short_factor": [1.0] * 20_000}}, "rope_scaling.short_factor: too long"),
        ({"hidden_size": "large"}, "not a config of a llama model"),
        ({"rope_parameters": {"n_experts": 10**6}}, "rope_parameters.n_experts"),
    ],
)
def test_what_no_model_has_is_refused_at_once(change, message):
    begin = time.process_time()
    with pytest.raises(ConfigError, match=message):
        make_config({**TINY, **change})
    assert time.process_time() - begin < 10


def test_large_numbers_that_count_nothing_are_taken():
    hearing = {"gradient_clipping": 1e10, "attention_invalid_logits_value": -1e9}
    assert make_config({**TINY, "audio_config": hearing}).model_type == TINY["model_type"]


def test_nothing_of_a_config_names_code_or_kernels_to_fetch():
    config = make_config(
        {
            **TINY,
            "auto_map": {"AutoModelForCausalLM": "owner/repo--modeling.Evil"},
            "_attn_implementation": "owner/kernel",
            "attn_implementation": "owner/kernel",
            "experts_implementation": "owner/kernel",
            "quantization_config": {"quant_method": "made-up"},
            "dtype": "made-up",
        }
    )
    for name in ("auto_map", "quantization_config"):
        assert getattr(config, name, None) is None
    assert config._attn_implementation is None
    assert profile(TINY).parameters == profile({**TINY, "auto_map": {"A": "b--c"}}).parameters
