"""Host memory spread over several memory nodes, and threads that stay near a card.

On a machine with several nodes each processor has memory of its own. Weights are read by every card
in turn, so their pages alternate between the nodes: no node's memory is the limit. A thread that
issues for one card (and copies through staging buffers for it) stays on the cores near that card.
Where there is one node, or the system has no such call, nothing is done and nothing is said.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.device.topology import memory_nodes, slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_INTERLEAVE = 3  # MPOL_INTERLEAVE
_MOVE = 2  # MPOL_MF_MOVE: pages that are there already move too
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def nodes_to_spread_over(root: Path = Path("/")) -> tuple[int, ...]:
    """The nodes of host memory if there are several that we may use, else none."""
    nodes = [node.index for node in memory_nodes(root)]
    return tuple(nodes) if len(nodes) > 1 else ()


def node_mask(nodes: Sequence[int]) -> list[int]:
    """The bits of ``nodes`` in words, as the kernel reads them."""
    words = [0] * (max(nodes) // _WORD + 1)
    for node in nodes:
        words[node // _WORD] |= 1 << node % _WORD
    return words


def interleave(address: int, num_bytes: int, nodes: Sequence[int]) -> bool:
    """Spread whole pages over ``nodes``; whether the kernel did. Page-locked ones stay."""
    number = _MBIND.get(platform.machine())
    if not nodes or not num_bytes or number is None or sys.platform != "linux":
        return False
    words = node_mask(nodes)
    mask = (ctypes.c_ulong * len(words))(*words)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    # The kernel reads one bit less than it is told.
    arguments = (address, num_bytes, _INTERLEAVE, ctypes.addressof(mask), len(words) * _WORD + 1)
    result: int = syscall(
        ctypes.c_long(number), *(ctypes.c_ulong(each) for each in arguments), ctypes.c_uint(_MOVE)
    )
    return result == 0


def cores_near(bus: str, root: Path = Path("/")) -> frozenset[int]:
    """The cores near the card at ``bus``; none where that is unknown or there is one node."""
    nodes = {node.index: node.cores for node in memory_nodes(root)}
    node = slot_of(bus, root).node
    return nodes.get(node, frozenset()) if node is not None and len(nodes) > 1 else frozenset()


def stay_on(cores: Set[int]) -> bool:
    """Keep the calling thread, and those it starts, on ``cores`` as far as it may use them."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return False
    allowed = os.sched_getaffinity(0) & cores  # 0 is this thread
    if allowed:
        os.sched_setaffinity(0, allowed)
    return bool(allowed)
