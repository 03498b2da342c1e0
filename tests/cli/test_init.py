"""``roundpipe init``: a commented config that loads again, fits, and replaces nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundpipe.cli import main
from roundpipe.finetune.settings.config import TrainConfig, load_config

MACHINE = "machine=1x3060,32GB"
MODEL = "HuggingFaceTB/SmolLM2-135M"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write_rows(400)


def write_rows(count: int) -> None:
    rows = ({"question": f"what is {i}?", "answer": "a number " * (i % 60)} for i in range(count))
    Path("my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def loaded(text: str) -> TrainConfig:
    Path("made.yaml").write_text(text)
    config, notes = load_config(["made.yaml"])
    assert notes == []
    return config


def test_a_config_is_written_with_a_reason_for_each_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", MODEL, "my.jsonl", MACHINE]) == 0
    text = capsys.readouterr().out
    settings = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(settings) >= 12
    assert all("  # " in line for line in settings)
    config = loaded(text)
    assert (config.model_name_or_path, config.dataset[0].path) == (MODEL, "my.jsonl")
    assert (config.finetuning_type, config.learning_rate, config.batch_size) == ("lora", 2e-4, 16)
    assert config.val_size == 0.05
    assert config.micro_batch_size is not None
    assert config.max_length in (256, 512, 1024)
    assert config.output_dir == "out/SmolLM2-135M"
    assert "guessed by characters, without a tokenizer" in text
    assert "400 samples" in text
    assert main(["plan", "made.yaml", MACHINE]) == 0  # and it fits


def test_keys_are_as_given_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["lr=1e-3", "method=full", "--weight-decay", "0.1", "max_length=64"]
    assert main(["init", f"model={MODEL}", "my.jsonl", MACHINE, *given]) == 0
    text = capsys.readouterr().out
    config = loaded(text)
    assert (config.learning_rate, config.finetuning_type, config.weight_decay) == (
        1e-3,
        "full",
        0.1,
    )
    assert config.max_length == 64
    assert text.count("# as given") == 4
    assert "lora_r" not in text


def test_little_data_gets_smaller_batches_and_nothing_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_rows(30)
    assert main(["init", MODEL, "my.jsonl", MACHINE]) == 0
    config = loaded(capsys.readouterr().out)
    assert (config.batch_size, config.val_size) == (4, None)


def test_what_is_not_at_hand_is_said_and_keeps_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "nobody/xyzzy", "someone/data", MACHINE]) == 0
    text = capsys.readouterr().out
    assert "# Not known here: how long the samples are: the dataset is not on this machine." in text
    assert "# Not known here: whether it fits: no config at hand for nobody/xyzzy" in text
    config = loaded(text)
    assert (config.max_length, config.micro_batch_size) == (2048, None)


def test_a_method_that_fits_is_chosen_and_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "Qwen/Qwen3-4B", "someone/data", "machine=1x3060,9GB"]) == 0
    text = capsys.readouterr().out
    assert loaded(text).finetuning_type == "qlora"
    assert "(lora does not fit)" in text
    assert main(["init", "Qwen/Qwen3-4B", "someone/data", "machine=1x3060,2GB"]) == 0
    assert "# Does not fit this machine: host memory" in capsys.readouterr().out


def test_a_file_is_written_once_and_never_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", MODEL, "my.jsonl", MACHINE, "-o", "new.yaml"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "wrote new.yaml: roundpipe train new.yaml" in said.err
    before = Path("new.yaml").read_text()
    assert main([*words, "seed=7"]) == 2
    assert "there is a file already: new.yaml\n  hint: -o ANOTHER.yaml" in capsys.readouterr().err
    assert Path("new.yaml").read_text() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model is given\n  hint: roundpipe init MODEL DATA"),
        ([MODEL], "no dataset is given"),
        ([MODEL, "my.jsonl", "more"], "neither model nor data: more"),
        ([MODEL, "my.jsonl", "learning_rat=1"], "unknown key: learning_rat\n  hint: learning_rate"),
        (["my.jsonl", MODEL], "data, not a model: my.jsonl\n  hint: roundpipe init MODEL DATA"),
        ([MODEL, "mi.jsonl"], "no such dataset file: mi.jsonl\n  hint: my.jsonl"),
        ([MODEL, "my.jsonl", "-o"], "-o names no file"),
        ([MODEL, "my.jsonl", "-o", "no/such/x.yaml"], "cannot write: no/such/x.yaml"),
        ([MODEL, "my.jsonl", "rl=dpo"], "not yet: rl: dpo"),
    ],
)
def test_bad_input_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *([MACHINE] if words else []), *words]) == 2
    assert message in capsys.readouterr().err
