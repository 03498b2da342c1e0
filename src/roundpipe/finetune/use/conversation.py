'''A conversation at a terminal: what is typed, commands, and answers as they are made.

Ctrl-C while the model answers ends that answer, of which what was said stays; a second one ends
everything. Where a question is awaited Ctrl-C and Ctrl-D leave. A text of several lines stands
between """ and """, or is pasted.
'''

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from roundpipe.errors import ConfigError
from roundpipe.finetune.use.chat import NO_TEMPLATE, Chat, answerer_of, base_alone, stoppable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.use.chat_wish import ChatWish
    from roundpipe.finetune.use.opened import Opened

QUOTES = '"""'
HELP = (
    "/reset          forget what was said",
    "/undo           forget the last question and its answer",
    "/system TEXT    what the model is told before everything; without TEXT: nothing",
    "/help           these lines",
    "/exit           leave, as does Ctrl-D",
    f"{QUOTES}             begins and ends a text of several lines",
    "Ctrl-C          ends an answer, or leaves",
)
INTERRUPTED = 130
_USUAL_PROMPT = 256  # tokens, for what is said of the speed before anything is asked


class Screen(Protocol):
    """Where a conversation is held."""

    def ask(self, more: bool = False) -> str:
        """Wait for a line; ``more``: of a text that has begun. Raises EOFError at the end."""
        ...

    def show(self, text: str) -> None:
        """Show a piece of an answer."""
        ...

    def say(self, text: str) -> None:
        """Show a line that is no answer."""
        ...


def converse(
    opened: Opened,
    wish: ChatWish,
    screen: Screen,
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
) -> int:
    """Hold a conversation until the person leaves; the exit code. Raises ConfigError."""
    answerer = answerer_of(opened, wish, environment=environment)
    chat = Chat.of(answerer, system=wish.system)
    base = functools.partial(base_alone, answerer) if wish.compares else None
    dtype = str(opened.dtype).removeprefix("torch.")
    terminal.line(f"{opened.subject.name} · {dtype}")
    terminal.line(answerer.outlook_line([[0] * _USUAL_PROMPT]))
    if not chat.has_turns:
        terminal.line(NO_TEMPLATE)
    terminal.line("/help says what can be typed · Ctrl-D leaves")
    code = Conversation(chat, screen, base).hold()
    if answerer.num_tokens:
        terminal.line(answerer.rate_line())
    return code


@dataclass
class Conversation:
    """``base``: where the base answers beside the adapter: what makes the model be the base."""

    chat: Chat
    screen: Screen
    base: Callable[[], AbstractContextManager[None]] | None = None

    def hold(self) -> int:
        """Take turns until the person leaves; the exit code."""
        while True:
            try:
                text = self._question()
            except EOFError:
                self.screen.say("")
                return 0
            except KeyboardInterrupt:
                self.screen.say("")
                return INTERRUPTED
            if text.startswith("/"):
                if not self._command(text):
                    return 0
            elif text:
                self._answer(text)

    def _question(self) -> str:
        """One line, or the lines between quotes."""
        line = self.screen.ask()
        begun = line.strip()
        if not begun.startswith(QUOTES):
            return begun
        lines = [begun.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self.screen.ask(more=True))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        text = "\n".join(lines).strip("\n")
        return f" {text}" if text.startswith("/") else text  # no command

    def _command(self, text: str) -> bool:
        """Do what a command says; False where it is to leave."""
        name, _, rest = text.partition(" ")
        say = self.screen.say
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/reset":
            self.chat.reset()
            say("forgotten")
        elif name == "/undo":
            say("taken back" if self.chat.undo() else "nothing was said yet")
        elif name == "/system" and not self.chat.has_turns:
            say("without a chat template there is no system prompt")
        elif name == "/system":
            self.chat.system = rest.strip() or None
            say("noted" if self.chat.system else "no system prompt")
        else:
            if name not in ("/help", "/?"):
                say(f"no such command: {name}")
            for line in HELP:
                say(f"  {line}")
        return True

    def _answer(self, text: str) -> None:
        if self.base is not None:
            self.screen.say("base:")
            with self.base():
                is_stopped = self._asked(text, remember=False)
            if is_stopped:
                return
            self.screen.say("adapter:")
        self._asked(text, remember=True)

    def _asked(self, text: str, *, remember: bool) -> bool:
        """Ask, and show the answer; whether it was ended by Ctrl-C."""
        chat, screen = self.chat, self.screen
        before = list(chat.messages)
        with stoppable() as is_stopped:
            try:
                chat.ask(text, screen.show, say=screen.say, should_stop=is_stopped)
            except ConfigError as error:
                screen.say(str(error).replace("\nhint:", "\n  hint:"))
                return True
            finally:
                if not remember:
                    chat.messages[:] = before
            screen.show("\n")
            return is_stopped()
