"""Which ModuleList of a causal LM holds its blocks: the largest of those that text runs through.

A model may hold lists that no text reaches (a vision tower, heads that predict further tokens), and
such a list may be larger than that of the blocks. The model's own forward tells: it is run on the
meta device, where nothing is computed, with stand-ins that end it as soon as the largest list is
reached. Models with one list are not asked.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.blocks import BlockReached, StandIn
from roundpipe.models.estimate.meter import Answering
from roundpipe.models.shell import TensorNames, TreeCopy, find_homes
from roundpipe.models.tiny_inputs import tiny_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_META = torch.device("meta")
Named = tuple[str, nn.ModuleList]


def find_blocks(root: nn.Module) -> Named:
    """Find the ModuleList that holds the blocks; its name and it.

    Of the lists that the forward calls on text the one that holds most parameters, the outer one of
    equals. Raises ModelError for a model without such a list.
    """
    lists = _outer_lists(root)
    if not lists:
        raise ModelError(
            f"no repeated blocks: {type(root).__name__} holds no ModuleList\n"
            "hint: wrap nn.Sequential(model) to run it as one layer"
        )
    if len(lists) == 1:
        return lists[0]
    try:
        called = _called(root, lists)
    except Exception as error:  # whatever a model raises that looks at values of meta tensors
        logger.debug("blocks are found by where they hang: %s: %s", type(error).__name__, error)
        called = _in_decoder(root, lists)
    return called[0] if called else lists[0]


def _outer_lists(root: nn.Module) -> list[Named]:
    """The lists with members, the largest first; of one within another the outer."""
    found: list[tuple[int, str, nn.ModuleList]] = []
    pending, seen = [("", root)], set[int]()
    while pending:
        name, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        lists_lists = all(isinstance(child, nn.ModuleList) for child in module.children())
        if isinstance(module, nn.ModuleList) and len(module) and not lists_lists:
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((size, name, module))
            continue
        prefix = f"{name}." if name else ""
        pending += [(prefix + local, child) for local, child in module.named_children()][::-1]
    found.sort(key=lambda each: -each[0])  # stable: of equals the first
    return [(name, module) for _, name, module in found]


def _called(root: nn.Module, lists: Sequence[Named]) -> list[Named]:
    """The lists that a forward on text calls members of, the largest first."""
    members = {member: index for index, (_, each) in enumerate(lists) for member in each}
    seen: set[int] = set()

    def reached(_block: nn.Module, _args: Any, _kwargs: Any) -> Any:
        raise BlockReached

    stand_ins = {m: StandIn(m, reached) for m, index in members.items() if index == 0}
    names = TensorNames(root)
    homes = find_homes(root, names, stand_ins)
    tree = TreeCopy(
        root,
        names,
        _META,
        homes=(),
        idle=[(home, "zero") for home in homes],
        stand_ins=stand_ins,
    )
    for member, index in members.items():
        if index:
            tree.copy_of(member).register_forward_pre_hook(lambda *_, index=index: seen.add(index))
    tree.module.eval()
    arguments = {**(tiny_inputs(root, _META).kwargs or {}), "use_cache": False}
    with torch.no_grad(), Answering():
        try:
            tree.module(**arguments)
        except BlockReached:
            return [lists[0]]
    return [lists[index] for index in sorted(seen)]


def _in_decoder(root: Any, lists: Sequence[Named]) -> list[Named]:
    """The lists below what a model calls its decoder, if that is a part of it."""
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if not isinstance(decoder, nn.Module):
        return []
    below = set(map(id, decoder.modules()))
    return [(name, each) for name, each in lists if id(each) in below]
