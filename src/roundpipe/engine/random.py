"""Random draws that do not depend on who runs a layer, when, or how often.

The CPU has one default generator per process, so seeding it per layer on two threads gives wrong
draws. Instead a dispatch mode hands every operation that draws (torch tags them
``nondeterministic_seeded``) a generator of its own, seeded from (seed, step, layer, microbatch):
the same bits as ``torch.manual_seed(layer_seed(...))`` before the layer in plain PyTorch, in
forward and again in recompute.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe.engine.choices import CHOOSING, chooses
from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roundpipe.engine.choices import Noting, Replaying


class _Loans:
    """The default generators belong to the process; whoever lends them a state must be alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count, self.is_lent = 0, False

    @contextmanager
    def one(self, default: torch.Generator, own: torch.Generator) -> Iterator[None]:
        """Lend ``default`` the state of ``own``, and take back how far it came."""
        with self._lock:
            self.is_lent = True
            kept = default.get_state()
            default.set_state(own.get_state())
            try:
                yield
            finally:
                own.set_state(default.get_state())
                default.set_state(kept)
                self.count += 1
                self.is_lent = False


_LOANS = _Loans()


class Numbering:
    """The numbers of calls, of which their draws depend; ``made``: how many there were."""

    def __init__(self) -> None:
        self.made = 0

    def next(self) -> int:
        """The number of the next call."""
        self.made += 1
        return self.made - 1


def layer_seed(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The seed of one layer's draws for one microbatch: 63 bits of a hash of the four numbers."""
    text = f"{seed} {step} {layer} {microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def pass_seed(seed: int) -> int:
    """The seed of passes without gradient, so that they draw nothing that training draws."""
    return layer_seed(seed, -1, -1, -1)


class DrawsFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let every random operation under it draw from one generator; notes whether any did.

    ``choices``: what runs the operations that choose by values, else they run as they are.
    """

    def __init__(
        self, seed: int, device: torch.device, choices: Noting | Replaying | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.device = device
        self.choices = choices
        self.generator: torch.Generator | None = (
            None  # made at the first draw: most layers have none
        )

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrap every dispatch for the compiler, whose import alone takes seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.choices is not None and func in CHOOSING and chooses(func, args):
            return self.choices(func, args, kwargs, partial(self._drawn, func, args, kwargs))
        return self._drawn(func, args, kwargs)

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)  # the user brought one
        if self.generator is None:
            self.generator = torch.Generator(self.device).manual_seed(self.seed)
        taking = _overload_with_generator(func)
        if taking is not None:
            return taking(*args, **kwargs, generator=self.generator)
        return self._by_default_generator(func, args, kwargs)

    def _by_default_generator(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation that only knows its device's default generator, lent our state."""
        assert self.generator is not None
        with _LOANS.one(_default_generator(self.device), self.generator):
            return func(*args, **kwargs)


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random operations: in a backward nothing is known of what forward drew there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs)
        repeats = "backward" in func.name()  # of fused attention: it is told what forward drew
        if is_random and not repeats and kwargs.get("generator") is None:
            raise ModelError(
                f"a layer draws random numbers in its backward: {func}; one that recomputes by "
                "itself would draw others than in forward\n"
                "hint: leave torch.utils.checkpoint out of it: recompute_grain='layer' does that"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """False for fused attention without dropout, which is tagged as random all the same."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators = torch.get_device_module(device).default_generators
    found: torch.Generator = generators[device.index or 0]
    return found


def _overload_with_generator(func: Any) -> Any:
    """The operation, or the overload of it, that takes a generator; None if there is none."""
    if _takes_generator(func):
        return func
    names = func._overloadpacket.overloads()
    arguments = [argument.name for argument in func._schema.arguments]
    for name in names:
        other = getattr(func._overloadpacket, name)
        others = [argument.name for argument in other._schema.arguments]
        if _takes_generator(other) and [n for n in others if n != "generator"] == arguments:
            return other
    return None


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


class Undrawn:
    """Tells whether a layer that is believed to draw nothing has drawn from the default generator.

    That belongs to the process: while anyone else draws from it the answer may be yes for nothing,
    never no for something.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = _default_generator(device)
        self._state = self._state_now()
        self._num_loans, self._is_lent = _LOANS.count, _LOANS.is_lent

    def has_drawn(self) -> bool:
        """Whether anything may have been drawn since this was made."""
        was_lent = self._is_lent or _LOANS.is_lent or self._num_loans != _LOANS.count
        return was_lent or self._state != self._state_now()

    def _state_now(self) -> bytes:
        # As bytes: torch.equal takes ten times as long for the CPU's five thousand.
        return self._generator.get_state().numpy().tobytes()
