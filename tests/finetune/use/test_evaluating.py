from __future__ import annotations

import io
import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.finetune.tiny_model import tiny_model, tiny_tokenizer, write_tiny_folder
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.collate import collate
from roundpipe.finetune.model.from_transformers import quiet_transformers
from roundpipe.finetune.output.sample import Answerer
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.run.signals import Stop
from roundpipe.finetune.settings.config import TrainConfig, make_config
from roundpipe.finetune.use.eval_wish import Choice
from roundpipe.finetune.use.evaluating import (
    Exam,
    Scores,
    base_of,
    evaluate_subject,
    questions_in,
)
from roundpipe.finetune.use.opened import open_tokenizer
from roundpipe.finetune.use.questions import AnswerPattern
from roundpipe.finetune.use.scored_data import load_scored, scored_config
from roundpipe.finetune.use.subject import find_subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

THE_RUNS = Choice()  # the data that the run has evaluated on


def exam_of(
    given: str, settings: TrainConfig, choice: Choice = THE_RUNS, **more: Any
) -> tuple[Any, Exam]:
    terminal = Terminal(io.StringIO())
    subject = find_subject(given, terminal)
    config = scored_config(settings, choice)
    tokenizer = open_tokenizer(subject, config, terminal)
    data = load_scored(config, choice, tokenizer, terminal, environment={})
    asked: Any = ()
    if pattern := more.get("pattern"):
        asked, _ = questions_in(data.samples, tokenizer, pattern, told=data.name)
    return subject, Exam(data.samples, config, tokenizer, asked, **more)


def score(
    given: str, settings: TrainConfig, choice: Choice = THE_RUNS, **more: Any
) -> tuple[Scores, list[str]]:
    subject, exam = exam_of(given, settings, choice, **more)
    return scored(subject, exam)


def scored(subject: Any, exam: Exam, stop: Stop | None = None) -> tuple[Scores, list[str]]:
    shown = io.StringIO()
    found = evaluate_subject(subject, exam, Terminal(shown), environment={}, stop=stop or Stop())
    return found, shown.getvalue().splitlines()


def last_evaluation(config: TrainConfig) -> float:
    lines = Path(config.output_dir, "trainer_log.jsonl").read_text().splitlines()
    return [r["eval_loss"] for r in map(json.loads, lines) if "eval_loss" in r][-1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"devices": "cpu*3", "micro_batch_size": 1, "dtype": "bf16"},
        {"finetuning_type": "full", "packing": True, "max_length": 200},
        {"finetuning_type": "qlora"},
    ],
)
def test_a_result_scores_what_the_run_itself_has_last_evaluated(
    config_of: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    if changes.get("finetuning_type") == "qlora":  # smaller matrices are not packed
        with quiet_transformers():
            base = write_tiny_folder(tmp_path / "base", hidden_size=64, intermediate_size=128)
        changes = {**changes, "model_name_or_path": str(base)}
    config = config_of(val_size=5, eval_steps=3, batch_size=4, **changes)
    train(config, terminal=Terminal(io.StringIO()))
    found, _ = score(config.output_dir, config)
    assert found.loss.loss == last_evaluation(config)
    assert found.loss.perplexity == math.exp(found.loss.loss)
    assert found.loss.samples == 5
    assert found.is_whole


def plain_loss(model: Any, samples: Sequence[Any]) -> tuple[float, int]:
    """Mean loss per trained token by transformers alone, a sample at a time."""
    total, count = 0.0, 0
    for sample in samples:
        batch = collate([sample], 0)
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(**batch).loss) * tokens
        count += tokens
    return total / count, count


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_loss_is_that_of_plain_transformers_whatever_the_batches(
    tiny_folder: Path, tiny_data: Path, size: int
) -> None:
    settings = make_config(
        {"model": str(tiny_folder), "dataset": str(tiny_data), "batch_size": size, "devices": "cpu"}
    )[0]
    subject, exam = exam_of(str(tiny_folder), settings, Choice(is_named=True))
    found, _ = scored(subject, exam)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    loss, tokens = plain_loss(model, exam.samples)
    assert found.loss.loss == pytest.approx(loss, rel=1e-6)  # sums in another order
    assert (found.loss.trained, found.loss.samples) == (tokens, 12)
    assert found.loss.tokens == sum(len(sample) for sample in exam.samples)
    assert found.answers is None


def test_another_family_with_its_table_of_positions(tmp_path: Path, tiny_data: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=257, eos_token_id=257)).eval()
    with quiet_transformers():
        model.save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    given = {"model": str(tmp_path / "gpt2"), "dataset": str(tiny_data), "devices": "cpu"}
    settings = make_config({**given, "max_length": 48})[0]
    subject, exam = exam_of(str(tmp_path / "gpt2"), settings, Choice(is_named=True))
    found, _ = scored(subject, exam)
    assert found.loss.loss == pytest.approx(plain_loss(model, exam.samples)[0], rel=1e-5)
    with pytest.raises(ConfigError, match=r"positions for 48\nhint: max_length=48"):
        score(given["model"], make_config(given)[0], Choice(is_named=True))


@pytest.fixture(scope="module")
def taught(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    """A run that has learned two of three answers, and questions of different lengths."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [
        {"question": "a", "answer": "it is 1,234"},
        {"question": "bb bb bb bb bb bb bb", "answer": "it is 7"},
    ]
    data = folder / "taught.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = {"question": "ccc", "answer": "it is 99999"}
    plain = {"question": "d", "answer": "no number"}
    asked = [rows[0] | {"answer": "so it is 1234."}, other, plain, rows[1]]
    exam = folder / "exam.jsonl"
    exam.write_text("".join(json.dumps(row) + "\n" for row in asked))
    config = make_config(
        {
            "model_name_or_path": str(tiny_folder),
            "dataset": str(data),
            "eval_dataset": str(exam),
            "eval_strategy": "no",
            "save_strategy": "no",
            "output_dir": str(folder / "out"),
            "devices": "cpu",
            "finetuning_type": "full",
            "batch_size": 2,
            "max_steps": 60,
            "learning_rate": 1e-2,
        }
    )[0]
    train(config, terminal=Terminal(io.StringIO()))
    return config, folder


NUMBER = AnswerPattern("it is ([0-9.,]+)")


def test_answers_that_are_right_are_counted(taught: tuple[TrainConfig, Path]) -> None:
    config, _ = taught
    found, lines = score(config.output_dir, config, pattern=NUMBER, max_new_tokens=16)
    assert found.answers is not None
    rows = [each.asked.row for each in found.answers.given]
    assert rows == [0, 1, 3]  # the order of the data, without the one that has no number
    answers = {each.asked.row: each for each in found.answers.given}
    assert answers[0].answer == "it is 1,234"
    assert (answers[0].asked.wanted, answers[0].is_match) == ("1234.", True)
    assert answers[3].is_match
    assert not answers[1].is_match
    assert (found.answers.matches, found.answers.total) == (2, 3)
    assert found.answers.share == pytest.approx(2 / 3)
    assert any(line.startswith("resident on cpu") for line in lines)


@pytest.mark.parametrize(
    "how",
    [{"at_once": 1}, {"at_once": 3}, {"at_once": 8}, {"device_memory_limit": 96_000}],
    ids=str,
)
def test_answers_hang_neither_on_how_many_are_asked_at_once_nor_on_where_weights_are(
    taught: tuple[TrainConfig, Path], how: dict[str, Any]
) -> None:
    config, _ = taught
    limit = how.pop("device_memory_limit", None)
    usual, _ = score(config.output_dir, config, pattern=NUMBER, max_new_tokens=16)
    settings = config.model_copy(update={"device_memory_limit": limit})
    found, lines = score(config.output_dir, settings, pattern=NUMBER, max_new_tokens=16, **how)
    assert usual.answers is not None
    assert found.answers is not None
    assert [a.answer for a in found.answers.given] == [a.answer for a in usual.answers.given]
    assert any(line.startswith("streamed") for line in lines) == (limit is not None)


def test_the_base_is_scored_on_the_same_questions(config_of: Any, tiny_folder: Path) -> None:
    config = config_of(val_size=5, eval_strategy="no")
    train(config, terminal=Terminal(io.StringIO()))
    subject, exam = exam_of(config.output_dir, config)
    base = base_of(subject, Terminal(io.StringIO()))
    found, _ = scored(base, exam)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert found.loss.loss == pytest.approx(plain_loss(model, exam.samples)[0], rel=1e-6)
    assert found.name == tiny_folder.name


def test_the_base_of_a_full_run_is_the_model_it_began_with(
    taught: tuple[TrainConfig, Path], tiny_folder: Path
) -> None:
    config, _ = taught
    terminal = Terminal(io.StringIO())
    subject = find_subject(config.output_dir, terminal)
    base = base_of(subject, terminal)
    assert Path(base.source.location) == tiny_folder
    with pytest.raises(ConfigError, match="compare=base: no adapter, and no run"):
        base_of(base, terminal)


def test_an_unfinished_run_is_scored_by_its_newest_checkpoint(config_of: Any) -> None:
    config = config_of(val_size=5, eval_steps=2, max_steps=2, save_steps=2)
    train(config, terminal=Terminal(io.StringIO()))
    for name in ("trainer_state.json", "adapter_model.safetensors", "adapter_config.json"):
        Path(config.output_dir, name).unlink()
    found, _ = score(config.output_dir, config)
    assert found.loss.loss == last_evaluation(config)


def test_a_signal_ends_it_after_the_batch_and_what_was_reached_counts(
    taught: tuple[TrainConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = taught
    subject, exam = exam_of(config.output_dir, config, pattern=NUMBER, max_new_tokens=4)
    stop = Stop()
    answers = Answerer.answers

    def interrupted(self: Answerer, prompts: Any, **more: Any) -> list[str]:
        if len(prompts) == 1:  # the second batch
            stop.handle(signal.SIGINT)
        return answers(self, prompts, **more)

    monkeypatch.setattr(Answerer, "answers", interrupted)
    found, _ = scored(subject, replace(exam, at_once=2), stop)
    assert found.answers is not None
    assert (len(found.answers.given), found.answers.total) == (2, 3)
    assert found.loss.is_whole
    assert not found.is_whole


def test_a_signal_while_the_loss_is_made_leaves_the_answers_out(
    taught: tuple[TrainConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.use import evaluating

    config, _ = taught
    stop = Stop()
    batches = evaluating.batches_of

    def interrupted(*args: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(*args)):
            if number == 0:
                stop.handle(signal.SIGINT)
            yield batch

    monkeypatch.setattr(evaluating, "batches_of", interrupted)
    subject, exam = exam_of(config.output_dir, config, pattern=NUMBER)
    found, _ = scored(subject, exam, stop)
    assert found.answers is None
    assert (found.loss.samples, found.loss.is_whole) == (0, False)
    assert math.isnan(found.loss.perplexity)


def test_a_loss_beyond_all_bounds_has_an_infinite_perplexity() -> None:
    from roundpipe.finetune.use.evaluating import Loss

    assert Loss(1e4, 1, 1, 1, 0.0).perplexity == math.inf
    assert Loss(1e4, 1, 1, 1, 0.0).tokens_per_second == 0


def test_tokens_that_the_model_has_no_row_for_are_named(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.pad_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    model.resize_token_embeddings(200)
    with quiet_transformers():
        model.save_pretrained(tmp_path / "small")
    tiny_tokenizer().save_pretrained(tmp_path / "small")
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    settings = make_config({"model": str(tmp_path / "small"), "dataset": str(data)})[0]
    with pytest.raises(ConfigError, match="makes tokens that the model does not have"):
        score(str(tmp_path / "small"), settings, Choice(is_named=True))
