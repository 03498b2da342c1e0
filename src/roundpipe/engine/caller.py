"""What of the caller's thread its work must see in ours.

Workers start without the caller's autocast, grad mode, default device and context variables, so a
user's ``with torch.autocast(...)`` would silently do nothing. A call captures them; every action
runs under them.
"""

from __future__ import annotations

import contextvars
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class _Autocast:
    device: str
    dtype: torch.dtype


@dataclass(frozen=True)
class CallerState:
    """Autocast of each device type, function modes (default device among them) and variables."""

    autocasts: tuple[_Autocast, ...]
    function_modes: tuple[Any, ...]
    variables: contextvars.Context
    cache_enabled: bool

    @classmethod
    def capture(cls) -> CallerState:
        """The state of the calling thread."""
        return cls(
            autocasts=tuple(
                _Autocast(device, torch.get_autocast_dtype(device))
                for device in AUTOCAST_DEVICES
                if torch.is_autocast_enabled(device)
            ),
            function_modes=tuple(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
            variables=contextvars.copy_context(),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing that tensor operations would notice."""
        return not self.autocasts and not self.function_modes

    def run(self, work: Callable[[], object]) -> object:
        """Run ``work`` in this thread as the caller would."""
        if self.is_plain and not len(self.variables):
            return work()
        # A Context can be entered once at a time, and several streams run at once: a copy each.
        return self.variables.copy().run(self._run_modes, work)

    def _run_modes(self, work: Callable[[], object]) -> object:
        with self._modes():
            return work()

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(
                    torch.autocast(
                        autocast.device, dtype=autocast.dtype, cache_enabled=self.cache_enabled
                    )
                )
            for mode in self.function_modes:
                stack.enter_context(mode)
            yield
