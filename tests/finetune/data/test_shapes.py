from __future__ import annotations

from typing import Any, get_args

import pytest

from roundpipe.errors import DataError
from roundpipe.finetune.data.conversation import Conversation
from roundpipe.finetune.data.shapes import (
    SHAPES,
    Text,
    Tokens,
    map_columns,
    map_roles,
    shape_of,
    understand,
    unused_columns,
)
from roundpipe.finetune.settings.fields import Shape

USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def read(row: dict[str, Any]) -> Any:
    return understand(row, shape_of(row))


def test_config_and_reader_know_the_same_shapes() -> None:
    assert set(get_args(Shape)) == set(SHAPES)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, REPLY]}, [USER, REPLY]),
        ({"question": "q", "answer": "a"}, [USER, REPLY]),
        ({"query": "q", "response": "a"}, [USER, REPLY]),
        ({"prompt": "q", "completion": "a"}, [USER, REPLY]),
        ({"prompt": [USER], "completion": [REPLY]}, [USER, REPLY]),
        ({"prompt": [USER], "completion": "a"}, [USER, REPLY]),
        ({"instruction": "q", "output": "a"}, [USER, REPLY]),
        ({"instruction": "q", "input": "", "output": "a"}, [USER, REPLY]),
        (
            {"instruction": "q", "input": "i", "output": "a"},
            [{"role": "user", "content": "q\ni"}, REPLY],
        ),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["q", "a"]]},
            [SYSTEM, USER, REPLY, USER, REPLY],
        ),
        ({"question": "q", "answer": "a", "system": "s"}, [SYSTEM, USER, REPLY]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, REPLY],
        ),
        (
            {"conversations": [USER, REPLY], "system": "s"},
            [SYSTEM, USER, REPLY],
        ),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "r"},
                ]
            },
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
                    ],
                },
                {"role": "tool", "content": "r"},
            ],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, REPLY]},
            [USER, REPLY],
        ),
        (
            {"messages": [USER, {**REPLY, "reasoning_content": "hm", "name": None}]},
            [USER, {**REPLY, "reasoning_content": "hm"}],
        ),
    ],
)
def test_every_shape_of_conversation_becomes_messages(row: dict[str, Any], messages: Any) -> None:
    found = read(row)
    assert isinstance(found, Conversation)
    assert found.messages == messages
    assert len(found.trained) == len(messages)


def test_text_and_tokens_are_taken_as_they_are() -> None:
    assert read({"text": "a"}) == Text("a")
    assert read({"input_ids": [1, 2]}) == Tokens([1, 2], [1, 2])
    padded = {"input_ids": [1, 2, 0], "labels": [-100, 2, -100], "attention_mask": [1, 1, 0]}
    assert read(padded) == Tokens([1, 2], [-100, 2])


def test_answers_in_the_prompt_are_not_trained() -> None:
    row = {"prompt": [USER, REPLY, USER], "completion": [REPLY]}
    assert read(row).trained == [False, False, False, True]


def test_messages_win_over_other_columns_and_the_rest_is_named() -> None:
    row = {"prompt": "p", "messages": [USER, REPLY], "id": 3, "text": "x"}
    assert shape_of(row) == "messages"
    assert unused_columns("messages", row) == ["prompt", "id", "text"]
    assert unused_columns("question/answer", ["question", "answer", "system", "n"]) == ["n"]


def test_a_named_shape_wins_over_the_columns() -> None:
    assert shape_of({"messages": [], "text": "x"}, wanted="text") == "text"
    with pytest.raises(DataError, match=r"no column answer; there are: question, reply\nhint: .*"):
        shape_of(["question", "reply"], wanted="question/answer")


def test_columns_are_mapped_by_name() -> None:
    row = {"problem": "q", "solution": "a", "text": "x"}
    mapped = map_columns(row, {"question": "problem", "answer": "solution"})
    assert read(dict(mapped)).messages == [USER, REPLY]
    with pytest.raises(DataError, match="no column resolution; there are: problem"):
        map_columns(row, {"answer": "resolution"})


def test_an_unknown_shape_lists_what_is_there_and_what_is_known() -> None:
    with pytest.raises(DataError) as found:
        shape_of({"problem": 1, "solution": 2})
    text = str(found.value)
    assert text.startswith("no known shape: columns problem, solution\nhint: one of messages")
    assert "question, answer" in text
    assert "columns: {question: problem" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b", "prompt": "p"}, "not supported: preference pairs"),
        ({"messages": [], "images": []}, "not supported: images"),
        ({"question": "q", "answer": 72}, "answer is not a string: 72"),
        ({"question": "q", "answer": None}, "answer is not a string: null"),
        ({"text": ["a"]}, r"text is not a string: \[\"a\"\]"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": "hi"}, "not a list of messages: hi"),
        ({"messages": ["hi"]}, "message 1 is not an object: hi"),
        (
            {"messages": [USER, {"role": "bot", "content": "a"}]},
            "message 2 has an unknown role: bot",
        ),
        ({"messages": [{"content": "a"}]}, "message 1 has an unknown role: None"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "content that is no string: 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 has parts that are no text: image_url",
        ),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "not a function call"),
        ({"messages": [USER, REPLY], "tools": "x"}, "tools is not JSON"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history is not a list of"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids but 1 labels"),
    ],
)
def test_a_row_that_cannot_be_used_names_the_column(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(row)


# what files and habits bring along


def test_rated_answers_and_pictures_are_refused_by_name_unless_the_shape_is_said() -> None:
    rated = {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(DataError, match=r"answers that are rated \(kto\).*\nhint: .*type: SHAPE"):
        shape_of(rated)
    assert shape_of(rated, wanted="prompt/completion") == "prompt/completion"
    for column in ("images", "videos", "audios", "kto_tag"):
        with pytest.raises(DataError, match="not supported: "):
            shape_of({"messages": [], column: []})


def test_a_mapping_of_some_columns_takes_the_others_by_their_names() -> None:
    row = {"problem": "q", "answer": "a", "system": "s", "messages": [], "text": "t"}
    mapped = map_columns(row, {"question": "problem"})
    assert mapped == {"question": "q", "answer": "a", "system": "s"}
    assert map_columns(row, {"text": "problem"}) == {"text": "q"}
    assert map_columns(row, {"messages": "messages"}, wanted="messages") == {"messages": []}


def test_fields_and_roles_of_messages_are_mapped() -> None:
    row = {"talk": [{"who": "asker", "said": "q", "id": 1}, {"who": "bot", "said": "a"}]}
    mapped = map_columns(row, {"messages": "talk", "role": "who", "content": "said"})
    mapped = map_roles(mapped, {"user": ["asker"], "assistant": ["bot", "ai"]})
    assert read(dict(mapped)).messages == [{**USER, "id": 1}, REPLY]
    shared = {"conversations": [{"from": "asker", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert read(dict(map_roles(shared, {"user": ["asker"]}))).messages == [USER, REPLY]
    assert map_roles({"text": "a"}, {"user": ["x"]}) == {"text": "a"}


def test_lists_that_are_text_are_decoded() -> None:
    row = {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}
    assert read(row).messages == [USER, REPLY]
    tokens = {"input_ids": "[1, 2]", "labels": "", "attention_mask": "[1, 1]"}
    assert read(tokens) == Tokens([1, 2], [1, 2])
    with pytest.raises(DataError, match=r"messages is text that is no JSON: \[\{"):
        read({"messages": "[{"})


def test_several_calls_in_one_message_are_several_calls() -> None:
    calls = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]'
    found = read({"conversations": [{"from": "function_call", "value": calls}]})
    names = [call["function"]["name"] for call in found.messages[0]["tool_calls"]]
    assert names == ["f", "g"]


def test_no_calls_are_no_field_and_calls_are_a_list() -> None:
    assert read({"messages": [USER, {**REPLY, "tool_calls": []}]}).messages[1] == REPLY
    with pytest.raises(DataError, match="message 2 has tool_calls that are no list"):
        read({"messages": [USER, {**REPLY, "tool_calls": {"name": "f"}}]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [-100, -1]}, "neither a token nor -100: label -1"),
        ({"input_ids": [1, 2], "labels": []}, "2 input_ids but 0 labels"),
        ({"input_ids": [1], "labels": [2**31]}, "neither a token nor -100"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "2 input_ids but 1 attention_mask"),
        ({"input_ids": [1.5]}, "input_ids is not a list of integers"),
        ({"input_ids": [1], "attention_mask": 1}, "attention_mask is not a list"),
        ({"instruction": "i", "output": "o", "history": "x"}, "history is not a list"),
    ],
)
def test_tokens_and_history_that_cannot_be_used_are_named(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(row)


def test_thousands_of_columns_are_not_all_listed() -> None:
    with pytest.raises(DataError) as caught:
        shape_of([f"column {i}" * 20 for i in range(5000)])
    assert "and 4,980 more" in str(caught.value)
    assert len(str(caught.value)) < 2500
