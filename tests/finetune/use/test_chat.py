"""Conversations: turns that are remembered, commands, Ctrl-C, and what is too long."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.finetune import tiny_model

from roundpipe import RoundPipe
from roundpipe.errors import DataError
from roundpipe.finetune.output.prompts import tokens_of
from roundpipe.finetune.output.sample import Answerer
from roundpipe.finetune.use.chat import Chat, base_alone, sampling_of, stoppable
from roundpipe.finetune.use.chat_wish import ChatWish
from roundpipe.finetune.use.conversation import HELP, Conversation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What transformers says of tiny models, and peft of names that are about to go.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


class Scripted:
    """A screen on which somebody types what was written down before, and then Ctrl-D."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self.lines = list(lines)
        self.shown = ""
        self.said: list[str] = []
        self.at_piece: Callable[[], None] | None = None

    def ask(self, more: bool = False) -> str:
        line = self.lines.pop(0) if self.lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    def show(self, text: str) -> None:
        self.shown += text
        if self.at_piece is not None:
            self.at_piece()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def pipe() -> Iterator[RoundPipe]:
    model = tiny_model.tiny_model(tied=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4, generator=generator)
    with RoundPipe(model, devices="cpu") as made:
        yield made


@pytest.fixture
def chat(pipe: RoundPipe) -> Chat:
    return Chat.of(Answerer(pipe, tiny_model.tiny_tokenizer(), max_new_tokens=6))


def test_each_question_is_asked_with_all_that_was_said_before(chat: Chat) -> None:
    screen = Scripted("what?", "  ", "and then?")
    assert Conversation(chat, screen).hold() == 0
    first, second = screen.shown.split("\n")[:2]
    assert [message["content"] for message in chat.messages[::2]] == ["what?", "and then?"]
    alone = chat.answerer.answers(["and then?", chat.messages[:3]])
    assert alone[0] != alone[1] == chat.messages[3]["content"]
    assert first.strip() == chat.messages[1]["content"]
    assert second.strip() == chat.messages[3]["content"]


def test_what_is_typed_after_a_slash_is_a_command(chat: Chat) -> None:
    screen = Scripted(
        "/undo", "a?", "/undo", "b?", "/system be brief", "/help", "/nonsense", "c?", "/exit", "d?"
    )
    assert Conversation(chat, screen).hold() == 0
    assert screen.lines == ["d?"]
    assert [message["content"] for message in chat.messages[::2]] == ["b?", "c?"]
    assert chat.system == "be brief"
    assert chat.asked("x")[0] == {"role": "system", "content": "be brief"}
    assert screen.said[:4] == ["nothing was said yet", "taken back", "noted", f"  {HELP[0]}"]
    assert "no such command: /nonsense" in screen.said
    assert Conversation(chat, Scripted("/reset", "/system")).hold() == 0
    assert not chat.messages
    assert chat.system is None


def test_several_lines_stand_between_quotes(chat: Chat) -> None:
    asked: list[str] = []
    chat.ask = lambda text, *_, **__: asked.append(text) or ""  # type: ignore[method-assign]
    quotes = '"""'
    screen = Scripted(f"{quotes}one", "  two", quotes, f"{quotes}/three{quotes}", f"{quotes}lost")
    assert Conversation(chat, screen).hold() == 0
    assert asked == ["one\n  two", " /three"]


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(chat: Chat) -> None:
    chat.answerer.max_new_tokens = 200
    whole = Scripted("what?")
    Conversation(chat, whole).hold()
    chat.reset()
    screen = Scripted("what?", "and?")
    count = [0]

    def press() -> None:
        count[0] += 1
        if count[0] == 2:
            signal.raise_signal(signal.SIGINT)

    screen.at_piece = press
    before = signal.getsignal(signal.SIGINT)
    assert Conversation(chat, screen).hold() == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert len(chat.messages) == 4
    ended = chat.messages[1]["content"]
    assert 0 < len(ended) < len(whole.shown.strip())
    assert whole.shown.startswith(ended[:2])


def test_ctrl_c_where_a_question_is_awaited_leaves_with_130(chat: Chat) -> None:
    assert Conversation(chat, Scripted("what?", KeyboardInterrupt)).hold() == 130
    assert len(chat.messages) == 2
    assert Conversation(chat, Scripted('"""what?', KeyboardInterrupt)).hold() == 130


def test_a_second_ctrl_c_ends_everything() -> None:
    with stoppable() as is_stopped:
        signal.raise_signal(signal.SIGINT)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell's background job
    try:
        with stoppable() as is_stopped:
            signal.raise_signal(signal.SIGINT)
            assert not is_stopped()
    finally:
        signal.signal(signal.SIGINT, handler)


def test_the_oldest_turns_are_left_out_where_all_would_be_too_long(chat: Chat) -> None:
    tokenizer, said = chat.answerer.tokenizer, []
    chat.system = "be brief"
    turn = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 40}]
    chat.messages = [dict(message) for message in turn * 3]
    taken = len(tokens_of(tokenizer, chat.asked("why?")))
    chat.limit = taken + 6
    chat.ask("why?", said.append, say=said.append)
    assert len(chat.messages) == 8
    chat.undo()
    chat.limit = taken - 1
    chat.ask("why?", lambda _: None, say=said.append)
    assert said[-1] == f"the oldest turn is left out: the model was made for {taken - 1} tokens"
    assert len(chat.messages) == 6


def test_a_question_that_is_too_long_by_itself_is_refused_and_nothing_is_forgotten(
    chat: Chat,
) -> None:
    chat.limit = 60
    screen = Scripted("hm?", "x" * 80, "so?")
    assert Conversation(chat, screen).hold() == 0
    assert any("tokens, and the model was made for 60\n  hint:" in text for text in screen.said)
    assert chat.messages[0]["content"] in ("hm?", "so?")
    with pytest.raises(DataError):
        chat.ask("x" * 80, screen.show, say=screen.say)


def test_an_answer_takes_no_more_than_the_room_that_is_left(chat: Chat) -> None:
    taken = len(tokens_of(chat.answerer.tokenizer, chat.asked("hm?")))
    chat.limit = taken + 2
    chat.answerer.max_new_tokens = 50
    before = chat.answerer.num_tokens
    chat.ask("hm?", lambda _: None, say=lambda _: None)
    assert chat.answerer.num_tokens - before <= 2


def test_without_a_template_nothing_is_remembered(pipe: RoundPipe) -> None:
    tokenizer = tiny_model.tiny_tokenizer(template=None)
    chat = Chat.of(Answerer(pipe, tokenizer, max_new_tokens=4), system="be brief")
    screen = Scripted("once upon", "once upon", "/system x")
    assert Conversation(chat, screen).hold() == 0
    one, other = screen.shown.splitlines()
    assert one == other
    assert not chat.messages
    assert screen.said[0] == "without a chat template there is no system prompt"


def test_the_base_answers_first_and_only_the_adapters_answer_is_remembered() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = tiny_model.tiny_model(tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    with RoundPipe(get_peft_model(model, config), devices="cpu") as pipe:
        answerer = Answerer(pipe, tiny_model.tiny_tokenizer(), max_new_tokens=6)
        chat, screen = Chat.of(answerer), Scripted("what?")

        @contextlib.contextmanager
        def base() -> Iterator[None]:
            with base_alone(answerer):
                yield

        assert Conversation(chat, screen, base).hold() == 0
        (tuned,) = answerer.answers(["what?"])
    assert screen.said[:2] == ["base:", "adapter:"]
    assert [message["content"] for message in chat.messages] == ["what?", tuned]
    assert not screen.shown.startswith(tuned)
    assert screen.shown.endswith(f"{tuned}\n")


@pytest.mark.parametrize(
    ("own", "wish", "expected"),
    [
        ({}, {}, {"do_sample": False}),
        ({"do_sample": True, "temperature": 0.6}, {}, {"do_sample": True}),
        (
            {"do_sample": True},
            {"temperature": 0.0, "sampling": {"top_p": 0.9, "repetition_penalty": 1.1}},
            {"do_sample": False, "repetition_penalty": 1.1},
        ),
        ({}, {"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({}, {"sampling": {"top_p": 0.9}}, {"do_sample": True, "top_p": 0.9}),
    ],
)
def test_tokens_are_chosen_as_wished_else_as_the_model_says(
    own: dict[str, Any], wish: dict[str, Any], expected: dict[str, Any]
) -> None:
    model = tiny_model.tiny_model()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    assert sampling_of(model, ChatWish(**wish)) == expected
