"""Well-known models: found by any usual name, and as large as their makers say."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.layer_run import META
from roundpipe.models.estimate.method import Lora, Method
from roundpipe.models.estimate.profile import Profile
from roundpipe.models.estimate.stored import METHODS, store, stored_profile
from roundpipe.models.known import find_known, known_models, nearest_known

KNOWN = known_models()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
        ("Qwen3 32B", "Qwen/Qwen3-32B"),
        ("unsloth/Qwen3-32B-bnb-4bit", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
        ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B"),
        ("qwen2.5-coder-7b-instruct", "Qwen/Qwen2.5-7B"),
        ("llama3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x7B-v0.1"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
        ("gemma3:1b", "google/gemma-3-1b-pt"),
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-V3"),
        ("OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-1124-7B"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_usual_names_find_the_model(given, expected):
    found = find_known(given)
    assert found is not None
    assert found.id == expected


@pytest.mark.parametrize(
    "given", ["qwen3-33b", "llama-3.1-70b-vision", "qwen3", "8b", "", "/", "-"]
)
def test_other_names_find_nothing(given):
    assert find_known(given) is None


def test_a_misspelt_name_gets_near_ones():
    assert nearest_known("qwen3-33b")[0] in {"Qwen/Qwen3-32B", "Qwen/Qwen3-8B"}


def test_every_name_is_one_models_alone():
    names = [n.lower() for model in KNOWN for n in (model.id, model.name, *model.also)]
    assert len(names) == len(set(names)) + sum(model.id == model.name for model in KNOWN)
    assert {find_known(name).id for name in names} == {model.id for model in KNOWN}


@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.name)
def test_what_was_counted_has_as_many_parameters_as_are_published(model):
    found = stored_profile(model, Method(), bits=16)
    assert found.parameters == pytest.approx(model.parameters, rel=0.01)
    assert found.trained_parameters + found.unread == found.parameters
    assert bool(found.unread) == bool(found.notes) == ("vision_config" in model.config)
    text = model.config.get("text_config", model.config)
    assert len(found.layers) == text["num_hidden_layers"] + 2
    for method in METHODS:
        for bits in (16, 32):
            other = stored_profile(model, method, bits=bits)
            assert (other.method, other.bits) == (method.name, bits)
            assert Profile.from_json(other.to_json()) == other


@pytest.mark.accept
@pytest.mark.parametrize("model", KNOWN, ids=lambda model: model.name)
def test_the_model_itself_has_as_many_parameters_as_are_published(model):
    with META:
        made = AutoModelForCausalLM.from_config(make_config(model.config))
    parameters = sum(parameter.numel() for parameter in made.parameters())
    assert parameters == pytest.approx(model.parameters, rel=0.01)


def test_counting_again_gives_what_is_stored():
    model = find_known("SmolLM2-135M")
    assert count(make_config(model.config), Method(), name=model.name) == stored_profile(
        model, Method(), bits=16
    )


@pytest.mark.accept
@pytest.mark.parametrize("name", ["qwen3-1.7b", "gpt-oss-20b", "gemma-2-2b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_counting_others_again_gives_what_is_stored(name, method):
    model = find_known(name)
    for bits in (16, 32):
        found = count(make_config(model.config), method, name=model.name, bits=bits)
        assert found == stored_profile(model, method, bits=bits)


def test_other_settings_are_not_answered_from_what_is_stored():
    model = find_known("SmolLM2-135M")
    assert stored_profile(model, Method(name="lora", lora=Lora(r=8)), bits=16) is None


def test_profiles_are_stored_and_read_back(tmp_path, monkeypatch):
    model = find_known("Qwen3-8B")
    found = [stored_profile(model, method, bits=16) for method in METHODS]
    store(model, found, tmp_path)
    monkeypatch.setattr("roundpipe.models.estimate.stored.FOLDER", tmp_path)
    assert [stored_profile(model, method, bits=16) for method in METHODS] == found
    assert stored_profile(model, METHODS[0], bits=32) is None
