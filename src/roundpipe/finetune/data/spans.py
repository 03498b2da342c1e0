"""A conversation as text, and where in that text the answers stand.

Where the template itself marks them ({% generation %}), there. Else they are found by position.
With R(k) the rendering of the first k messages and R+(k) the same with the header that asks for an
answer, the answer in message k is what R(k+1) has beyond R+(k):

    R+(k)    <user>How many?</user><assistant>
    R(k+1)   <user>How many?</user><assistant>There are 12.</assistant>
    all      <user>How many?</user><assistant>There are 12.</assistant><user>Why?</user> …

Both must be beginnings of the whole text. Templates of reasoning models write an answer otherwise
once another question follows: without its reasoning. To train it as it stands there would teach
something that is never asked for, so such an answer gets a text of its own that ends with it,
R(k+1): what the model sees when it is asked. Every answer is trained once, in one of the texts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.template import ChatTemplate, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from roundpipe.finetune.data.conversation import Conversation, Message

    Span = tuple[int, int]

_ALL = -1  # in place of an answer's number: the whole text
_FOLDED = "the template knows no system prompt: it is put before the first question"
_NO_SYSTEM = "the template leaves out the system prompt"
_NO_TOOLS = "the template leaves out the tools"
_NO_CALLS = "the template leaves out calls of tools: an answer that is one is not trained"
_NO_REASONING = "the template leaves out the reasoning (reasoning_content)"
_ASKS = "the template asks with {!r}, which it does not write before an answer: trained as written"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text with the spans (start, end) of characters that are trained, in order.

    ``ends_open`` says that the last trained turn has no end token in the text, so that one must be
    put behind it; ``add_special_tokens`` whether the tokenizer is to add its own. ``oddities``:
    what people should know of how the template took the conversation.
    """

    text: str
    spans: list[Span]
    ends_open: bool
    add_special_tokens: bool
    oddities: tuple[str, ...] = ()


def render(
    conversation: Conversation, tokenizer: Any, *, everything: bool, only_last: bool
) -> list[Rendered]:
    """Write a conversation as the model's template does and find what of it is trained.

    One text, or several where earlier answers are written otherwise. ``everything`` trains the
    prompt too, ``only_last`` the last answer alone. Raises DataError where the template refuses the
    row, ConfigError where it cannot be trained with at all.
    """
    if not tokenizer.chat_template:
        return [_concatenate(conversation, everything=everything)]
    writing, whole = _accepted(conversation, tokenizer)
    answers = [
        i
        for i, message in enumerate(writing.messages)
        if message["role"] == "assistant" and writing.conversation.trained[i]
    ]
    if everything:
        return [writing.rendered(whole, {_ALL: (0, len(whole))})]
    if only_last:
        answers = answers[-1:]
    answers = [i for i in answers if not writing.loses_call(i)]
    marked = writing.marked(whole) if answers else None
    if marked is not None:
        return [writing.rendered(whole, {i: marked[i] for i in answers if i in marked})]
    return writing.each_once(whole, answers)


def _accepted(conversation: Conversation, tokenizer: Any) -> tuple[_Writing, str]:
    """The conversation as the template takes it, the system prompt in the question if it must,
    and the whole text.
    """
    writing = _Writing(conversation, tokenizer)
    try:
        return writing, writing.write(len(conversation.messages))
    except DataError:
        if [message["role"] for message in conversation.messages[:2]] != ["system", "user"]:
            raise
    system, user, *others = conversation.messages
    joined = {**user, "content": f"{system['content']}\n\n{user['content']}"}
    folded = replace(conversation, messages=[joined, *others], trained=conversation.trained[1:])
    writing = _Writing(folded, tokenizer, _FOLDED)
    return writing, writing.write(len(folded.messages))  # if something else was refused


class _Writing:
    """One conversation, and what the template makes of its beginnings."""

    def __init__(self, conversation: Conversation, tokenizer: Any, *oddities: str) -> None:
        self.conversation = conversation
        self.messages: Sequence[Message] = conversation.messages
        self._template = ChatTemplate(tokenizer, conversation)
        self.write: Callable[..., str] = cache(self._template.write)
        self._ends = _end_tokens(tokenizer)
        self._name = name_of(tokenizer)
        self._oddities = dict.fromkeys(oddities)

    def marked(self, whole: str) -> dict[int, Span] | None:
        """The answers that the template marks, None where it marks not one span for each.

        With the end token that follows a span.
        """
        found = self._template.marks(len(self.messages))
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if not found or len(found) != len(answers):
            return None
        return {
            i: (start, end + _end_token_at(whole, end, self._ends))
            for i, (start, end) in zip(answers, found, strict=True)
        }

    def loses_call(self, index: int) -> bool:
        """Whether answer ``index`` calls a tool and the template would end it without the call."""
        is_lost = "tool_calls" in self.messages[index] and not self._template.has("tool_calls")
        if is_lost:
            self._oddities[_NO_CALLS] = None
        return is_lost

    def each_once(self, whole: str, answers: Sequence[int]) -> list[Rendered]:
        """Texts in which each answer is trained once: the whole, and own ones where it must be."""
        texts = []
        found = {i: span for i in answers if (span := self._span(i, whole)) is not None}
        if found or not answers:
            texts.append(self.rendered(whole, found))
        rest = [i for i in answers if i not in found]
        while rest:
            text = self.write(rest[-1] + 1)
            found = {i: span for i in rest if (span := self._span(i, text)) is not None}
            found.setdefault(rest[-1], (len(text), len(text)))  # nothing but the end that is put
            texts.append(self.rendered(text, found))
            rest = [i for i in rest if i not in found]
        return texts[::-1]

    def rendered(self, text: str, found: dict[int, Span]) -> Rendered:
        """A text in which these answers are trained, with what is odd about it."""
        self._look_for_losses(text, found)
        spans = sorted(found.values())
        ends_here = bool(spans) and not text[spans[-1][1] :].strip()
        if _ALL in found:
            ends_here = self.messages[-1]["role"] == "assistant"
        return Rendered(
            text,
            spans,
            ends_open=ends_here and not text.rstrip().endswith(self._ends),
            add_special_tokens=False,
            oddities=tuple(self._oddities),
        )

    def _span(self, index: int, text: str) -> Span | None:
        """The characters of answer ``index`` in ``text``, its end token included; None where the
        text does not have it as it stands where it is the last.
        """
        own = self.write(index + 1)
        start = self._start(index, own)
        after = own if text.startswith(own) else _without_closing(own, self._ends)
        if text.startswith(after) and len(after) > start:
            return start, _turn_end(text, start, len(after), self._ends)
        return None

    def _start(self, index: int, own: str) -> int:
        """Where answer ``index`` begins in ``own``, the text that ends with it."""
        if index == 0:
            raise DataError(
                "the conversation starts with an answer, which nothing asks for"
                "\nhint: on_bad_line=skip, or mask_history=true"
            )
        asked = self.write(index, ask=True)
        if own.startswith(asked):
            return len(asked)
        bare, common = self.write(index), _common_beginning(asked, own)
        # Never within a word or a token that both happen to begin with.
        borders = [common.rfind(end) + len(end) for end in ("\n", *self._ends) if end in common]
        start = max(borders, default=0)
        if not own.startswith(bare) or start <= len(bare):
            raise ConfigError(
                f"the chat template of {self._name} asks for an answer with other text than it "
                f"writes before message {index + 1}, so what to train cannot be told by position"
                "\nhint: chat_template=chatml, or a template of your own: chat_template=FILE.jinja"
            )
        self._oddities[_ASKS.format(asked[start:])] = None
        return start

    def _look_for_losses(self, text: str, found: dict[int, Span]) -> None:
        """Raise ConfigError for an answer that is not written whole; note what else is missing."""
        for i, (start, end) in found.items():
            if i == _ALL:
                continue
            span = _squeezed(text[start:end])
            if (content := _squeezed(self.messages[i]["content"])) not in span:
                raise ConfigError(
                    f"the chat template of {self._name} leaves out a part of answer {i + 1}: "
                    f"{_shortened(self.messages[i]['content'])}\nhint: a template that writes all "
                    "of it: chat_template=FILE.jinja, or chat_template=chatml"
                )
            reasoning = _squeezed(str(self.messages[i].get("reasoning_content") or ""))
            if reasoning and reasoning not in (span if content else text):
                self._oddities[_NO_REASONING] = None
        first = self.messages[0]
        if first["role"] == "system" and _squeezed(first["content"]) not in _squeezed(text):
            self._oddities[_NO_SYSTEM] = None
        if self.conversation.tools and not self._template.has("tools"):
            self._oddities[_NO_TOOLS] = None


def _common_beginning(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _squeezed(text: str) -> str:
    """Without white space, which templates trim and add."""
    return "".join(text.split())


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def _end_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Text of every token that is special; never a word that an answer may end in."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special: Iterable[str] = (str(token) for token in added if getattr(token, "special", False))
    return tuple({*special, *map(str, tokenizer.all_special_tokens)})


def _turn_end(whole: str, start: int, end: int, ends: tuple[str, ...]) -> int:
    """Where a turn's end token ends: white space behind it belongs to the template."""
    turn = whole[start:end].rstrip()
    return start + len(turn) if turn.endswith(ends) else end


def _without_closing(text: str, ends: tuple[str, ...]) -> str:
    """A text without the token that closes the whole of it, behind that of its last turn."""
    open_text = text.rstrip()
    for end in sorted(ends, key=len, reverse=True):
        if open_text.endswith(end):
            open_text = open_text.removesuffix(end)
            return open_text if open_text.rstrip().endswith(ends) else text
    return text


def _end_token_at(text: str, at: int, ends: tuple[str, ...]) -> int:
    """The length of the end token that begins at ``at``, 0 without one or with one before it."""
    if text[:at].rstrip().endswith(ends):
        return 0
    return max((len(end) for end in ends if text.startswith(end, at)), default=0)


def _concatenate(conversation: Conversation, *, everything: bool) -> Rendered:
    """Prompt and completion as they stand, for a tokenizer without chat template."""
    if conversation.plain is None or "tool_calls" in conversation.messages[-1]:
        raise ConfigError(
            "the tokenizer has no chat template to write messages with"
            "\nhint: chat_template=chatml, or a dataset of prompt and completion strings"
        )
    prompt, completion = conversation.plain
    text = prompt + completion
    start = 0 if everything else len(prompt)
    return Rendered(text, [(start, len(text))], ends_open=True, add_special_tokens=True)
