"""A trainer by the names of TRL's: what it trains, what of it is kept, what it refuses."""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import tqdm
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from tests.finetune.tiny_model import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from roundpipe import ConfigError, RoundPipe, RoundPipeTrainer
from roundpipe.errors import NoRoomError, StepError
from roundpipe.finetune.trainer.refusals import refuse_launcher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

ROWS = [
    {"input_ids": [(5 * i + 3 * j) % 256 for j in range(6 + i % 5)], "labels": None}
    for i in range(9)
]
for _row in ROWS:
    _row["labels"] = [-100, *_row["input_ids"][1:]]  # type: ignore[index, misc]


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars of others start no thread that outlives them."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Make trainers; they are closed in the end."""
    made: list[RoundPipeTrainer] = []

    def make(model: Any = None, *, more: dict[str, Any] | None = None, **args: Any) -> Any:
        usual = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "max_steps": 4,
            "train_sampling_strategy": "sequential",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
        }
        made.append(
            RoundPipeTrainer(
                tiny_model().train() if model is None else model,
                TrainingArguments(**{**usual, **args}),
                **{
                    "train_dataset": ROWS,
                    "processing_class": tiny_tokenizer(),
                    **(more or {}),
                },
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_a_run_gives_what_transformers_gives_and_its_model_opens_in_stock_transformers(
    make: Any, tmp_path: Path
) -> None:
    trainer = make(more={"eval_dataset": ROWS[:3]}, eval_strategy="steps", eval_steps=2)
    before = trainer.evaluate()
    assert before.keys() >= {"eval_loss", "eval_runtime", "eval_samples_per_second", "epoch"}
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == 4
    assert (
        output.metrics["train_loss"]
        == output.training_loss
        == pytest.approx(sum(losses(trainer)) / 4)
    )
    assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
    assert trainer.plan is not None
    trainer.save_model()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(stock.state_dict()[name], weight), name
    lines = (tmp_path / "out" / "trainer_log.jsonl").read_text().splitlines()
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert [json.loads(line)["step"] for line in lines] == [r["step"] for r in state["log_history"]]
    trainer.save_model(tmp_path / "elsewhere")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")
    assert torch.equal(again.lm_head.weight, stock.lm_head.weight)


def test_an_adapter_is_trained_saved_and_opened_by_stock_peft(make: Any, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_alpha=7)
    trainer = make(more={"peft_config": lora})
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    stock = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    assert stock.peft_config["default"].lora_alpha == 7
    found = dict(stock.named_parameters())
    trained = {n: p for n, p in trainer.model.named_parameters() if "lora_" in n}
    assert trained
    for name, weight in trained.items():
        assert torch.equal(found[name], weight), name


def test_what_is_saved_ends_where_the_tokenizer_ends(make: Any, tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 5  # of texts before
    make(model).save_model(tmp_path / "full")
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert stock.generation_config.eos_token_id == [5, 257]


def test_a_model_under_peft_and_a_roundpipe_train_as_the_same_from_a_config(make: Any) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

    def under_peft() -> Any:
        torch.manual_seed(5)
        return get_peft_model(tiny_model().train(), lora)

    first = make(under_peft())
    first.train()
    pipe = RoundPipe(under_peft(), devices="cpu", seed=42)
    second = make(pipe)
    second.train()
    assert losses(first) == losses(second)
    second.close()
    assert pipe.plan is not None
    pipe.synchronize()  # whoever made it closes it
    pipe.close()


def test_a_run_that_stops_goes_on_to_the_same_bits(make: Any, tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            if state.global_step == 3:
                raise_signal()

    def raise_signal() -> None:
        signal.raise_signal(signal.SIGINT)

    whole = make(max_steps=6, output_dir=str(tmp_path / "whole"), num_train_epochs=2)
    whole.train()
    trainer = make(max_steps=6, more={"callbacks": [Interrupts()]})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-3").is_dir()
    assert trainer.chat("so", max_new_tokens=2) is not None  # it is usable
    trainer.pop_callback(Interrupts)
    again = make(max_steps=6)  # a new process, say
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(trainer) == losses(whole)


def test_training_again_begins_anew_with_the_weights_as_they_are(make: Any) -> None:
    trainer = make()
    trainer.train()
    first = losses(trainer)
    trainer.train()
    assert trainer.state.global_step == 4
    assert losses(trainer)[0] < first[0]
    assert len(losses(trainer)) == 4


def test_checkpoints_of_another_program_are_not_touched(make: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "out" / "checkpoint-9" / "optimizer.pt"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("theirs")
    with pytest.raises(ConfigError, match=r"another program.*checkpoint-9\nhint: output_dir"):
        make().train()
    assert foreign.exists()


def test_going_on_without_a_checkpoint_says_so(make: Any) -> None:
    with pytest.raises(ConfigError, match="no checkpoint to go on from"):
        make().train(resume_from_checkpoint=True)


def token_mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return total / num_items_in_batch


def test_a_loss_function_is_called_for_each_microbatch_and_summed(make: Any) -> None:
    plain = make(more={"eval_dataset": ROWS[:3]})
    own = make(more={"compute_loss_func": token_mean, "eval_dataset": ROWS[:3]})
    plain.train()
    own.train()
    assert losses(own) == pytest.approx(losses(plain), rel=1e-5)
    expected = plain.evaluate()["eval_loss"]
    assert own.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_smoothed_labels_are_smoothed(make: Any) -> None:
    plain, smoothed = make(), make(label_smoothing_factor=0.1)
    plain.train()
    smoothed.train()
    assert losses(smoothed)[0] != pytest.approx(losses(plain)[0], rel=1e-4)
    assert losses(smoothed)[-1] < losses(smoothed)[0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_over_the_models_parameters_steps_their_masters(make: Any, kind: Any) -> None:
    model = tiny_model().train()
    optimizer = kind(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    trainer = make(model, more={"optimizers": (optimizer, scheduler)})
    trainer.train()
    rates = [record["learning_rate"] for record in trainer.state.log_history[:-1]]
    assert rates == pytest.approx([0.5, 0.25, 0.5 / 3, 0.125])
    assert isinstance(trainer.optimizer, kind)
    plain = tiny_model().train()
    reference = kind(plain.parameters(), lr=0.5)
    for at, rate in enumerate(rates[:2]):
        reference.param_groups[0]["lr"] = rate
        batch = trainer._made.job.batches.batch(
            trainer._made.data.dataset.samples, trainer._made.data.order.rows(at + 1)
        )
        loss = plain(**batch).loss
        assert losses(trainer)[at] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        reference.zero_grad()


def test_an_optimizer_of_another_model_is_refused(make: Any) -> None:
    optimizer = torch.optim.AdamW(tiny_model().parameters())
    with pytest.raises(ConfigError, match="a parameter that the model does not have"):
        make(more={"optimizers": (optimizer, None)})


def test_a_step_that_runs_out_of_memory_is_made_again_and_told_of_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counts(TrainerCallback):
        seen = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seen += 1

    counts = Counts()
    trainer = make(more={"callbacks": [counts]}, per_device_train_batch_size=9)
    real, failed = trainer.model.forward_backward, []

    def once(*args: Any, **kwargs: Any) -> Any:
        if len(failed) < 1 and trainer.state.global_step == 2:
            failed.append(1)
            raise torch.OutOfMemoryError("too much")
        return real(*args, **kwargs)

    monkeypatch.setitem(trainer.model.__dict__, "forward_backward", once)
    trainer.train()
    assert failed
    assert counts.seen == trainer.state.global_step == 4


class Sees(TrainerCallback):
    """All that happens around steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("begin", state.global_step))

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("gradients", state.global_step))

    def on_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("update", state.global_step))

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(("end", state.global_step))


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_a_step_whose_update_had_no_room_is_given_again_and_told_of_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, logging_steps: int
) -> None:
    class Lost:
        """The result of a step that failed while the next was being made."""

        @property
        def grad_norm(self) -> Any:
            raise NoRoomError("too much")

        skipped = grad_norm

    whole, sees = Sees(), Sees()
    how = {"per_device_train_batch_size": 9, "logging_steps": logging_steps}
    plain = make(more={"callbacks": [whole]}, **how)
    plain.train()
    trainer = make(more={"callbacks": [sees]}, **how)
    real, failed = trainer.model.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not failed and trainer.state.global_step == 1:
            failed.append(1)
            trainer.model.zero_grad()
            return Lost()
        return real(*args, **kwargs)

    monkeypatch.setitem(trainer.model.__dict__, "step", step)
    trainer.train()
    assert failed
    assert sees.seen == whole.seen
    assert losses(trainer) == pytest.approx(losses(plain), rel=1e-5)


def test_what_fails_is_raised_after_a_checkpoint_and_the_trainer_stays_usable(
    make: Any, tmp_path: Path
) -> None:
    fails = [True]

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        if fails[0] and trainer.state.global_step == 2:
            raise RuntimeError("mine")
        return token_mean(outputs, labels, num_items_in_batch)

    trainer = make(more={"compute_loss_func": loss})
    with pytest.raises(StepError) as raised:
        trainer.train()
    assert "mine" in str(raised.value.__cause__ or raised.value)
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    fails[0] = False
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("compute_metrics", "roundpipe eval"),
        ("tokenizer", "processing_class"),
        ("model_init", "model=model_init"),
        ("learning_rat", "as in TRL"),
    ],
)
def test_an_argument_that_is_not_supported_is_refused_by_name(
    make: Any, name: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\nhint: .*{hint}"):
        make(more={name: object()})


def test_a_hook_that_nobody_would_call_is_refused(tmp_path: Path) -> None:
    class Mine(RoundPipeTrainer):
        def compute_loss(self, *_: Any) -> None:
            """Never called."""

    with pytest.raises(
        ConfigError, match=r"Mine overrides compute_loss.*\nhint: compute_loss_func"
    ):
        Mine(tiny_model(), {"output_dir": str(tmp_path)}, train_dataset=ROWS)


def test_every_public_name_of_a_trainer_is_here_or_named_with_a_way_out(make: Any) -> None:
    trainer = make()
    for name in (each for each in dir(Trainer) if not each.startswith("_")):
        if name not in dir(RoundPipeTrainer):
            with pytest.raises(AttributeError, match=rf"{name}\nhint: "):
                getattr(trainer, name)


def test_an_adapter_without_a_task_is_opened_by_pefts_own_class(make: Any, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    for number, task in enumerate((None, "CAUSAL_LM")):
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type=task)
        for at, is_given in enumerate((True, False)):
            model = AutoModelForCausalLM.from_pretrained(base)
            model = model if is_given else get_peft_model(model, lora)
            trainer = make(model, more={"peft_config": lora if is_given else None}, max_steps=1)
            trainer.save_model(tmp_path / f"{number}{at}")
            AutoPeftModelForCausalLM.from_pretrained(tmp_path / f"{number}{at}")


def test_an_optimizer_or_schedule_that_is_not_here_is_named_with_a_way_out(make: Any) -> None:
    for fields in ({"optim": "adafactor"}, {"lr_scheduler_type": "polynomial"}):
        with pytest.raises(ConfigError, match=r"optimizers=\(optimizer, scheduler\)"):
            make(**fields)


def test_a_trainer_that_nobody_closed_is_left_alone_when_python_ends(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        trainer.model.close()  # as what collects the garbage does then
    trainer.train()


def test_a_folder_may_be_a_path_and_what_is_no_model_is_refused(make: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    assert make(tmp_path / "base").config.model_name_or_path == str(tmp_path / "base")
    with pytest.raises(ConfigError, match="model is a int"):
        make(7)


def test_a_launcher_of_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 processes were started, and one drives all devices"):
        refuse_launcher(SimpleNamespace(world_size=8))


def test_prompts_of_our_own_settings_are_answered_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"output_dir": str(tmp_path / "o"), "devices": "cpu", "max_steps": 2, "method": "full"}
    args |= {"sample_prompts": ["so what"], "resume_from_checkpoint": "auto"}
    given = {"train_dataset": ROWS, "processing_class": tiny_tokenizer()}
    with RoundPipeTrainer(tiny_model().train(), args, **given) as trainer:
        trainer.train()
        trainer.save_model()
    shown = capsys.readouterr().out
    assert "before:" in shown
    assert "after:" in shown
    assert "roundpipe chat" in shown  # how the result is used
    with RoundPipeTrainer(tiny_model().train(), {**args, "max_steps": 3}, **given) as trainer:
        assert trainer.train().global_step == 3
    assert "going on from" in capsys.readouterr().out


def test_callbacks_may_look_at_the_batches(make: Any) -> None:
    class Looks(TrainerCallback):
        def on_train_begin(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
            assert len(train_dataloader) == 3
            assert [len(batch["labels"]) for batch in train_dataloader] == [4, 4, 1]

    make(more={"callbacks": [Looks]}, max_steps=1).train()


def test_what_it_has_not_says_what_to_do(make: Any) -> None:
    trainer = make()
    assert not hasattr(trainer, "push_to_hub")
    with pytest.raises(ConfigError, match="has no predict\nhint: evaluate"):
        trainer.predict(ROWS)
    with pytest.raises(AttributeError, match="nonsense"):
        trainer.nonsense  # noqa: B018
    trainer.close()
    with pytest.raises(ConfigError, match="closed"):
        trainer.train()


def test_one_that_is_dropped_ends_its_threads(make: Callable[..., Any], tmp_path: Path) -> None:
    before = threading.active_count()
    trainer = RoundPipeTrainer(
        tiny_model().train(),
        {"output_dir": str(tmp_path / "o"), "devices": "cpu", "max_steps": 1, "method": "full"},
        train_dataset=ROWS,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    assert threading.active_count() > before
    del trainer
    gc.collect()
    assert threading.active_count() == before


def test_our_own_settings_train_and_stop_early(make: Any, tmp_path: Path) -> None:
    args = {
        "output_dir": str(tmp_path / "o"),
        "devices": "cpu*2",
        "batch_size": 4,
        "num_train_epochs": 9,
        "learning_rate": 0.5,
        "finetuning_type": "full",
        "eval_steps": 1,
        "early_stopping_patience": 2,
        "load_best_model_at_end": True,
    }
    with RoundPipeTrainer(
        tiny_model().train(),
        args,
        train_dataset=ROWS,
        eval_dataset=ROWS[:4],
        processing_class=tiny_tokenizer(),
    ) as trainer:
        trainer.train()
        assert trainer.state.global_step < 27
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_it_answers_prompts_and_messages(make: Any) -> None:
    trainer = make()
    one = trainer.chat("so what", max_new_tokens=3)
    assert isinstance(one, str)
    assert trainer.chat([{"role": "user", "content": "so what"}], max_new_tokens=3) == one
    assert trainer.chat(["so what", "is"], max_new_tokens=3)[0] == one
    assert trainer.chat([]) == []
