"""What scripts ask ``trainer.accelerator`` for: there is one process, which drives all devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True)
class OneProcess:
    """The names of accelerate's ``Accelerator`` that say who one is. ``device``: the first one."""

    device: torch.device
    write: Callable[[str], None]
    is_main_process: bool = True
    is_local_main_process: bool = True
    is_last_process: bool = True
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1

    def print(self, *words: Any) -> None:
        """Show words, as every process but the first would not."""
        self.write(" ".join(map(str, words)))

    def wait_for_everyone(self) -> None:
        """Return: nobody else is there."""

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The module that a RoundPipe was made of; its weights are newest after synchronize()."""
        if isinstance(model, RoundPipe):
            model.synchronize()
            return model.model
        return model
