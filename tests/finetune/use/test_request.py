"""Command lines of the commands that use a result."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.run_folder import config_text
from roundpipe.finetune.settings.config import make_config
from roundpipe.finetune.use.request import Request, read_request

if TYPE_CHECKING:
    from pathlib import Path


def read(*words: str, options: tuple[str, ...] = ()) -> Request:
    return read_request(words, options=options, environment={})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder ``out`` of a run, below where one stands."""
    monkeypatch.chdir(tmp_path)
    given = {"model": "base", "dataset": "d.jsonl", "method": "qlora", "max_length": 77}
    config = make_config({**given, "chat_template": "chatml", "sample_prompts": "why $HOME?"})[0]
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_text(config))
    return folder


def test_keys_that_are_not_said_are_those_of_the_run(run: Path) -> None:
    request = read("out", "devices=cpu*2", "--max-length", "99")
    settings = request.settings
    assert (request.given, request.run, request.base) == ("out", run.relative_to(run.parent), None)
    assert (settings.finetuning_type, settings.chat_template) == ("qlora", "chatml")
    assert (settings.max_length, settings.devices) == (99, "cpu*2")
    assert settings.sample_prompts == ("why $HOME?",)
    assert request.said == {"devices", "max_length"}
    assert request.has_dataset
    assert request.notes == ()


def test_what_is_no_run_has_the_defaults_and_no_data(tmp_path: Path) -> None:
    request = read("owner/name", "--no-packing", "load_in_4bit=true")
    assert (request.given, request.settings.model_name_or_path) == ("owner/name",) * 2
    assert (request.settings.finetuning_type, request.has_dataset) == ("qlora", False)
    assert "finetuning_type" in request.said
    assert read("owner/name", "dataset=x.jsonl").has_dataset


def test_options_are_the_command_s_own_and_the_base_may_be_said(run: Path) -> None:
    request = read("out", "--base=original", "model=elsewhere", options=("base",))
    assert request.options == {"base": "original"}
    assert (request.base, request.settings.model_name_or_path) == ("elsewhere",) * 2


def test_the_config_that_a_run_was_trained_with_names_it(run: Path) -> None:
    (run.parent / "my.yaml").write_text("model: base\ndataset: d.jsonl\noutput_dir: out\n")
    request = read("my.yaml", "dtype=fp32", "output_dir=merged")
    assert (request.given, request.said) == ("out", {"dtype", "output_dir"})
    assert request.settings.finetuning_type == "qlora"


def test_configs_of_other_trainers_name_a_model_and_an_adapter(run: Path) -> None:
    (run.parent / "merge.yaml").write_text(
        "model_name_or_path: base\nadapter_name_or_path: saves/lora\ntemplate: qwen\n"
        "finetuning_type: lora\nexport_dir: merged\nexport_size: 5\n"
    )
    request = read("merge.yaml", options=("export_dir",))
    assert (request.given, request.base) == ("saves/lora", "base")
    assert request.options == {"export_dir": "merged"}
    assert not request.has_dataset
    (run.parent / "axolotl.yml").write_text(
        "base_model: base\nadapter: lora\nlora_model_dir: there\nsequence_len: 512\n"
    )
    assert read("axolotl.yml").given == "there"
    (run.parent / "outputs").mkdir()
    (run.parent / "outputs" / "adapter_config.json").write_text("{}")
    (run.parent / "axolotl.yml").write_text("base_model: base\noutput_dir: outputs\n")
    request = read("axolotl.yml")
    assert (request.given, request.said) == ("outputs", {"model_name_or_path"})
    assert read("model=base").given == "base"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], r"no RUN is given\nhint: roundpipe COMMAND RUN"),
        (["a", "b"], r"two of RUN: a and b\nhint: roundpipe"),
        (["no.yaml"], r"no such config file: no.yaml"),
        (["a", "lerning_rate=1"], r"unknown key: lerning_rate\nhint: learning_rate"),
        (["a", "dtype=fp8"], r"dtype: fp8"),
    ],
)
def test_mistakes_are_said_with_the_way_out(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(*words)


def test_a_slip_in_a_command_s_own_option_names_the_option() -> None:
    for slip, meant in (("promt", "prompt"), ("max_new_token", "max_new_tokens")):
        with pytest.raises(ConfigError, match=rf"unknown key: {slip}\nhint: {meant}$"):
            read_request(
                ["a", f"{slip}=1"], options=["max_new_tokens"], taken=["prompt"], environment={}
            )


def test_reading_a_command_line_needs_no_torch() -> None:
    """Where this process has not imported it for others."""
    module: Any = sys.modules["roundpipe.finetune.use.request"]
    assert "torch" not in vars(module)
