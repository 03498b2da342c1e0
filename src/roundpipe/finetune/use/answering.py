"""Prompts that are given or piped, answered several at a time by an opened model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.finetune.model.positions import longest_known
from roundpipe.finetune.output.prompts import tokens_of
from roundpipe.finetune.use.chat import NO_TEMPLATE, Chat, answerer_of, base_alone, stoppable
from roundpipe.finetune.use.piped import answer_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from roundpipe.finetune.output.prompts import Prompt
    from roundpipe.finetune.output.sample import Answerer
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.use.chat_wish import ChatWish
    from roundpipe.finetune.use.opened import Opened
    from roundpipe.finetune.use.piped import Asked


def answer_prompts(
    opened: Opened,
    wish: ChatWish,
    asked: Iterable[Asked],
    write: Callable[[str], None],
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
) -> None:
    """Answer prompts in their order, several at a time. Raises KeyboardInterrupt after a Ctrl-C."""
    answerer = answerer_of(opened, wish, environment=environment)
    has_turns = Chat.of(answerer).has_turns
    if not has_turns:
        terminal.line(NO_TEMPLATE)
    is_told = False
    warn = _of_length(answerer, terminal)

    def answers(some: Sequence[Asked]) -> list[dict[str, str]]:
        nonlocal is_told
        prompts = [each.messages(wish.system if has_turns else None) for each in some]
        warn(prompts)
        if not is_told:
            terminal.line(answerer.outlook_line(prompts))
            is_told = True
        names = ["answer"]
        if wish.compares:
            with base_alone(answerer):
                bases = _answered(answerer, prompts, terminal)
            names = ["base", "answer"]
        found = _answered(answerer, prompts, terminal)
        columns = [bases, found] if wish.compares else [found]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    if len(wish.prompts) == 1 and not wish.as_json and not wish.compares:
        prompt = next(iter(asked)).messages(wish.system if has_turns else None)
        warn([prompt])
        terminal.line(answerer.outlook_line([prompt]))
        _streamed(answerer, prompt, write)
    else:
        answer_all(asked, answers, write, as_json=wish.as_json, batch_size=wish.batch_size)
    terminal.line(answerer.rate_line())


def _of_length(answerer: Answerer, terminal: Terminal) -> Callable[[Sequence[Prompt]], None]:
    """What says of prompts, once, that one is longer than the model was made for."""
    limit = longest_known(answerer.pipe.model)

    def warn(prompts: Sequence[Prompt]) -> None:
        nonlocal limit
        if limit is None:
            return
        longest = max(len(tokens_of(answerer.tokenizer, prompt)) for prompt in prompts)
        if longest >= limit:
            terminal.line(
                f"warning: a prompt has {longest:,} tokens, and the model was made for {limit:,}: "
                "its answer may mean nothing"
            )
            limit = None

    return warn


def _streamed(answerer: Answerer, prompt: Prompt, write: Callable[[str], None]) -> None:
    with stoppable() as is_stopped:
        answerer.stream(prompt, write, should_stop=is_stopped)
        write("\n")
    if is_stopped():
        raise KeyboardInterrupt


def _answered(answerer: Answerer, prompts: Sequence[Prompt], terminal: Terminal) -> list[str]:
    with stoppable() as is_stopped, terminal.counting("answering", len(prompts), "prompts") as tell:
        found = answerer.answers(prompts, tell=tell, should_stop=is_stopped)
    if is_stopped():
        raise KeyboardInterrupt
    return found
