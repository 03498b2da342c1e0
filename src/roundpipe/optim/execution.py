"""Who executes an update: compiled code, or chunks of plain PyTorch.

They may differ in a last bit (on x86-64 they were not seen to; either differs from torch's
single-tensor optimizer in some), so which one ran is part of an optimizer's state. Threads: as many
as ``torch.get_num_threads()`` says in the thread that updates, which a `CpuDevice` sets for each
stream. Nothing reads OMP_NUM_THREADS.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import torch

from roundpipe.errors import ConfigError
from roundpipe.optim.build import kernel
from roundpipe.optim.chunks import update_in_chunks_
from roundpipe.optim.compiled import Kernel

if TYPE_CHECKING:
    from roundpipe.optim.operands import Numbers, Operands

logger = logging.getLogger(__name__)

Implementation = Literal["auto", "compiled", "chunks"]


def resolve(implementation: Implementation) -> Kernel | None:
    """The compiled update, or None for chunks; builds it at its first use in this process.

    ``"auto"`` without a compiler is chunks, said in the log. Raises ConfigError if ``"compiled"``
    cannot be had.
    """
    if implementation not in get_args(Implementation):
        raise ConfigError(
            f"implementation must be auto, compiled or chunks: {implementation}\n"
            "hint: implementation='auto'"
        )
    if implementation == "chunks":
        return None
    found = kernel()
    if isinstance(found, Kernel):
        return found
    if implementation == "compiled":
        raise ConfigError(
            f"the optimizer's kernel cannot be compiled: {found}\nhint: implementation='auto'"
        ) from found
    logger.warning("the optimizer updates in chunks of PyTorch, which is slower: %s", found)
    return None


@torch.no_grad()
def update_in_one_pass_(operands: Operands, numbers: Numbers, compiled: Kernel | None) -> None:
    """Do one update in place, compiled where that is possible for these tensors.

    The gradient is left as it is. All memory is allocated before the first write. Parameters and
    working weights that are not contiguous are updated in a copy and written back.
    """
    o, out = operands, operands.out
    whole = replace(
        o,
        param=o.param.contiguous(),
        grad=o.grad.contiguous(),
        out=None if out is None else out.contiguous(),
    )
    if compiled is not None and compiled.can_run(whole):
        compiled.update_(whole, numbers, threads=torch.get_num_threads())
    else:
        update_in_chunks_(whole, numbers)
    if whole.param is not o.param:
        o.param.copy_(whole.param)
    if out is not None and whole.out is not None and whole.out is not out:
        out.copy_(whole.out)
