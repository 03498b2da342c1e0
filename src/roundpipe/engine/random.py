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
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


# The default generators belong to the process; whoever lends them a state must be alone.
_DEFAULT_GENERATOR = threading.Lock()


def layer_seed(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The seed of one layer's draws for one microbatch: 63 bits of a hash of the four numbers."""
    text = f"{seed} {step} {layer} {microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def pass_seed(seed: int) -> int:
    """The seed of passes without gradient, so that they draw nothing that training draws."""
    return layer_seed(seed, -1, -1, -1)


class DrawsFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Let every random operation under it draw from one generator; notes whether any did."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        self.device = device
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
        default = _default_generator(self.device)
        with _DEFAULT_GENERATOR:
            kept = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(kept)


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


class LayerRandom:
    """Which layers draw, found while their first whole forward runs; shared by all devices."""

    def __init__(self) -> None:
        self._draws: dict[int, bool] = {}

    def forget(self) -> None:
        """Look again: the model went to training or evaluation mode."""
        self._draws.clear()

    @contextmanager
    def _watched(self, layer: int, mode: DrawsFrom) -> Iterator[None]:
        with mode:
            yield
        self._draws[layer] = self._draws.get(layer, False) or mode.generator is not None

    def of(
        self, layer: int, make: Callable[[], DrawsFrom]
    ) -> AbstractContextManager[None] | DrawsFrom:
        """What to run ``layer`` under: nothing for a layer that is known to draw nothing."""
        draws = self._draws.get(layer)
        if draws is False:
            return nullcontext()
        mode = make()
        return mode if draws else self._watched(layer, mode)
