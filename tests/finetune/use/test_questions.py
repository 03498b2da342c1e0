from __future__ import annotations

import math

import pytest
from tests.finetune.tiny_model import tiny_tokenizer

from roundpipe.errors import ConfigError
from roundpipe.finetune.data.encode import encode
from roundpipe.finetune.data.samples import Sample
from roundpipe.finetune.settings.config import TrainConfig, make_config
from roundpipe.finetune.use.questions import (
    AnswerPattern,
    Question,
    interval,
    is_same,
    question_of,
    refuse_shapes,
)

GSM8K = "#### ([-0-9.,]+)"


def config(**changes: object) -> TrainConfig:
    return make_config({"model": "-", "dataset": "-", **changes})[0]


def test_a_question_is_all_that_stands_before_the_answer_header_included() -> None:
    tokenizer = tiny_tokenizer()
    (sample,) = encode({"question": "1 + 1?", "answer": " it is 2 "}, tokenizer, config())
    question = question_of(sample, tokenizer)
    assert question is not None
    asked = [{"role": "user", "content": "1 + 1?"}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(question.prompt) == text
    assert question.reference == "it is 2"


def test_of_a_conversation_the_last_answer_is_asked_for() -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    for changes in ({}, {"mask_history": True}):
        (sample,) = encode({"messages": messages}, tokenizer, config(**changes))
        question = question_of(sample, tokenizer)
        assert question is not None
        text = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(question.prompt) == text
        assert question.reference == "4"


def test_an_answer_that_is_not_to_be_learned_is_not_asked_for_either() -> None:
    tokenizer = tiny_tokenizer()
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "5", "weight": 0},
    ]
    (sample,) = encode({"messages": messages}, tokenizer, config())
    question = question_of(sample, tokenizer)
    assert question is not None
    assert question.reference == "2"


def test_without_a_template_the_plain_prompt_is_the_question() -> None:
    tokenizer = tiny_tokenizer(template=None)
    row = {"prompt": "1 + 1 =", "completion": " 2"}
    (sample,) = encode(row, tokenizer, config())
    question = question_of(sample, tokenizer)
    assert question is not None
    assert tokenizer.decode(question.prompt) == "1 + 1 ="
    assert question.reference == "2"


def test_running_text_has_no_question() -> None:
    tokenizer = tiny_tokenizer()
    (sample,) = encode({"text": "once upon a time"}, tokenizer, config())
    assert question_of(sample, tokenizer) is None
    assert question_of(Sample([1, 2, 3], [-100] * 3), tokenizer) is None


def test_running_text_is_refused_by_name() -> None:
    refuse_shapes([("a.jsonl", "messages"), ("t.jsonl", "input_ids")])
    with pytest.raises(ConfigError, match=r"b\.txt is of running text\nhint: data with a question"):
        refuse_shapes([("a.jsonl", "messages"), ("b.txt", "text")])


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("#### [0-9]+", "needs one group, and has none"),
        ("(#+) ([0-9]+)", "needs one group, and has 2"),
        ("#### ([0-9]+", "is no regular expression"),
        ("(a{99999999999999999999})", "is no regular expression"),
    ],
)
def test_a_pattern_that_cannot_tell_an_answer_is_an_error(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        AnswerPattern(pattern)
    assert "\nhint: answer_pattern=" in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (GSM8K, "48/2 = 24\n48+24 = 72\n#### 72", "72"),
        (GSM8K, "so #### 1,234.", "1,234."),
        (GSM8K, "it is 72", None),
        (GSM8K, "", None),
        ("([0-9]+)", "3 and 4 make 7 apples", "7"),
        ("(.*)", "yes\n", "yes"),
        ("(?s)is(.*)", "it is\nfour\n", "four"),
        ("answer: (yes|no)|none", "answer: yes, or none", "yes"),
        ("x(.*)", "x", None),
    ],
)
def test_the_last_match_that_holds_anything_counts(
    pattern: str, text: str, found: str | None
) -> None:
    assert AnswerPattern(pattern).find(text) == found


def test_references_without_an_answer_are_told_apart_and_none_at_all_is_an_error() -> None:
    pattern = AnswerPattern(GSM8K)
    asked = [Question([1], "#### 3"), Question([1], "three")]
    assert pattern.wanted(asked, told="d.jsonl") == ["3", None]
    with pytest.raises(ConfigError, match=r"matches no answer of d\.jsonl.*the first ends: three"):
        pattern.wanted(asked[1:], told="d.jsonl")
    with pytest.raises(ConfigError, match="matches no answer"):
        pattern.wanted([], told="d.jsonl")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("72", "72", True),
        ("1,234", "1234", True),
        ("1,234,567.50", "1234567.5", True),
        ("72.", "72", True),
        ("18.00", "18", True),
        ("-3", "- 3", False),
        ("-3", "3", False),
        ("1,5", "15", False),
        ("12,34", "1234", False),
        ("1,2345", "12345", False),
        ("Paris", "Paris", True),
        ("New  York", "New York", True),
        ("Paris", "paris", False),
        ("7", "seven", False),
        ("9" * 60, "9" * 59 + "8", False),
        ("..", "..", True),
    ],
)
def test_numbers_are_equal_by_value_and_words_by_letters(one: str, other: str, same: bool) -> None:
    assert is_same(one, other) is same
    assert is_same(other, one) is same


def test_the_interval_is_wilsons() -> None:
    # R. G. Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert interval(0, 0) == (0.0, 1.0)
    low, high = interval(5, 5)
    assert (high, math.isclose(low, 0.5655, abs_tol=5e-5)) == (1.0, True)
