"""Subjects in processes of their own, told over pipes to do one step at a time.

A subject lives in its process for the whole run, so its state is warm, and blocks in ``recv`` while
another one is timed. That it really blocks is measured, not believed: each report carries the
processor time that its process burnt between two commands. One sample goes

    parent    go ─────────────────► done    clear ────► ready
    child          step                     drop gradients

and its clock runs, in the parent, from ``go`` to the last ``done``: from a common start to the
moment where every gradient of the step is on the host. Clearing gradients is not timed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

PATIENCE_SECONDS = 120.0


class ChildError(RuntimeError):
    """A subject failed, or did not answer in time; the message carries its traceback."""


class Subject(Protocol):
    """What a child process holds."""

    def step(self, variant: str) -> float | None:
        """Run one step to the last gradient on the host; the loss, where this process knows it."""
        ...

    def gradient_square(self) -> float:
        """Return the sum of squares of the gradients of the last step."""
        ...

    def clear(self) -> None:
        """Drop the gradients."""
        ...

    def close(self) -> None:
        """End threads and connections."""
        ...


@dataclass(frozen=True)
class Report:
    """What one process says of one step; seconds are processor time of the whole process."""

    loss: float | None
    busy_seconds: float
    idle_seconds: float
    gradient_square: float
    threads: int


@dataclass(frozen=True)
class Sample:
    """One step of one subject, over all its processes; the fields add up their reports."""

    seconds: float
    busy_seconds: float
    idle_seconds: float
    loss: float
    gradient_square: float
    threads: int


class Group:
    """The processes that do one subject's step together."""

    def __init__(self, builds: Sequence[tuple[Callable[..., Subject], tuple[object, ...]]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for build, arguments in builds:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._receive()

    def sample(self, variant: str = "", *, processes: int | None = None) -> Sample:
        """Time one step of the first ``processes`` (default: all); blocks until they are idle.

        Raises ChildError when one of them failed.
        """
        pipes = self._pipes[:processes]
        start = time.perf_counter()
        self._send(variant, pipes)
        self._receive(pipes)
        seconds = time.perf_counter() - start
        self._send("clear", pipes)
        reports = self._receive(pipes)
        return Sample(
            seconds=seconds,
            busy_seconds=sum(report.busy_seconds for report in reports),
            idle_seconds=sum(report.idle_seconds for report in reports),
            loss=_agreed([report.loss for report in reports if report.loss is not None]),
            gradient_square=sum(report.gradient_square for report in reports),
            threads=max(report.threads for report in reports),
        )

    def close(self) -> None:
        """Let every process end its subject, then end the process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()

    def _send(self, message: str, pipes: Sequence[Connection]) -> None:
        for pipe in pipes:
            try:
                pipe.send(message)
            except OSError as error:
                raise ChildError("the process of a subject is gone") from error

    def _receive(self, pipes: Sequence[Connection] | None = None) -> list[Report]:
        reports = []
        for pipe in self._pipes if pipes is None else pipes:
            if not pipe.poll(PATIENCE_SECONDS):
                raise ChildError(f"no answer from a subject for: {PATIENCE_SECONDS:.0f} s")
            try:
                report = pipe.recv()
            except EOFError as error:
                raise ChildError("the process of a subject is gone") from error
            if isinstance(report, str):
                raise ChildError(report)
            reports.append(report)
        return reports


def _agreed(losses: list[float]) -> float:
    # Copies of one subject must not differ by a bit: same weights, same data, same arithmetic.
    if len(set(losses)) != 1:
        raise ChildError(f"processes of one subject disagree about the loss: {losses}")
    return losses[0]


def _serve(pipe: Connection, build: Callable[..., Subject], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    try:
        subject = build(*arguments)
        pipe.send(None)
        _answer(pipe, subject)
    except EOFError:
        subject.close()
    except Exception:
        pipe.send(traceback.format_exc())


def _answer(pipe: Connection, subject: Subject) -> None:
    rested = time.process_time()
    while True:
        variant = pipe.recv()
        start = time.process_time()
        loss = subject.step(variant)
        end = time.process_time()
        pipe.send(None)
        pipe.recv()
        square = subject.gradient_square()
        subject.clear()
        pipe.send(Report(loss, end - start, start - rested, square, _count_threads()))
        rested = time.process_time()


def _count_threads() -> int:
    tasks = Path(f"/proc/{os.getpid()}/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0
