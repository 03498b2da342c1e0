import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from roundpipe.errors import ConfigError, DeviceError, PlanError
from roundpipe.finetune.forecast import forecast
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run import prepare as preparing
from roundpipe.finetune.run.prepare import Job, _end_at, prepare
from roundpipe.plan.machine_text import parse_machine


def prepared(config: Any) -> tuple[Job, list[str]]:
    stream = io.StringIO()
    with prepare(config, Terminal(stream, patience=600)) as job:
        return job, stream.getvalue().splitlines()


def test_the_header_says_what_is_trained_on_what(config_of: Any, tiny_folder: Path) -> None:
    _, lines = prepared(config_of(devices="cpu*2"))
    assert lines[0].startswith(f"{tiny_folder.name} · LoRA r=4 (4.1 k of 31 k trained) · ")
    assert lines[0].endswith(" % trained · 2 × cpu")
    _, lines = prepared(config_of(finetuning_type="full"))
    assert " · full fine-tuning (26.9 k) · 12 samples, " in lines[0]


def test_one_sample_is_shown_with_its_trained_tokens_marked(config_of: Any) -> None:
    _, lines = prepared(config_of())
    assert lines[-1].startswith("sample: <|im_start|>user")
    assert "▌it is 0<|im_end|>▐" in lines[-1]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_weights_are_fp32_on_the_cpu_unless_asked_otherwise(
    config_of: Any, dtype: str, expected: torch.dtype
) -> None:
    job, _ = prepared(config_of(dtype=dtype))
    assert {p.dtype for p in job.model.parameters()} == {expected}


@pytest.mark.parametrize(
    ("machine", "expected"), [("1x2080ti,64GB", torch.float16), ("1x3060,64GB", torch.bfloat16)]
)
def test_weights_are_fp16_where_a_card_has_no_bf16(
    config_of: Any, monkeypatch: pytest.MonkeyPatch, machine: str, expected: torch.dtype
) -> None:
    monkeypatch.setattr(preparing, "survey_devices", lambda *_, **__: parse_machine(machine))
    job, _ = prepared(config_of())
    assert {p.dtype for p in job.model.parameters()} == {expected}


def test_a_wrong_device_or_model_is_told_before_data_is_read(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "load_dataset", None)
    with pytest.raises(DeviceError):
        prepared(config_of(devices="cuda:7"))
    with pytest.raises(ConfigError, match="no such folder"):
        prepared(config_of(model_name_or_path="./nowhere"))


def test_devices_are_closed_whatever_happens(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    resolve = preparing.resolve_devices

    def watched(*args: Any, **kwargs: Any) -> Any:
        devices = resolve(*args, **kwargs)
        for device in devices:
            monkeypatch.setattr(device, "close", lambda: closed.append(1))
        return devices

    monkeypatch.setattr(preparing, "resolve_devices", watched)
    prepared(config_of(devices="cpu*2"))
    assert len(closed) == 2
    with pytest.raises(ConfigError):
        prepared(config_of(devices="cpu*2", target_modules=["nothing"]))
    assert len(closed) == 4


def test_padding_takes_whatever_token_there_is(tiny: Any, config_of: Any) -> None:
    job, _ = prepared(config_of())
    assert job.pad_token_id == job.tokenizer.pad_token_id
    job.tokenizer.pad_token = None
    assert job.pad_token_id == job.tokenizer.eos_token_id
    job.tokenizer.eos_token = None
    assert job.pad_token_id == 0


def test_padding_and_data_take_only_tokens_that_the_model_has(
    tiny_folder: Path, config_of: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|filler|>"})
    tokenizer.add_tokens([f"<|{i}|>" for i in range(9)])
    tokenizer.save_pretrained(folder)
    job, _ = prepared(config_of(model_name_or_path=str(folder)))
    assert tokenizer.pad_token_id == 259 < len(tokenizer) - 1
    job.tokenizer.pad_token = "<|8|>"
    assert job.pad_token_id == job.tokenizer.eos_token_id == 257
    data = tmp_path / "new.jsonl"
    data.write_text('{"question": "a", "answer": "b <|3|> c"}\n')
    with pytest.raises(ConfigError, match=r"tokens that the model does not have: <\|3\|> is token"):
        prepared(config_of(model_name_or_path=str(folder), dataset=str(data)))


def test_the_header_says_which_part_is_trained_and_the_rank_that_counts(config_of: Any) -> None:
    _, lines = prepared(config_of(finetuning_type="freeze", unfrozen_parameters="layers:-1"))
    assert any(" · part of the weights (" in line for line in lines)


def test_a_run_that_host_memory_would_not_hold_ends_before_a_weight_is_read(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "load_base", None)
    with pytest.raises(PlanError, match=r"(?s)does not fit into host memory.*hint: "):
        prepared(config_of(finetuning_type="full", host_memory_limit="100kB"))


def test_only_as_many_tokens_count_as_samples_have(config_of: Any) -> None:
    # 2,048 tokens each would take 15 MB
    prepared(config_of(host_memory_limit="2MB", max_length=2048))


def test_a_model_that_cannot_be_counted_is_loaded_all_the_same(
    config_of: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("cannot count the model: x\nhint: y")

    monkeypatch.setattr(forecast, "profile_of", fail)
    with caplog.at_level("INFO", logger="roundpipe"):
        prepared(config_of())
    assert "host memory is not checked beforehand: cannot count the model: x" in caplog.text


def test_a_share_is_of_the_host_memory_that_is_free(config_of: Any) -> None:
    assert prepared(config_of())[0].pinned_memory_limit is None
    assert prepared(config_of(pinned_memory_limit="1GB"))[0].pinned_memory_limit == 10**9
    half = prepared(config_of(pinned_memory_limit=0.5))[0].pinned_memory_limit
    whole = prepared(config_of(pinned_memory_limit=1.0))[0].pinned_memory_limit
    assert half is not None
    assert whole is not None
    assert half / whole == pytest.approx(0.5, rel=0.2)  # others take and free memory meanwhile


@pytest.mark.parametrize(("ends", "then"), [(None, [7]), (3, [3, 7]), ([3, 7], [3, 7])])
def test_generation_ends_at_a_new_end_token_too(ends: Any, then: list[int]) -> None:
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))
    _end_at(model, 7)
    assert model.generation_config.eos_token_id == then
