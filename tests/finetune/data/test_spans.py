"""What is trained under the templates of the common families, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.finetune import tiny_tokenizer as tiny
from tests.finetune.data import chat_templates as family

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.encode import encode, prepare
from roundpipe.finetune.data.template import use_chat_template
from roundpipe.finetune.settings.config import make_config

_BASE: list[Any] = []


def tokenizer_of(template: str) -> Any:
    """One tokenizer of all families; made once, its template set anew."""
    if not _BASE:
        made = tiny.make(None, eos="</s>")
        made.add_special_tokens({"additional_special_tokens": family.SPECIAL})
        _BASE.append(made)
    _BASE[0].chat_template = template
    return _BASE[0]


def config(**changes: Any) -> Any:
    return make_config({"model": "m", "dataset": "d.jsonl", **changes})[0]


def said(*messages: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """A row of messages; a dict in place of the content is all the rest of the message."""
    return {
        "messages": [
            {"role": role, **(rest if isinstance(rest, dict) else {"content": rest})}
            for role, rest in messages
        ],
        **more,
    }


def runs(template: str, row: dict[str, Any], **changes: Any) -> list[list[str]]:
    """The trained text of each sample of a row."""
    tokenizer = tokenizer_of(template)
    samples = encode(row, tokenizer, config(**changes))
    return [tiny.trained_runs(sample, tokenizer) for sample in samples]


def oddities(template: str, row: dict[str, Any]) -> set[str]:
    ready = prepare(row, "messages", tokenizer_of(template), config())
    return {odd for each in ready for odd in each.oddities}


TALK = said(("user", "What?"), ("assistant", "Paris."), ("user", "Why?"), ("assistant", "So."))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("LLAMA3", [["Paris.<|eot|>", "So.<|eot|>"]]),
        (
            "QWEN3",
            [
                ["<think>\n\n</think>\n\nParis.<|im_end|>"],
                ["<think>\n\n</think>\n\nSo.<|im_end|>"],
            ],
        ),
        ("MISTRAL", [[" Paris.</s>", " So.</s>"]]),
        ("GEMMA", [["Paris.<|end|>", "So.<|end|>"]]),
        ("PHI", [["Paris.<|end|>", "So.<|end|>\n</s>"]]),
        ("DEEPSEEK", [["Paris.</s>", "So.</s>"]]),
        ("MARKED_CONTENT", [["Paris.<|im_end|>", "So.<|im_end|>"]]),
    ],
)
def test_every_answer_is_trained_once_with_its_end_token(
    template: str, expected: list[list[str]]
) -> None:
    found = runs(getattr(family, template), TALK)
    assert found == expected


def test_each_answer_of_a_reasoning_model_is_trained_after_the_history_it_will_see() -> None:
    row = said(
        ("user", "What?"),
        ("assistant", "<think>\nhm\n</think>\n\nParis."),
        ("user", "Why?"),
        ("assistant", {"content": "So.", "reasoning_content": "why"}),
    )
    tokenizer = tokenizer_of(family.QWEN3)
    first, second = encode(row, tokenizer, config())
    assert tiny.trained_runs(first, tokenizer) == ["<think>\nhm\n</think>\n\nParis.<|im_end|>"]
    assert tiny.trained_runs(second, tokenizer) == ["<think>\nwhy\n</think>\n\nSo.<|im_end|>"]
    assert "hm" not in tokenizer.decode(second.input_ids)  # dropped from the history, as at use
    assert runs(family.QWEN3, row, mask_history=True) == [
        ["<think>\nwhy\n</think>\n\nSo.<|im_end|>"]
    ]


def test_a_call_of_a_tool_and_the_answer_to_it_are_both_trained() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    row = said(
        ("user", "q"),
        ("assistant", {"content": None, "tool_calls": [call]}),
        ("tool", "warm"),
        ("assistant", "It is."),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    for template in (family.LLAMA3, family.QWEN3):
        trained = [run for found in runs(template, row) for run in found]
        assert len(trained) == 2
        assert '"arguments": {"x": 1}' in trained[0]
        assert "It is." in trained[1]
    assert "the template leaves out the tools" in oddities(family.QWEN3, row)
    assert not oddities(family.LLAMA3, row)


def test_an_answer_whose_call_the_template_leaves_out_is_not_trained() -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    row = said(
        ("user", "q"),
        ("assistant", {"content": "", "tool_calls": [call]}),
        ("user", "warm"),
        ("assistant", "It is."),
    )
    trained = [run for found in runs(family.PHI, row) for run in found]
    assert len(trained) == 1  # else the model would learn to end its turn at once
    assert trained[0].startswith("It is.")
    assert any("calls of tools" in oddity for oddity in oddities(family.PHI, row))


def test_several_answers_in_a_row_an_empty_one_and_an_open_question() -> None:
    row = said(("user", "q"), ("assistant", "a"), ("assistant", ""), ("user", "open"))
    assert runs(tiny.CHATML, row) == [["a<|im_end|>", "<|im_end|>"]]
    assert runs(family.MARKED_CONTENT, row) == [["a<|im_end|>", "<|im_end|>"]]
    assert runs(tiny.CHATML, row, train_on_prompt=True)[0][0].endswith("open<|im_end|>\n")


def test_an_answer_of_which_a_template_writes_nothing_is_its_end_token() -> None:
    bare = "{% for m in messages %}{{ m.content }};{% endfor %}"
    bare = bare.replace(";", "{% if m.role == 'user' %}:{% endif %}")
    assert runs(bare, said(("user", "q"), ("assistant", ""))) == [["</s>"]]
    row = said(("user", "q"), ("assistant", ""), ("user", "r"), ("assistant", "a"))
    assert runs(bare, row) == [["</s>"], ["a</s>"]]


def test_marks_of_the_template_choose_among_the_answers_as_positions_do() -> None:
    row = said(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
    row["messages"][1]["weight"] = 0
    assert runs(family.MARKED_CONTENT, row) == [["b<|im_end|>"]]
    row["messages"][1]["weight"] = 1
    assert runs(family.MARKED_CONTENT, row, mask_history=True) == [["b<|im_end|>"]]


def test_a_system_prompt_goes_into_the_question_where_the_template_has_no_place_for_it() -> None:
    row = said(("system", "Be brief."), ("user", "q"), ("assistant", "a"))
    tokenizer = tokenizer_of(family.GEMMA)
    [sample] = encode(row, tokenizer, config())
    assert "<|turn|>user\nBe brief.\n\nq<|end|>" in tokenizer.decode(sample.input_ids)
    assert tiny.trained_runs(sample, tokenizer) == ["a<|end|>"]
    assert any("put before the first question" in odd for odd in oddities(family.GEMMA, row))


def test_what_else_a_template_refuses_stays_refused() -> None:
    row = said(("system", "s"), ("user", "q"), ("user", "again"), ("assistant", "a"))
    with pytest.raises(DataError, match="refuses the conversation: Conversation roles must altern"):
        encode(row, tokenizer_of(family.GEMMA), config())


def test_a_system_prompt_that_moves_with_the_last_question_gives_texts_of_their_own() -> None:
    row = said(("system", "Brief!"), *[(m["role"], m["content"]) for m in TALK["messages"]])
    tokenizer = tokenizer_of(family.MISTRAL)
    samples = encode(row, tokenizer, config())
    texts = [tokenizer.decode(sample.input_ids) for sample in samples]
    assert [text.count("Brief!") for text in texts] == [1, 1]
    assert texts[0].endswith("[INST]Brief!\n\nWhat?[/INST] Paris.</s>")


def test_an_answer_that_the_template_cuts_is_refused_by_name() -> None:
    row = said(("user", "q"), ("assistant", "<think>because</think>a"))
    with pytest.raises(ConfigError, match=r"of tiny/model leaves out a part of answer 2: <think>"):
        encode(row, tokenizer_of(family.DEEPSEEK), config())


def test_reasoning_and_system_prompts_that_are_left_out_are_said() -> None:
    row = said(("system", "s9"), ("user", "q"), ("assistant", {"content": "a", "thinking": "x"}))
    row["messages"][2]["reasoning_content"] = "hm"
    found = oddities(family.DEEPSEEK, row)
    assert {odd.split(":")[0] for odd in found} >= {
        "the template leaves out the system prompt",
        "the template leaves out the reasoning (reasoning_content)",
    }


def test_a_template_that_writes_the_date_writes_the_same_one_tomorrow() -> None:
    tokenizer = tokenizer_of(family.LLAMA3)
    [sample] = encode(TALK, tokenizer, config())
    assert "Today: 26 Jul 2024\n" in tokenizer.decode(sample.input_ids)
    assert "strftime" in tokenizer.chat_template  # what is saved is the model's own


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set x = namespace().__init__ %}",
    ],
)
def test_a_template_that_reaches_for_attributes_is_refused_by_name(template: str) -> None:
    match = r"chat template of tiny/model reaches for what a template may not touch.*\nhint: "
    with pytest.raises(ConfigError, match=match):
        use_chat_template(tokenizer_of(template), "auto")


def test_what_only_the_sandbox_sees_is_refused_too() -> None:
    hidden = "{% set a = '_' ~ '_class_' ~ '_' %}{{ (messages | attr(a)).mro() }}"
    use_chat_template(tokenizer_of(hidden), "auto")
    with pytest.raises(ConfigError, match="reaches for what a template may not touch"):
        encode(TALK, tokenizer_of(hidden), config())


def test_a_broken_template_is_an_error_of_the_template_and_its_line() -> None:
    with pytest.raises(ConfigError, match=r"of tiny/model is broken: line 2: ") as error:
        encode(TALK, tokenizer_of("a\n{% for %}"), config())
    assert not isinstance(error.value, DataError)
    with pytest.raises(ConfigError, match=r"is broken: line 1: "):
        use_chat_template(tokenizer_of("{{ 'open }}"), "auto")


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"]
)
def test_a_template_that_fails_on_a_row_is_an_error_of_the_row(template: str) -> None:
    broken = "{% if messages[0].content == 'What?' %}" + template + "{% endif %}" + tiny.CHATML
    with pytest.raises(DataError, match=r"refuses the conversation.*\nhint: on_bad_line=skip"):
        encode(TALK, tokenizer_of(broken), config())
