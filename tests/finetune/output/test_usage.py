import ast
import shlex
from pathlib import Path
from typing import Any

import pytest

from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.usage import (
    TOOLS,
    Block,
    Result,
    quoted,
    short_lines,
    usage_lines,
)
from roundpipe.finetune.use.request import read_request

HERE = ModelSource("./base", "./base")
HUB = ModelSource("a/b@v1", "a/b", revision="v1", hub_id="a/b")
GGUF = ModelSource("x/m.gguf", "x", gguf_file="m.gguf")
PACKAGE = ModelSource("package:p/m.gguf", "/site/p", gguf_file="m.gguf", package="p")
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none"}


def blocks(source: ModelSource = HERE, **fields: Any) -> dict[str, Block]:
    asked = {"question": 'it\'s "so"?', "folder": "out"} | fields
    made = {block.tool: block for block in usage_lines(Result(source=source, **asked))}
    text = "\n".join(made["python"].lines)
    ast.parse(text)  # it is Python, whatever the question holds
    assert all(line == line.lstrip() for line in made["python"].lines)  # else it cannot be pasted
    for block in made.values():
        assert bool(block.lines) != bool(block.reasons)
        if block.language == "sh":
            assert all(shlex.split(line) for line in block.lines)
    return made


def python(source: ModelSource, **fields: Any) -> str:
    return "\n".join(blocks(source, **fields)["python"].lines)


@pytest.mark.parametrize(
    ("source", "loading"),
    [
        (HERE, "from_pretrained('./base')"),
        (HUB, "from_pretrained('a/b', revision='v1')"),
        (GGUF, "from_pretrained('x', gguf_file='m.gguf')"),
        (PACKAGE, "from_pretrained(folder, gguf_file='m.gguf')"),
    ],
)
def test_an_adapter_needs_its_base_as_the_user_named_it(source: ModelSource, loading: str) -> None:
    text = python(source, peft=LORA)
    assert f"base = AutoModelForCausalLM.{loading}" in text
    assert "PeftModel.from_pretrained(base, 'out')" in text
    assert "/site" not in text  # no path of this machine


def test_a_whole_model_needs_no_base() -> None:
    text = python(HERE)
    assert "peft" not in text
    assert "model = AutoModelForCausalLM.from_pretrained('out')" in text


def test_without_a_template_the_question_is_plain_text() -> None:
    assert "apply_chat_template" not in python(HERE, has_template=False)


def test_a_base_that_was_packed_is_packed_again_where_transformers_does_that() -> None:
    text = python(HUB, peft=LORA, is_packed=True)
    assert "revision='v1', quantization_config=nf4)" in text
    assert 'bnb_4bit_compute_dtype="bfloat16"' in text
    assert "quantization_config" not in python(GGUF, peft=LORA, is_packed=True)


def test_every_tool_has_lines_for_a_plain_adapter_but_ollama() -> None:
    made = blocks(HUB, peft=LORA)
    assert list(made) == list(TOOLS)
    assert [tool for tool, block in made.items() if block.reasons] == ["ollama"]
    assert made["vllm"].lines == (
        "vllm serve a/b --revision v1 --enable-lora --lora-modules out=out --max-lora-rank 16",
    )
    assert made["llama.cpp"].lines == (
        "hf download a/b --revision v1 --local-dir base",
        "python convert_lora_to_gguf.py out --base base --outfile out/adapter.gguf",
        "python convert_hf_to_gguf.py base --outfile base.gguf",
        "llama-cli -m base.gguf --lora out/adapter.gguf",
    )


def test_every_tool_has_lines_for_a_whole_model() -> None:
    made = blocks(HUB, folder="my run")
    assert not any(block.reasons for block in made.values())
    assert made["roundpipe"].lines == ('roundpipe chat "my run"',)
    assert made["vllm"].lines == ('vllm serve "my run" --served-model-name my-run',)
    assert made["ollama"].lines[1] == 'echo FROM ./model.gguf > "my run/Modelfile"'


@pytest.mark.parametrize(
    ("rank", "told"), [(1, 8), (8, 8), (9, 16), (64, 64), (257, 320), (512, 512)]
)
def test_vllm_is_told_a_rank_that_it_takes(rank: int, told: int) -> None:
    (line,) = blocks(peft=LORA | {"r": rank})["vllm"].lines
    assert line.endswith(f"--max-lora-rank {told}")


@pytest.mark.parametrize(
    ("fields", "vllm", "llama_cpp"),
    [
        ({"use_dora": True}, "DoRA", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "modules_to_save"),
        ({"lora_bias": True}, "lora_bias", "lora_bias"),
        ({"bias": "all"}, "bias", "bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices", "trainable_token_indices"),
        ({"target_parameters": ["experts.down_proj"]}, "stacked experts", "stacked experts"),
        ({"layer_replication": [[0, 2]]}, "layer_replication", "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "init_lora_weights"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern", "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern", None),
        ({"r": 513}, "512", None),
        ({"use_rslora": True}, None, "use_rslora"),
        ({"init_lora_weights": "gaussian"}, None, None),
        ({"modules_to_save": None, "rank_pattern": {}, "use_dora": False}, None, None),
    ],
)
def test_what_a_tool_does_not_do_is_said_instead(
    fields: dict[str, Any], vllm: str | None, llama_cpp: str | None
) -> None:
    made = blocks(peft=LORA | fields)
    for tool, reason in (("vllm", vllm), ("llama.cpp", llama_cpp)):
        assert len(made[tool].reasons) == (reason is not None)
        assert reason is None or reason in made[tool].reasons[0]


@pytest.mark.parametrize("source", [GGUF, PACKAGE])
def test_a_base_that_others_cannot_open_has_to_be_merged_with(source: ModelSource) -> None:
    made = blocks(source, peft=LORA)
    assert made["vllm"].reasons
    assert made["llama.cpp"].reasons
    shown = "\n".join(short_lines(Result("out", source, peft=LORA)))
    assert "roundpipe merge out" in shown
    assert "vLLM       merge it first: it does not open such a base" in shown


def test_an_adapter_on_a_tied_head_is_not_for_llama_cpp() -> None:
    fields = LORA | {"target_modules": ["q_proj", "lm_head"]}
    assert blocks(peft=fields, is_tied=True)["llama.cpp"].reasons
    assert not blocks(peft=fields)["llama.cpp"].reasons
    assert not blocks(peft=LORA, is_tied=True)["llama.cpp"].reasons


@pytest.mark.parametrize(
    "word", ["out", "my run", "it's", 'say "x"', "$HOME", "100%", "a`b", r"C:\my run", "ü", "a;b"]
)
def test_a_quoted_word_is_read_as_it_was(word: str) -> None:
    assert shlex.split(quoted(word)) == [word]


@pytest.mark.parametrize(
    ("folder", "name"), [("out/My_Run 2", "my-run-2"), ("/", "tuned"), ("ü", "tuned")]
)
def test_a_server_calls_it_by_a_plain_name(folder: str, name: str) -> None:
    assert Result(folder, HERE).name == name


def test_a_run_in_the_folder_where_one_stands_has_that_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums").mkdir()
    monkeypatch.chdir(tmp_path / "sums")
    assert Result(".", HERE).name == "sums"


@pytest.mark.parametrize("folder", ["out", "my run", "a=b", "-x", "runs/a=b", "it's", r"C:\my run"])
def test_the_commands_read_the_folder_that_is_meant(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = blocks(HUB, folder=folder, peft=LORA)["roundpipe"].lines
    assert [line.split()[1] for line in lines] == ["chat", "merge"]
    for line in lines:
        given = read_request(shlex.split(line)[2:], environment={}).given
        assert Path(given) == Path(folder)
