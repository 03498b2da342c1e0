"""A checkpoint opens in the class that wrote it; no code of its own is ever run."""

from __future__ import annotations

import pytest
import transformers
from tests.models import multimodal_cases
from tests.models.loading_cases import config as text_config
from tests.models.loading_cases import edit_config, save
from transformers.utils import logging as transformers_logging

from roundpipe.errors import ConfigError
from roundpipe.models.loading.load import open_causal_lm
from roundpipe.models.loading.own_class import class_for, config_of, name_to_load


@pytest.fixture(autouse=True)
def _no_bars():
    """Bars run a thread that outlives a test."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        ("llama4", "Llama4ForConditionalGeneration", "Llama4ForConditionalGeneration"),
        ("llama4", "Llama4ForCausalLM", "Llama4ForCausalLM"),
        ("llama4", None, "Llama4ForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("gemma3", "SomeModelOfTheirOwn", "Gemma3ForConditionalGeneration"),
        ("qwen2_vl", None, "Qwen2VLForConditionalGeneration"),
        ("qwen2_vl", "Qwen2VLModel", "Qwen2VLForConditionalGeneration"),
    ],
)
def test_the_class_is_the_checkpoint_s_own_where_that_makes_text(kind, architecture, expected):
    config = multimodal_cases.CONFIGS[kind]()
    config.architectures = [architecture] if architecture else None
    assert class_for(config).__name__ == expected


def test_a_text_backbone_takes_the_text_config():
    config = multimodal_cases.CONFIGS["llama4"]()
    assert config_of(transformers.Llama4ForCausalLM, config) is config.get_text_config()
    assert config_of(transformers.Llama4ForConditionalGeneration, config) is config


@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen2_vl", "Qwen2VLForConditionalGeneration"), ("gemma3", "AutoModelForCausalLM")],
)
def test_the_name_to_load_with_is_that_of_the_task_only_where_it_gives_this_class(kind, name):
    assert name_to_load(multimodal_cases.model(kind)) == name


@pytest.mark.parametrize("kind", [transformers.T5Config, transformers.WhisperConfig])
def test_an_encoder_with_a_decoder_is_refused_by_name(kind):
    config = kind(is_encoder_decoder=True)
    with pytest.raises(ConfigError, match=f"an encoder and a decoder.*: {config.model_type}\nhint"):
        class_for(config)


def test_what_makes_no_text_is_refused_by_name():
    with pytest.raises(ConfigError, match="not a causal language model of transformers: ViTConfig"):
        class_for(transformers.ViTConfig())


def test_code_that_comes_with_the_files_is_ignored_where_transformers_knows_the_model(
    tmp_path, monkeypatch
):
    save(tmp_path, "qwen3")
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.C"})
    monkeypatch.setattr(transformers.dynamic_module_utils, "get_class_from_dynamic_module", None)
    assert type(open_causal_lm(tmp_path).model).__name__ == "Qwen3ForCausalLM"


def test_code_that_comes_with_the_files_is_refused_where_transformers_does_not(tmp_path):
    save(tmp_path, "qwen3")
    edit_config(
        tmp_path,
        model_type="of_their_own",
        auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.C"},
    )
    with pytest.raises(ConfigError, match=r"code, which is never run: .*evil\.C, evil\.Model"):
        open_causal_lm(tmp_path)


def test_a_class_that_was_registered_from_outside_is_not_taken(monkeypatch):
    evil = type("Evil", (transformers.LlamaForCausalLM,), {"__module__": "evil"})
    mapping = transformers.AutoModelForCausalLM._model_mapping
    monkeypatch.setitem(mapping._extra_content, transformers.LlamaConfig, evil)
    config = text_config("llama")
    config.architectures = ["Evil"]
    with pytest.raises(ConfigError, match="code that comes with the files is never run"):
        class_for(config)
