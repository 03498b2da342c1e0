"""What a model is asked, as tokens; and which tokens end its answer.

A question goes through the chat template, exactly as in training: with the same date, and with the
system prompt in the question where the template knows none. Without a template it is plain text
that the model goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.conversation import Conversation, conversation_of
from roundpipe.finetune.data.encode import check_characters
from roundpipe.finetune.data.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

_MARK = "xyzzy"  # an answer that no template writes by itself


def tokens_of(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The tokens of a prompt: a question, a conversation that ends with one, or tokens already.

    Raises DataError where the template refuses the conversation or a text is none, ConfigError
    where it cannot be used at all.
    """
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], int):
        return [int(token) for token in prompt if not isinstance(token, Mapping)]
    messages = _messages(prompt)
    if has_template(tokenizer):
        text = _written(tokenizer, messages)
        check_characters(text, "leave it out of the prompt")
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    text = "\n".join(str(message["content"]) for message in messages)
    check_characters(text, "leave it out of the prompt")
    tokens = list(tokenizer(text)["input_ids"])
    end = tokenizer.eos_token_id
    if len(tokens) > 1 and tokens[-1] == end:  # some tokenizers close what they are given
        tokens.pop()
    return tokens


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a conversation can be written for the model."""
    return bool(tokenizer.chat_template)


def end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer: by the model's settings, by its tokenizer, by its template."""
    own = getattr(model, "generation_config", None)
    ends = [*_listed(getattr(own, "eos_token_id", None)), *_listed(tokenizer.eos_token_id)]
    return sorted({*ends, *_end_of_turn(tokenizer)})


def _end_of_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special token that the template writes behind an answer, if it does."""
    if not has_template(tokenizer):
        return []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        text = ChatTemplate(tokenizer, Conversation(messages, [True, True])).write(2)
    except ConfigError:
        return []
    before, found, after = text.rpartition(_MARK)
    tokens = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    return tokens[:1] if before and tokens and tokens[0] in _special(tokenizer) else []


def _special(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return conversation_of(
        [dict(message) for message in prompt if isinstance(message, Mapping)]
    ).messages


def _written(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    """The conversation with the header that asks for an answer."""
    try:
        return _asked(tokenizer, messages)
    except DataError:
        if [message["role"] for message in messages[:2]] != ["system", "user"]:
            raise
    system, user, *others = messages
    joined = {**user, "content": f"{system['content']}\n\n{user['content']}"}
    return _asked(tokenizer, [joined, *others])


def _asked(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> str:
    conversation = Conversation(messages, [True] * len(messages))
    return ChatTemplate(tokenizer, conversation).write(len(messages), ask=True)


def _listed(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
