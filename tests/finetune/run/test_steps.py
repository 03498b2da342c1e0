"""Steps in every form of weights and state that a config can ask for."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from tests.finetune.plain_loop import plain_run
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run import training
from roundpipe.finetune.run.loop import train
from roundpipe.optim.scaler import GradScaler

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from roundpipe.roundpipe import RoundPipe

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(scope="session")
def packable_folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices are all large enough to be packed."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4}
    folder: Path = tiny.write_tiny_folder(tmp_path_factory.mktemp("packable"), **sizes)
    return folder


def run(config: Any) -> tuple[list[dict[str, Any]], str]:
    """The log's records, and what was shown."""
    stream = io.StringIO()
    result = train(config, terminal=Terminal(stream))
    assert result is not None
    return result.history, stream.getvalue()


def test_qlora_trains_as_plain_bitsandbytes_and_peft_do(
    config_of: Any, packable_folder: Path
) -> None:
    model = {"model_name_or_path": str(packable_folder), "sample_prompts": ["what is 1 + 1?"]}
    config = config_of(finetuning_type="qlora", max_steps=4, devices="cpu*2", **model)
    history, shown = run(config)
    assert " · QLoRA r=4 (" in shown
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        packable_folder, dtype=torch.float32, quantization_config=in_4_bits
    )
    plain, trained = plain_run(config, base)
    for ours, theirs in zip(history, plain, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(packable_folder), config.output_dir
    )
    expected = {n: p for n, p in trained.named_parameters() if p.requires_grad}
    found = {n: p for n, p in stock.named_parameters() if n in expected}
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name] - parameter).abs().max() < 1e-3, name


def test_modules_that_are_saved_whole_are_not_in_4_bits(
    config_of: Any, packable_folder: Path
) -> None:
    qlora = {"model_name_or_path": str(packable_folder), "finetuning_type": "qlora"}
    with pytest.raises(ConfigError, match=r"(?s)weights in 4 bits.*mlp.*hint: modules_to_save"):
        run(config_of(modules_to_save=["mlp"], **qlora))
    history, _ = run(config_of(modules_to_save=["model.norm"], val_size=3, eval_steps=2, **qlora))
    assert all(record.get("loss", 1.0) > 0 for record in history)
    held = [record["eval_loss"] for record in history if "eval_loss" in record]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("dtype", "moments", "optim_dtype"),
    [("bf16", "int8", torch.bfloat16), ("fp32", "bf16", None)],
)
def test_moments_are_kept_as_asked_and_bf16_weights_are_their_own_masters_then(
    config_of: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    moments: str,
    optim_dtype: torch.dtype | None,
) -> None:
    made: list[Any] = []
    make = training.make_optimizer

    def watched(config: Any, trainer: RoundPipe) -> Any:
        made.append(make(config, trainer))
        return made[-1]

    monkeypatch.setattr(training, "make_optimizer", watched)
    config = config_of(
        finetuning_type="full",
        dtype=dtype,
        optim_state_dtype=moments,
        learning_rate=1e-3,
        max_steps=6,
        batch_size=12,
    )
    history, _ = run(config)
    losses = [record["loss"] for record in history]
    assert losses[-1] < losses[0]
    (optimizer,) = made
    master, state = next(iter(optimizer.state.items()))
    narrow = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
    assert state["exp_avg"].dtype == narrow[moments]
    assert master.dtype == (optim_dtype or torch.float32)
    assert ("remainder" in state) == (optim_dtype is not None)


def test_narrow_moments_come_close_to_wide_ones(config_of: Any, tmp_path: Path) -> None:
    full = {"finetuning_type": "full", "dtype": "bf16", "learning_rate": 1e-3, "max_steps": 4}
    wide, narrow = (
        run(config_of(**full, optim_state_dtype=m, output_dir=str(tmp_path / m)))[0]
        for m in ("fp32", "int8")
    )
    for one, other in zip(wide, narrow, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)


def test_fp16_scales_its_loss_and_a_skipped_step_counts_for_no_schedule(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_much = functools.partial(GradScaler, init_scale=2.0**22)
    monkeypatch.setattr(training, "GradScaler", too_much)
    history, shown = run(config_of(dtype="fp16", max_steps=12, warmup_steps=3, batch_size=12))
    skipped = [record.get("skipped", False) for record in history]
    first = skipped.index(False)
    assert 0 < first < 10
    assert not any(skipped[first:])
    assert shown.count("changed nothing") == first
    rates = [record["learning_rate"] for record in history]
    # Warm-up begins with the first step that changed something; its own rate is 0.
    assert rates[: first + 1] == [0.0] * (first + 1)
    assert rates[first + 1] == pytest.approx(1e-2 / 3)
    losses = [record["loss"] for record in history]
    assert losses[0] == losses[first]
    assert losses[-1] < losses[0] < 10  # as if it were not scaled


def test_limits_reach_the_trainer(config_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def made(*_: Any, **settings: Any) -> RoundPipe:
        given.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "RoundPipe", made)
    with pytest.raises(KeyboardInterrupt):
        run(config_of(pinned_memory_limit="1GB", device_memory_limit="2GB"))
    assert (given["pinned_memory_limit"], given["device_memory_limit"]) == (10**9, 2 * 10**9)
    assert given["grad_scaler"] is None
    assert len(given["bases"]) > 0
