"""``roundpipe plan``: its words, its files and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roundpipe.cli import main

SMALL = ("model=HuggingFaceTB/SmolLM2-135M", "machine=1x3060,32GB", "batch_size=4", "length=512")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def plan(*words: str) -> int:
    return main(["plan", *words])


def test_a_job_that_fits_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("SmolLM2-135M · LoRA r=16 · bf16 · 4 × 512 tokens") for line in lines
    )
    assert [line.split()[0] for line in lines if line.startswith("  ")][1:4] == [
        "gpu",
        "host",
        "disk",
    ]


def test_a_job_that_does_not_fit_exits_with_3_and_has_said_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan(*SMALL, "method=full", "machine=1x3060,1GB") == 3
    said = capsys.readouterr().out
    assert "  speed " in said
    assert "does not fit: host memory, " in said
    assert "  hint: finetuning_type=lora (" in said


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SMALL, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["fits"] is True
    assert set(values["bytes"]) == {"device", "pinned_host", "pageable_host", "disk"}


def test_why_and_files_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--why", "--trace", "t.json", *SMALL, "--html=p.html") == 0
    said = capsys.readouterr()
    assert "  critical path " in said.out
    assert "wrote t.json" in said.err
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert "<canvas" in Path("p.html").read_text()


def test_a_config_of_another_trainer_is_planned_and_translated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("their.yaml").write_text(
        "base_model: HuggingFaceTB/SmolLM2-135M\nadapter: qlora\nload_in_4bit: true\n"
        "sequence_len: 256\ngradient_accumulation_steps: 4\nmicro_batch_size: 1\n"
        "gradient_checkpointing: true\nsample_packing: true\n"
    )
    assert plan("their.yaml", "machine=2x3060,32GB") == 0
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert said.startswith("what became of the keys of their.yaml\n")
    assert ["sequence_len:", "256", "→", "max_length:", "256"] in lines
    assert ["load_in_4bit:", "true", "→", "finetuning_type:", "qlora"] in lines
    assert ["micro_batch_size:", "1", "→", "batch_size:", "8"] in lines
    assert "gradient_checkpointing: true" in said
    assert "→  not needed: recompute is always on" in said
    assert "· batch_size: 8 (1 × 4 × 2 devices)" in said
    assert "read as ours" not in said  # the table says it
    assert "SmolLM2-135M · QLoRA r=16" in said
    assert plan("their.yaml", "machine=2x3060,32GB", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["keys"]["sequence_len"] == "max_length: 256"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=nobody/xyzzy", "machine=4090"], "no config at hand for nobody/xyzzy"),
        (["machine=4091", "model=qwen3-8b"], "unknown card: 4091"),
        (["machin=4090"], "unknown key: machin\n  hint: machine"),
        (["batch_size=4"], "no model_name_or_path is given"),
        (["machine=4090", "--why"], "--why is of one job"),
        ([*SMALL, "--whyy"], "unknown key: whyy\n  hint: --why"),
        (["my.jsonl"], "data, not a config: my.jsonl\n  hint: dataset=my.jsonl"),
        ([*SMALL, "--why=3"], "neither true nor false: why=3"),
        ([*SMALL, "--trace"], "trace names no file\n  hint: --trace plan.json"),
        (["no.yaml"], "no such config file: no.yaml"),
        ([*SMALL, "dataset=no.jsonl"], "no such dataset file: no.jsonl"),
        ([*SMALL, "devices=4"], "devices: 4 are not among those of machine: 1x3060,32GB"),
    ],
)
def test_bad_input_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_machine_alone_gives_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("machine=2xcpu,24GB", "--json") == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert models[0]["model"] == "SmolLM2-135M"
    assert {each["method"].split()[0] for each in models} == {"full", "LoRA", "QLoRA"}


@pytest.mark.slow  # a process of its own
def test_a_known_model_on_a_described_machine_needs_no_torch() -> None:
    code = (
        "import sys; from roundpipe.cli import main; code = main(sys.argv[1:]);"
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", *SMALL],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
