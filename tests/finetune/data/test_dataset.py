from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.dataset import Dataset, Sample, load_dataset, marked_sample, stats_of
from roundpipe.finetune.settings.config import make_config

if TYPE_CHECKING:
    from types import ModuleType

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tiny_tokenizer", Path(__file__).parents[1] / "tiny_tokenizer.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _load()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make()


def write(folder: Path, rows: list[Any], name: str = "d.jsonl") -> str:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def pairs(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(count)]


def load(dataset: Any, tokenizer: Any, **changes: Any) -> Dataset:
    config, _ = make_config({"model": "m", "dataset": dataset, **changes})
    return load_dataset(config, tokenizer)


def answers(samples: list[Sample], tokenizer: Any) -> list[str]:
    return ["".join(tiny.trained_runs(sample, tokenizer)) for sample in samples]


def test_samples_stand_in_the_order_of_the_files(tmp_path: Path, tokenizer: Any) -> None:
    first, second = write(tmp_path, pairs(3)), write(tmp_path, pairs(2), "e.jsonl")
    data = load([first, {"path": second, "max_samples": 1}], tokenizer)
    assert answers(data.samples, tokenizer) == [f"It is {i}.<|im_end|>" for i in (0, 1, 2, 0)]


def test_more_rows_than_a_chunk_keep_their_order(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[int] = []
    config, _ = make_config({"model": "m", "dataset": write(tmp_path, pairs(600))})
    data = load_dataset(config, tokenizer, progress=seen.append)
    assert answers(data.samples, tokenizer) == [f"It is {i}.<|im_end|>" for i in range(600)]
    assert seen == [256, 512]


def test_the_account_counts_tokens_and_lengths(tmp_path: Path, tokenizer: Any) -> None:
    data = load(write(tmp_path, pairs(10)), tokenizer)
    lengths = [len(sample.input_ids) for sample in data.samples]
    trained = sum(label != -100 for sample in data.samples for label in sample.labels)
    assert (data.stats.samples, data.stats.tokens) == (10, sum(lengths))
    assert (data.stats.trained, data.stats.max_length) == (trained, max(lengths))
    assert data.describe()[0] == (
        f"10 samples, {sum(lengths)} tokens, {100 * trained / sum(lengths):.0f} % trained"
    )


def test_percentiles_are_the_nearest_rank() -> None:
    samples = [Sample([0] * n, [0] * n) for n in (4, 1, 3, 2, 10, 6, 5, 8, 9, 7)]
    stats = stats_of(samples)
    assert (stats.median_length, stats.p90_length, stats.max_length) == (5, 9, 10)
    assert stats_of([]).median_length == 0
    assert stats_of(samples[:1]).p90_length == 4


# truncation, and samples that teach nothing


def long_rows() -> list[dict[str, str]]:
    """Two short samples, one with a long answer, one whose question fills the length."""
    return [
        *pairs(2),
        {"question": "Why?", "answer": "x" * 200},
        {"question": "y" * 200, "answer": "No."},
    ]


def test_cut_samples_are_counted_and_those_without_answer_left_out(
    tmp_path: Path, tokenizer: Any
) -> None:
    data = load(write(tmp_path, long_rows()), tokenizer, max_length=100)
    assert [len(sample.input_ids) <= 100 for sample in data.samples] == [True] * 3
    assert (data.account.cut, data.account.lost) == (2, 1)
    assert "warning: 2 of 4 cut at max_length 100" in data.describe()
    assert "warning: 1 of 4 left out, no trained token" in data.describe()


def test_long_samples_can_be_dropped_or_be_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, long_rows())
    data = load(path, tokenizer, max_length=100, truncation="drop")
    assert (len(data.samples), data.account.dropped) == (2, 2)
    with pytest.raises(DataError, match=r"longer than max_length 100: 2\d\d tokens \(.*, line 3\)"):
        load(path, tokenizer, max_length=100, truncation="error")


@pytest.mark.parametrize("truncation", ["cut", "drop"])
def test_a_run_that_would_train_on_nothing_stops(
    truncation: str, tmp_path: Path, tokenizer: Any
) -> None:
    rows = [{"question": "y" * 200, "answer": "No."}] * 3
    with pytest.raises(DataError, match=r"nothing to train on: of 3 rows .*\nhint: a larger max_l"):
        load(write(tmp_path, rows), tokenizer, max_length=100, truncation=truncation)


def test_a_run_that_would_lose_most_of_its_rows_stops(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*pairs(2), *[{"question": "y" * 200, "answer": "No."}] * 3]
    with pytest.raises(DataError, match=r"of 5 rows of .* 3 have no trained token"):
        load(write(tmp_path, rows), tokenizer, max_length=100)


def test_conversations_without_an_answer_are_lost(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    with pytest.raises(DataError, match="nothing to train on"):
        load(write(tmp_path, rows), tokenizer)


# bad lines


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "broken JSON: {path}, line 3, column 2"),
        ('{"question": "q", "answer": 3}', r"answer is not a string: 3 \({path}, line 3\)\nhint"),
        ('{"question": "q"}', r"no column answer; there are: question \({path}, line 3\)"),
        ('{"question": "q", "answer": "\\ud800"}', r"not a character: '\\ud800' \({path}, line 3"),
    ],
)
def test_a_bad_line_stops_with_its_place_or_is_skipped_and_counted(
    line: str, message: str, tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path, [*pairs(2), line, *pairs(1)])
    with pytest.raises(DataError, match=message.format(path=path)):
        load(path, tokenizer)
    data = load(path, tokenizer, on_bad_line="skip")
    assert len(data.samples) == 3
    assert len(data.account.skipped) == 1
    assert data.describe()[-1].startswith("warning: 1 of 4 skipped, the first: ")
    assert "line 3" in data.describe()[-1]


def test_a_template_that_cannot_be_trained_with_stops_also_where_lines_are_skipped(
    tmp_path: Path,
) -> None:
    turns = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": "x"} for role in turns]}
    tokenizer = tiny.make(tiny.REWRITES)
    with pytest.raises(ConfigError, match=r"tiny/model writes answer 2 .* line 1\)\nhint: mask"):
        load(write(tmp_path, [row]), tokenizer, on_bad_line="skip")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"input_ids": [1, 99_999]}])
    with pytest.raises(DataError, match=r"not a token of this tokenizer: 99999.* line 1\)"):
        load(path, tokenizer)


def test_columns_that_are_not_used_and_doubled_begins_are_said(tmp_path: Path) -> None:
    doubled = tiny.make(tiny.DOUBLED)
    path = write(tmp_path, [{**pair, "id": 1} for pair in pairs(2)])
    lines = load(path, doubled).describe()
    assert f"{path}: question/answer; columns not used: id" in lines
    assert any(
        line.startswith("warning: 2 of 2 start with the begin token twice") for line in lines
    )


def test_a_model_without_template_is_said(tmp_path: Path) -> None:
    bare = tiny.make(None, eos="</s>")
    data = load(write(tmp_path, pairs(2)), bare)
    assert answers(data.samples, bare) == ["It is 0.</s>", "It is 1.</s>"]
    assert "no chat template: prompt and answer are joined as they stand" in data.describe()


def test_the_template_that_is_named_is_what_the_tokenizer_keeps(tmp_path: Path) -> None:
    bare = tiny.make(None)
    data = load(write(tmp_path, pairs(1)), bare, chat_template="chatml")
    assert answers(data.samples, bare) == ["It is 0.<|im_end|>"]
    assert bare.chat_template


# evaluation data


def test_held_out_samples_are_not_trained_on_and_hang_on_the_data_seed(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = write(tmp_path, pairs(20))
    data = load(path, tokenizer, val_size=0.25)
    train, held_out = answers(data.samples, tokenizer), answers(data.eval_samples, tokenizer)
    assert (len(train), len(held_out)) == (15, 5)
    assert not set(train) & set(held_out)
    again = load(path, tokenizer, val_size=5, seed=7, data_seed=42)
    assert again.eval_samples == data.eval_samples
    other = load(path, tokenizer, val_size=5, seed=7)
    assert other.eval_samples != data.eval_samples


def test_an_evaluation_file_is_read_like_the_dataset(tmp_path: Path, tokenizer: Any) -> None:
    train, held_out = write(tmp_path, pairs(3)), write(tmp_path, pairs(2), "e.jsonl")
    data = load(train, tokenizer, eval_dataset=held_out)
    assert (len(data.samples), len(data.eval_samples)) == (3, 2)
    assert any(line.startswith("evaluation: 2 samples") for line in data.describe())


def test_holding_out_everything_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, pairs(2))
    with pytest.raises(DataError, match="val_size: 2 leaves nothing to train on"):
        load(path, tokenizer, val_size=2)


# one sample as text


def test_a_marked_sample_shows_what_is_trained(tmp_path: Path, tokenizer: Any) -> None:
    sample = load(write(tmp_path, pairs(1)), tokenizer).samples[0]
    assert marked_sample(sample, tokenizer) == (
        "<|im_start|>user⏎What is 0?<|im_end|>⏎<|im_start|>assistant⏎▌It is 0.<|im_end|>▐⏎"
    )


def test_a_marked_sample_shortens_long_runs_in_the_middle(tmp_path: Path, tokenizer: Any) -> None:
    row = {"question": "q" * 300, "answer": "a" * 300}
    text = marked_sample(load(write(tmp_path, [row]), tokenizer).samples[0], tokenizer, width=40)
    assert "assistant⏎▌aaa" in text
    assert "aaa<|im_end|>▐⏎" in text
    assert " … " in text
    assert len(text) < 100
    whole = marked_sample(load(write(tmp_path, [row]), tokenizer).samples[0], tokenizer, width=None)
    assert "a" * 300 in whole


# real questions


@pytest.mark.skipif(not GSM8K.exists(), reason="the questions of GSM8K are not on this machine")
def test_real_questions_train_their_whole_answers(tokenizer: Any) -> None:
    data = load({"path": str(GSM8K), "max_samples": 40}, tokenizer)
    with GSM8K.open() as file:
        rows = [json.loads(line) for line, _ in zip(file, range(40), strict=False)]
    assert answers(data.samples, tokenizer) == [f"{row['answer']}<|im_end|>" for row in rows]
    assert data.account.lost == 0
