"""Runs the same code for several microbatches and lets all of them ask together.

Code that runs on the host calls parts that run on devices. Each microbatch has a thread in which
that code runs until it asks for a part; when all are waiting, those that ask for the same one are
served at once, so a part's weights are uploaded once for all of them and several devices work.

    microbatch 0   --ask A          --ask B          --end
    microbatch 1         --ask A          --ask B          --end
    serve                      A{0,1}           B{0,1}

Only one thread runs at a time, in the order of microbatches: what they draw or write is the same on
every run. A microbatch whose code goes another way is served when its turn comes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.engine.caller import CallerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ask = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    Serve = Callable[[Sequence["Request"]], Sequence[Any]]
    Work = Callable[[Ask], Any]


@dataclass(frozen=True)
class Request:
    """One microbatch's call of a part, with what of its thread the part must see."""

    part: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_grad: bool
    caller: CallerState

    @classmethod
    def of(cls, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """A call in this thread."""
        return cls(part, args, kwargs, torch.is_grad_enabled(), CallerState.capture())

    def goes_with(self, other: Request) -> bool:
        """Whether both can be served at once."""
        return self.part == other.part and self.has_grad == other.has_grad


class _GivenUpError(BaseException):
    """Ends the code of a microbatch whose call has failed elsewhere."""


class _Runner:
    """One microbatch's thread; it and the caller's take turns."""

    def __init__(self, number: int, work: Work) -> None:
        self._work, self._caller = work, CallerState.capture()
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._is_given_up = False
        self.request: Request | None = None
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        name = f"roundpipe microbatch {number}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take_turn(self) -> None:
        """Let it run until it asks or is over; raises what its code raised."""
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Let it end wherever it is, and wait for that."""
        self._is_given_up = True
        if not self.is_over:
            self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._is_given_up:
                self._caller.run(self._in_modes)
        except _GivenUpError:
            pass
        except BaseException as error:  # the caller's thread raises it
            self.error = error
        finally:
            self.is_over, self.request = True, None
            self._back.release()

    def _in_modes(self) -> None:
        with torch.inference_mode(self._is_inference), torch.set_grad_enabled(self._has_grad):
            self.answer = self._work(self._ask)

    def _ask(self, part: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.request = Request.of(part, args, kwargs)
        self._back.release()
        self._go.acquire()
        if self._is_given_up:
            raise _GivenUpError
        answer, self.answer, self.request = self.answer, None, None
        return answer


def run_together(works: Sequence[Work], serve: Serve) -> list[Any]:
    """Run each work, called with what it is to ask by, and return their results in order.

    ``serve`` is called in this thread with requests for one part and returns their results; work
    that is alone runs in this thread too. Blocks until all is over. The first failure, of a work or
    of ``serve``, ends all of them and is raised.
    """
    if len(works) == 1:
        return [works[0](lambda *call: serve([Request.of(*call)])[0])]
    runners = [_Runner(number, work) for number, work in enumerate(works)]
    try:
        ready = runners
        while ready:
            for runner in ready:
                runner.take_turn()
            ready = _served([r for r in runners if not r.is_over], serve)
        return [runner.answer for runner in runners]
    finally:
        for runner in runners:
            runner.end()


def _served(waiting: Sequence[_Runner], serve: Serve) -> list[_Runner]:
    """Serve whoever asks for the same as the first that waits."""
    asked = [(runner, runner.request) for runner in waiting if runner.request is not None]
    if not asked:
        return []
    group = [(runner, r) for runner, r in asked if r.goes_with(asked[0][1])]
    answers = serve([request for _, request in group])
    for (runner, _), answer in zip(group, answers, strict=True):
        runner.answer = answer
    return [runner for runner, _ in group]
