"""A mixture trained by TRL's arguments has TRL's loss: that of its router is in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import tqdm
from tests.finetune.tiny_model import tiny_model, tiny_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

from roundpipe import ConfigError, ModelError, RoundPipe, RoundPipeTrainer
from roundpipe.finetune.trainer import setting_up
from roundpipe.finetune.trainer.router_loss import set_router_loss

if TYPE_CHECKING:
    from pathlib import Path

ROWS = [{"input_ids": [(7 * i + 3 * j) % 256 for j in range(5 + i % 3)]} for i in range(6)]

# TRL sets a name that transformers is about to leave out
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


def mixture(**more: Any) -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=260,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        eos_token_id=257,
        pad_token_id=258,
        bos_token_id=None,
        router_aux_loss_coef=0.5,
        **more,
    )
    return MixtralForCausalLM(config).train()


def usual(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "max_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def ours(model: Any, args: Any) -> RoundPipeTrainer:
    return RoundPipeTrainer(model, args, train_dataset=ROWS, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("coefficient", [None, 0.1, 0.0])
def test_a_mixture_has_the_loss_that_trl_gives_it(tmp_path: Path, coefficient: Any) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    def args(name: str) -> Any:
        values = {**usual(tmp_path / name), "bf16": False, "router_aux_loss_coef": coefficient}
        return trl.SFTConfig(**values)

    theirs = trl.SFTTrainer(
        mixture(),
        args("theirs"),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tiny_tokenizer(),
    )
    expected = losses(theirs)
    with ours(mixture(output_router_logits=coefficient == 0.0), args("ours")) as trainer:
        assert losses(trainer) == pytest.approx(expected, rel=1e-5)


def test_a_mixture_by_transformers_arguments_does_as_its_config_says(tmp_path: Path) -> None:
    by_flag = []
    for flag in (False, True):
        args = TrainingArguments(**usual(tmp_path))
        with ours(mixture(output_router_logits=flag), args) as trainer:
            by_flag.append(losses(trainer)[0])
    assert by_flag[1] > by_flag[0] + 0.5


def test_a_wrapped_mixture_keeps_its_coefficient(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    args = trl.SFTConfig(**usual(tmp_path), bf16=False)
    with ours(mixture(), args) as trainer:
        expected = losses(trainer)
    with RoundPipe(mixture(), devices="cpu") as pipe:
        with ours(pipe, args) as trainer:
            assert losses(trainer) == expected
        args.router_aux_loss_coef = 0.25
        with pytest.raises(ConfigError, match=r"0\.25 changes the model.* RoundPipe"):
            ours(pipe, args)


def test_a_coefficient_for_a_model_without_a_router_is_an_error() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router's loss"):
        set_router_loss(tiny_model(), 0.1)
    assert set_router_loss(tiny_model(), None) == set_router_loss(tiny_model(), 0.0) == 0


def test_a_router_whose_loss_cannot_be_had_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")

    def gathers_itself(job: Any) -> Any:
        raise ModelError("output_router_logits is not supported for a model that gathers it")

    monkeypatch.setattr(setting_up, "wrapped_for_run", gathers_itself)
    with pytest.raises(ConfigError, match=r"router's loss.*\n.*router_aux_loss_coef=0") as caught:
        ours(mixture(), trl.SFTConfig(**usual(tmp_path), bf16=False))
    assert isinstance(caught.value.__cause__, ModelError)
