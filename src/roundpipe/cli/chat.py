"""``roundpipe chat RUN``: a conversation at a terminal, or answers to prompts that are given.

Answers go to stdout and everything else to stderr, so that answers can be piped on.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import TYPE_CHECKING, TextIO

from roundpipe.errors import ConfigError
from roundpipe.finetune.output.characters import harmless, put
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.signals import leave_at_once, listening
from roundpipe.finetune.use.chat_wish import OPTIONS, TEXTS, chat_wish
from roundpipe.finetune.use.options import take_texts
from roundpipe.finetune.use.piped import Asked, read_lines
from roundpipe.finetune.use.request import read_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roundpipe.finetune.use.chat_wish import ChatWish
    from roundpipe.finetune.use.opened import Opened
    from roundpipe.finetune.use.request import Request

USAGE = "roundpipe chat RUN [prompt='…'] [system='…'] [temperature=0] [max_new_tokens=512] [--json]"


def run(arguments: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run the command: 0, or 130 where Ctrl-C ended it. Raises ConfigError."""
    words, texts = take_texts(arguments, TEXTS)
    request = read_request(
        words, options=OPTIONS, taken=TEXTS, environment=environment, usage=USAGE
    )
    seed = request.settings.seed if "seed" in request.said else None
    wish = chat_wish(request.options, texts, seed=seed)
    asked = _asked(wish)
    if asked is not None:
        first = next(asked, None)
        if first is None:
            Terminal(sys.stderr).line("no prompts: the input is empty")
            return 0
        asked = itertools.chain([first], asked)
    try:
        return _with_model(request, wish, asked, environment)
    except BrokenPipeError:  # whoever read the answers has enough of them
        return 0


def _asked(wish: ChatWish) -> Iterator[Asked] | None:
    """The prompts that are given or piped; None where a person sits at the terminal."""
    if wish.prompts:
        return iter([Asked({"prompt": text}, text) for text in wish.prompts])
    if sys.stdin is None:
        raise ConfigError("nothing to read from\nhint: prompt='what is 12 + 7?'")
    if sys.stdin.isatty():
        if wish.as_json:
            raise ConfigError("--json reads from a pipe\nhint: < prompts.jsonl, or prompt='…'")
        return None
    lines = getattr(sys.stdin, "buffer", None) or (line.encode() for line in sys.stdin)
    return read_lines(lines, as_json=wish.as_json)


def _with_model(
    request: Request,
    wish: ChatWish,
    asked: Iterator[Asked] | None,
    environment: Mapping[str, str],
) -> int:
    terminal = Terminal(sys.stderr)
    for line in request.notes:
        terminal.line(line)
    with contextlib.ExitStack() as parts:
        opened = _open(request, wish, terminal, environment, parts)
        from roundpipe.finetune.use.answering import answer_prompts  # noqa: PLC0415 (torch)
        from roundpipe.finetune.use.conversation import converse  # noqa: PLC0415

        screen = ThisTerminal(sys.stdout, terminal)
        if asked is None:
            return converse(opened, wish, screen, terminal, environment=environment)
        answer_prompts(opened, wish, asked, screen.show, terminal, environment=environment)
    return 0


def _open(
    request: Request,
    wish: ChatWish,
    terminal: Terminal,
    environment: Mapping[str, str],
    parts: contextlib.ExitStack,
) -> Opened:
    """The model, until ``parts`` end. A signal ends this, also where a library would lose it."""
    with listening(leave_at_once):
        with terminal.waiting("starting torch"):
            from roundpipe.finetune.use import answering, conversation  # noqa: F401, PLC0415, torch
            from roundpipe.finetune.use.chat import require_base  # noqa: PLC0415
            from roundpipe.finetune.use.opened import open_subject  # noqa: PLC0415
            from roundpipe.finetune.use.subject import find_subject  # noqa: PLC0415
        subject = find_subject(request.given, terminal, base=request.base)
        if wish.compares:
            require_base(subject)
        return parts.enter_context(
            open_subject(subject, request.settings, terminal, environment=environment)
        )


class ThisTerminal:
    """The terminal that the command runs in, as a `Screen`; answers go to ``stream``."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self._stream, self._terminal = stream, terminal
        self._is_shown_to_people = stream.isatty()
        self._is_within_line = False
        with contextlib.suppress(ImportError):  # lines can be edited, and pasted whole
            import readline  # noqa: F401, PLC0415

    def ask(self, more: bool = False) -> str:
        """See `Screen`."""
        prompt = "… " if more else "> "
        if self._is_shown_to_people:
            try:
                text = input(prompt)
            except UnicodeDecodeError:
                return ""
        else:
            sys.stderr.write(prompt)
            sys.stderr.flush()
            text = sys.stdin.readline()
            if not text:
                raise EOFError
        return text.rstrip("\n").encode("utf-8", "replace").decode()

    def show(self, text: str) -> None:
        """See `Screen`. Raises BrokenPipeError where nobody reads any longer."""
        if not text:
            return
        put(self._stream, harmless(text) if self._is_shown_to_people else text)
        self._is_within_line = not text.endswith("\n")

    def say(self, text: str) -> None:
        """See `Screen`."""
        if self._is_within_line and self._is_shown_to_people:
            self.show("\n")
        self._terminal.line(text)
