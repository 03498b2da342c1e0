"""Random draws that do not depend on who runs a layer, when, or how often.

The CPU has one default generator per process, so seeding it per layer on two threads gives wrong
draws. Instead a dispatch mode hands every operation that draws (torch tags them
``nondeterministic_seeded``) a generator of its own, seeded from (seed, step, layer, microbatch):
the same bits as ``torch.manual_seed(layer_seed(...))`` before the layer in plain PyTorch, in
forward and again in recompute.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager


def layer_seed(seed: int, step: int, layer: int, microbatch: int) -> int:
    """The seed of one layer's draws for one microbatch: 63 bits of a hash of the four numbers."""
    text = f"{seed} {step} {layer} {microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class DrawsFrom(TorchDispatchMode):
    """Let every random operation under it draw from one generator; notes whether any did."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.seed = seed
        self.device = device
        self.generator: torch.Generator | None = None  # made at the first draw: most layers have none

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            if self.generator is None:
                self.generator = torch.Generator(self.device).manual_seed(self.seed)
            func, kwargs = self._with_generator(func, kwargs)
        return func(*args, **kwargs)

    def _with_generator(self, func: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """``func`` with our generator, by its own argument or by the overload that has one."""
        if kwargs.get("generator") is not None:
            return func, kwargs  # the user brought one
        if not _takes_generator(func):
            name = "generator" if func._overloadname == "default" else f"generator_with_{func._overloadname}"
            for candidate in (name, f"{func._overloadname}_generator", "generator"):
                other = getattr(func._overloadpacket, candidate, None)
                if other is not None and _takes_generator(other):
                    func = other
                    break
            else:
                raise NotImplementedError(
                    f"{func} draws random numbers but takes no generator\n"
                    "hint: draw with an operation that takes one, e.g. torch.rand or Tensor.bernoulli_"
                )
        return func, {**kwargs, "generator": self.generator}


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
