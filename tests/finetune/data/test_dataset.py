from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.finetune import tiny_tokenizer as tiny

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.dataset import (
    Dataset,
    Sample,
    Samples,
    load_dataset,
    marked_sample,
    stats_of,
)
from roundpipe.finetune.settings.config import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"


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


def load(
    dataset: Any,
    tokenizer: Any,
    *,
    environment: Any = None,
    folder: Path | None = None,
    **changes: Any,
) -> Dataset:
    config, _ = make_config({"model": "m", "dataset": dataset, **changes})
    return load_dataset(config, tokenizer, environment=environment, folder=folder)


def answers(samples: Any, tokenizer: Any) -> list[str]:
    return ["".join(tiny.trained_runs(sample, tokenizer)) for sample in samples]


def test_samples_stand_in_the_order_of_the_files(tmp_path: Path, tokenizer: Any) -> None:
    first, second = write(tmp_path, pairs(3)), write(tmp_path, pairs(2), "e.jsonl")
    data = load([first, {"path": second, "max_samples": 1}], tokenizer)
    assert answers(data.samples, tokenizer) == [f"It is {i}.<|im_end|>" for i in (0, 1, 2, 0)]


def test_more_rows_than_a_chunk_keep_their_order(tmp_path: Path, tokenizer: Any) -> None:
    data = load(write(tmp_path, pairs(600)), tokenizer)
    assert answers(data.samples, tokenizer) == [f"It is {i}.<|im_end|>" for i in range(600)]


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
    stats = stats_of(Samples.of(samples))
    assert (stats.median_length, stats.p90_length, stats.max_length) == (5, 9, 10)
    assert stats_of(Samples()).median_length == 0
    assert stats_of(Samples.of(samples[:1])).p90_length == 4


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
    assert data.account.num_skipped == 1
    assert data.describe()[-1].startswith("warning: 1 of 4 skipped, the first: ")
    assert "line 3" in data.describe()[-1]


def test_a_template_that_cannot_be_trained_with_stops_also_where_lines_are_skipped(
    tmp_path: Path,
) -> None:
    turns = ("user", "assistant", "user", "assistant")
    row = {"messages": [{"role": role, "content": "x"} for role in turns]}
    tokenizer = tiny.make(tiny.CANNOT)
    match = r"tiny/model asks for an answer with other text .* line 1\)\nhint: chat_template"
    with pytest.raises(ConfigError, match=match):
        load(write(tmp_path, [row]), tokenizer, on_bad_line="skip")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    for row, wrong in (
        ({"input_ids": [1, 99_999]}, 99_999),
        ({"input_ids": [1, 2], "labels": [-100, 99_999]}, 99_999),
        ({"input_ids": [1, -100], "labels": [-100, 2]}, -100),
    ):
        path = write(tmp_path, [row])
        with pytest.raises(DataError, match=rf"not a token of this tokenizer: {wrong}.* line 1\)"):
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
    assert any(line.startswith("no chat template: ") for line in data.describe())


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
    assert list(again.eval_samples) == list(data.eval_samples)
    other = load(path, tokenizer, val_size=5, seed=7)
    assert list(other.eval_samples) != list(data.eval_samples)


def test_of_a_row_that_gave_several_samples_all_are_held_out_or_none(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{role} {row} {turn}"}
                for turn in range(3)
                for role in ("user", "assistant")
            ]
        }
        for row in range(12)
    ]
    tokenizer = tiny.make(tiny.REWRITES)
    data = load(
        [write(tmp_path, rows[:6]), write(tmp_path, rows[6:], "e.jsonl")], tokenizer, val_size=4
    )
    assert len(data.eval_samples) == 3 * 4
    assert len(data.samples) == 3 * 8
    trained, held_out = (
        {tokenizer.decode(sample.input_ids[:8]) for sample in samples}
        for samples in (data.samples, data.eval_samples)
    )
    assert not trained & held_out
    assert Counter(data.samples.rows().tolist()) == dict.fromkeys(range(8), 3)


def test_evaluating_on_what_is_trained_on_is_said(tmp_path: Path, tokenizer: Any) -> None:
    train = write(tmp_path, pairs(6))
    held_out = write(tmp_path, [*pairs(2), {"question": "new?", "answer": "yes"}], "e.jsonl")
    lines = load(train, tokenizer, eval_dataset=held_out).describe()
    assert any("2 of 3 samples to evaluate on are trained on too" in line for line in lines)
    assert not any(
        "trained on too" in line for line in load(train, tokenizer, val_size=2).describe()
    )
    twice = write(tmp_path, pairs(6) + pairs(6), "twice.jsonl")
    assert any("trained on too" in line for line in load(twice, tokenizer, val_size=3).describe())


def test_an_evaluation_file_is_read_like_the_dataset(tmp_path: Path, tokenizer: Any) -> None:
    train, held_out = write(tmp_path, pairs(3)), write(tmp_path, pairs(2), "e.jsonl")
    data = load(train, tokenizer, eval_dataset=held_out)
    assert (len(data.samples), len(data.eval_samples)) == (3, 2)
    assert any(line.startswith("evaluation: 2 samples") for line in data.describe())


def test_holding_out_everything_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, pairs(2))
    with pytest.raises(DataError, match="val_size: 2 leaves nothing to train on"):
        load(path, tokenizer, val_size=2)


# several bad lines at once


def test_all_bad_rows_are_listed_at_once(tmp_path: Path, tokenizer: Any) -> None:
    bad = ["{", "[]", {"question": "q", "answer": 3}, {"question": "q"}]
    path = write(tmp_path, [*pairs(2), *bad, *pairs(1), *bad * 6])
    with pytest.raises(DataError) as caught:
        load(path, tokenizer)
    first, *lines, more, hint = str(caught.value).splitlines()
    assert first == "28 rows cannot be used:"
    assert len(lines) == 20
    assert f"broken JSON: {path}, line 3, column 2" in lines[0]
    assert f"not an object: {path}, line 4: []" in lines[1]
    assert f"answer is not a string: 3 ({path}, line 5)" in lines[2]
    assert f"no column answer; there are: question ({path}, line 6)" in lines[3]
    assert more == "  and 8 more"
    assert hint == "hint: on_bad_line=skip"


def test_reading_on_after_a_bad_row_has_an_end(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import problems

    monkeypatch.setattr(problems, "_READ_ON", 3)
    path = write(tmp_path, [*pairs(2), "{", "{", *pairs(9), "{"])
    with pytest.raises(DataError, match="at least 2 rows cannot be used:") as caught:
        load(path, tokenizer)
    assert "line 14" not in str(caught.value)


def test_nothing_is_rendered_any_more_after_a_bad_row(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import entry_samples

    rendered: list[Any] = []
    plain = entry_samples.prepare

    def prepare(row: Any, *more: Any) -> Any:
        rendered.append(row["question"])
        return plain(row, *more)

    monkeypatch.setattr(entry_samples, "prepare", prepare)
    with pytest.raises(DataError, match="broken JSON"):
        load(write(tmp_path, [*pairs(2), "{", *pairs(9)]), tokenizer)
    assert rendered == ["What is 0?", "What is 1?"]


def test_what_stops_reading_is_listed_behind_the_bad_rows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"question": "q", "answer": "a"}, 3,\n{"question": }]')
    with pytest.raises(
        DataError, match=r"2 rows cannot be used:\n  not an .*\n  broken JSON: .*\nhint: correct"
    ):
        load(str(path), tokenizer)


def test_rows_of_no_known_shape_stop_with_the_first(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [{"problem": "q", "solution": "a"}] * 50)
    with pytest.raises(DataError, match=r"no known shape: columns problem, solution \(.* line 1\)"):
        load(path, tokenizer)


def test_skipped_rows_are_written_down(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "out"
    path = write(tmp_path, ["{", *pairs(3), {"question": "q", "answer": 3}, {"chosen": "x"}])
    data = load(path, tokenizer, on_bad_line="skip", folder=folder, eval_dataset=path)
    records = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 5, 6] * 2
    assert records[0] == {
        "file": path,
        "line": 1,
        "problem": records[0]["problem"],
        "raw": "{",
    }
    assert "answer is not a string: 3" in records[1]["problem"]
    assert json.loads(records[1]["raw"]) == {"question": "q", "answer": 3}
    assert data.describe()[-1] == f"skipped rows are in {folder / 'rejected.jsonl'}"
    assert (data.account.num_skipped, data.account.rows) == (6, 12)
    load(write(tmp_path, pairs(3), "good.jsonl"), tokenizer, folder=folder)
    assert not (folder / "rejected.jsonl").exists()


def test_a_dataset_most_of_which_would_be_skipped_stops(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, [*pairs(2), "{", "{", "{"])
    with pytest.raises(DataError, match=r"most rows cannot be used: 3 of 5 of .*line 3"):
        load(path, tokenizer, on_bad_line="skip")
    with pytest.raises(DataError, match="most rows cannot be used: 3 of 3"):
        load(write(tmp_path, ["{"] * 3), tokenizer, on_bad_line="skip")


# mixtures


def test_parts_say_where_the_samples_of_an_entry_are(tmp_path: Path, tokenizer: Any) -> None:
    first, second = write(tmp_path, pairs(30)), write(tmp_path, pairs(20), "e.jsonl")
    both = [{"path": first, "weight": 0.5}, {"path": second, "weight": 2}]
    data = load(both, tokenizer)
    assert data.parts == ((0, 30, 0.5), (30, 50, 2.0))
    assert data.describe()[2].startswith(f"  {first}: 30 samples, ")
    assert data.describe()[2].endswith(" trained, weight 0.5")
    split = load(both, tokenizer, val_size=0.4)
    (start, middle, _), (again, stop, _) = split.parts
    assert (start, again, stop) == (0, middle, 30)
    kept = answers(split.samples, tokenizer)
    whole = answers(data.samples, tokenizer)
    places = [whole.index(answer) for answer in kept[:middle]]
    assert places == sorted(places)
    assert sum(stats.samples for _, stats in split.entries) == 30


def test_shapes_and_kinds_may_differ_between_entries(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nWhat?,72\n")
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    chat = [
        {"who": "asker", "said": "Hi"},
        {"who": "bot", "said": "Ho"},
    ]
    entry = {
        "path": write(tmp_path, [{"talk": chat}]),
        "columns": {"messages": "talk", "role": "who", "content": "said"},
        "roles": {"user": "asker", "assistant": "bot"},
    }
    data = load([str(tmp_path / "a.csv"), str(tmp_path / "b.txt"), entry], tokenizer)
    trained = answers(data.samples, tokenizer)
    assert trained[0] == "72<|im_end|>"
    assert trained[3] == "Ho<|im_end|>"
    assert data.parts == ((0, 1, 1.0), (1, 3, 1.0), (3, 4, 1.0))


# tokens that are kept


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def entries(home: dict[str, str]) -> set[str]:
    folder = Path(home["HOME"], ".cache", "roundpipe", "tokens")
    return {path.name for path in folder.iterdir() if len(path.name) == 40}


def test_the_second_start_tokenises_nothing(
    tmp_path: Path, tokenizer: Any, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, [*pairs(5), "{"])
    more = {"environment": home, "on_bad_line": "skip", "val_size": 2}
    first = load(path, tokenizer, folder=tmp_path / "one", **more)
    assert any(line.startswith("tokens: kept in ") for line in first.describe())
    from roundpipe.finetune.data import entry_samples

    monkeypatch.setattr(entry_samples, "tokenize", None)
    again = load(path, tokenizer, folder=tmp_path / "two", **more)
    assert list(again.samples) == list(first.samples)
    assert list(again.eval_samples) == list(first.eval_samples)
    assert again.samples.digest == first.samples.digest
    assert (again.stats, again.account.num_skipped) == (first.stats, 1)
    assert any(line.startswith("tokens: found as they were kept") for line in again.describe())
    assert (tmp_path / "two" / "rejected.jsonl").read_text().count("\n") == 1


def test_a_copy_of_the_data_under_another_name_is_the_same_data(
    tmp_path: Path, tokenizer: Any, home: dict[str, str]
) -> None:
    first = load(write(tmp_path, pairs(5)), tokenizer, environment=home)
    again = load(write(tmp_path, pairs(5), "other.jsonl"), tokenizer, environment=home)
    assert again.samples.digest == first.samples.digest
    assert len(entries(home)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 64},
        {"truncation": "drop"},
        {"train_on_prompt": True},
        {"mask_history": True},
        {"chat_template": "chatml"},
        {"type": "question/answer"},
        {"columns": {"question": "question", "answer": "answer"}},
        {"max_samples": 4},
        {"split": "train[1:]"},
    ],
)
def test_whatever_tokens_hang_on_makes_another_entry(
    change: dict[str, Any], tmp_path: Path, home: dict[str, str]
) -> None:
    path = write(tmp_path, pairs(5))
    of_entry = {k: v for k, v in change.items() if k in ("type", "columns", "max_samples", "split")}
    of_config = {k: v for k, v in change.items() if k not in of_entry}
    load(path, tiny.make(), environment=home)
    load({"path": path, **of_entry}, tiny.make(), environment=home, **of_config)
    assert len(entries(home)) == 2


def test_other_content_or_another_tokenizer_makes_another_entry(
    tmp_path: Path, home: dict[str, str]
) -> None:
    path = write(tmp_path, pairs(5))
    load(path, tiny.make(), environment=home)
    load(path, tiny.make(eos="</s>"), environment=home)
    load(write(tmp_path, pairs(6)), tiny.make(), environment=home)
    assert len(entries(home)) == 3
    load(path, tiny.make(), environment=home, learning_rate=1e-3, seed=3, packing=True)
    assert len(entries(home)) == 3


def test_a_damaged_entry_is_made_again(
    tmp_path: Path, tokenizer: Any, home: dict[str, str]
) -> None:
    path = write(tmp_path, pairs(5))
    first = load(path, tokenizer, environment=home)
    folder = Path(home["HOME"], ".cache", "roundpipe", "tokens", *entries(home))
    with (folder / "input_ids.bin").open("r+b") as file:
        file.truncate(8)
    again = load(path, tokenizer, environment=home)
    assert list(again.samples)[1:] == list(load(path, tokenizer).samples)[1:]
    assert again.samples.digest == first.samples.digest


def test_ctrl_c_leaves_no_half_entry(
    tmp_path: Path, tokenizer: Any, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.data import entry_samples

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry_samples, "tokenize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(write(tmp_path, pairs(5)), tokenizer, environment=home)
    folder = Path(home["HOME"], ".cache", "roundpipe", "tokens")
    assert [path.name for path in folder.iterdir() if path.name != "digests"] == []


def test_a_cache_that_cannot_be_written_is_said_and_done_without(
    tmp_path: Path, tokenizer: Any
) -> None:
    (tmp_path / "file").write_text("")
    path = write(tmp_path, pairs(5))
    data = load(path, tokenizer, environment={"HOME": str(tmp_path / "file")}, folder=tmp_path)
    assert any(line.startswith("tokens are not kept: ") for line in data.describe())
    assert len(data.samples) == 5
    with pytest.raises(DataError, match=r"dataset_prepared_path: cannot be written: .*file"):
        load(path, tokenizer, dataset_prepared_path=str(tmp_path / "file" / "x"))


def test_a_full_disk_is_said_with_the_way_out(
    tmp_path: Path, tokenizer: Any, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from roundpipe.finetune.data.tokens import TokenWriter

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TokenWriter, "add", full)
    for where in (home, None):
        with pytest.raises(DataError, match=r"no space left on device\nhint: dataset_prepared_pa"):
            load(write(tmp_path, pairs(5)), tokenizer, environment=where)


def test_loading_says_what_it_does_and_how_far_it_is(
    tmp_path: Path, tokenizer: Any, home: dict[str, str]
) -> None:
    said: list[Any] = []

    @contextlib.contextmanager
    def counting(what: str, total: int) -> Iterator[Any]:
        said.append((what, total))
        yield said.append

    path = write(tmp_path, pairs(5))
    config, _ = make_config({"model": "m", "dataset": path})
    load_dataset(config, tokenizer, counting=counting, environment=home)
    size = Path(path).stat().st_size
    assert said[0] == (f"finding {path}", 0)
    assert said[1:] == [(f"checking {path}", size), size, (f"tokenising {path}", size), size]


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
