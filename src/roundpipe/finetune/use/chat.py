"""A conversation with a model: what was said so far, and how the next question is asked.

What is asked is the whole conversation, through the chat template. Where it grows beyond what the
model was made for, its oldest turns are left out; what does not even fit alone is refused. A model
without a chat template goes on with each prompt by itself: it was never taught to take turns.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.device.survey import survey_devices
from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.forecast.machines import saved_machine
from roundpipe.finetune.model.positions import longest_known
from roundpipe.finetune.output.prompts import has_template, tokens_of
from roundpipe.finetune.output.sample import Answerer, sampling_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from roundpipe.finetune.use.chat_wish import ChatWish
    from roundpipe.finetune.use.opened import Opened
    from roundpipe.finetune.use.subject import Subject
    from roundpipe.plan.machine import Machine

NO_TEMPLATE = "the tokenizer has no chat template: each prompt is gone on with as plain text"
_LEAST_SHARE = 4  # an answer has a quarter of the model's length before turns are left out for it


@dataclass
class Chat:
    """One conversation. ``messages``: question, answer, question, …; ``limit``: tokens that the
    model was made for, None: not known. ``has_turns``: the model has a chat template.
    """

    answerer: Answerer
    system: str | None = None
    limit: int | None = None
    has_turns: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, answerer: Answerer, *, system: str | None = None) -> Chat:
        """A conversation that has not begun."""
        has_turns = has_template(answerer.tokenizer)
        limit = longest_known(answerer.pipe.model)
        return cls(answerer, system if has_turns else None, limit, has_turns)

    def asked(self, text: str) -> list[dict[str, Any]] | str:
        """What a question is asked with: all messages, or the text alone."""
        if not self.has_turns:
            return text
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, {"role": "user", "content": text}]

    def ask(
        self,
        text: str,
        show: Callable[[str], None],
        *,
        say: Callable[[str], None],
        should_stop: Callable[[], bool] | None = None,
    ) -> str:
        """Ask a question and remember the answer; its text goes to ``show`` as it is made.

        ``say`` is told what is left out. Once ``should_stop`` says so the answer is what there is
        of it; an empty one is forgotten, with its question. Raises DataError for a question that is
        too long, or that the template refuses; the conversation is then as before.
        """
        most = self._make_room(text, say)
        answer = self.answerer.stream(
            self.asked(text), show, max_new_tokens=most, should_stop=should_stop
        )
        if self.has_turns and answer:
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
        return answer

    def undo(self) -> bool:
        """Forget the last question with its answer; whether there was one."""
        had = bool(self.messages)
        del self.messages[-2:]
        return had

    def reset(self) -> None:
        """Forget all that was said; the system prompt stays."""
        self.messages.clear()

    def _make_room(self, text: str, say: Callable[[str], None]) -> int:
        """Leave out the oldest turns until an answer has room; how many tokens it may take."""
        most = self.answerer.max_new_tokens
        if self.limit is None:
            return most
        wanted = min(most, self.limit // _LEAST_SHARE)
        kept = list(self.messages)
        while (taken := self._count(text)) + wanted > self.limit and self.messages:
            del self.messages[:2]
        if taken >= self.limit:
            self.messages[:] = kept
            raise DataError(
                f"the question has {taken:,} tokens, and the model was made for {self.limit:,}"
                "\nhint: ask with fewer words"
            )
        if left_out := (len(kept) - len(self.messages)) // 2:
            turns = "the oldest turn is" if left_out == 1 else f"the {left_out} oldest turns are"
            say(f"{turns} left out: the model was made for {self.limit:,} tokens")
        return min(most, self.limit - taken)

    def _count(self, text: str) -> int:
        return len(tokens_of(self.answerer.tokenizer, self.asked(text)))


def answerer_of(opened: Opened, wish: ChatWish, *, environment: Mapping[str, str]) -> Answerer:
    """What answers for an opened model, as it is wished."""
    return Answerer(
        opened.model,
        opened.tokenizer,
        max_new_tokens=wish.max_new_tokens,
        batch_size=wish.batch_size,
        seed=wish.seed,
        machine=_machine(opened, environment),
        **sampling_of(opened.model.model, wish),
    )


def sampling_of(model: Any, wish: ChatWish) -> dict[str, Any]:
    """How tokens are chosen: as wished, else as the model's own generation config says."""
    own = getattr(model, "generation_config", None)
    draws = {"do_sample": True} if getattr(own, "do_sample", False) else {}
    return sampling_settings({**draws, "temperature": wish.temperature, **wish.sampling})


def require_base(subject: Subject) -> None:
    """Raise ConfigError for a model that has no base beside it."""
    if subject.adapter is None:
        raise ConfigError(
            f"compare=base is of an adapter, and this is a whole model: {subject.given}"
            "\nhint: leave it out, and ask the other model by itself"
        )


@contextlib.contextmanager
def base_alone(answerer: Answerer) -> Iterator[None]:
    """Have the base answer while the block runs, without its adapter."""
    answerer.use_adapter = False
    try:
        yield
    finally:
        answerer.use_adapter = True


@contextlib.contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C while the block runs; a second one raises KeyboardInterrupt.

    Gives what tells whether it came. Outside the main thread nothing is listened to.
    """
    asked = threading.Event()

    def handle(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.getsignal(signal.SIGINT)
    if before is None or before == signal.SIG_IGN:
        yield asked.is_set
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _machine(opened: Opened, environment: Mapping[str, str]) -> Machine | None:
    """This machine, with the rates that were measured on it, if they were."""
    if not opened.devices:
        return None
    return survey_devices(list(opened.devices), saved=saved_machine(environment))
