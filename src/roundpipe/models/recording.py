"""Learn how a causal LM calls its blocks, by running its own forward once on a tiny input.

Two runs, both on copies that share the user's weights, in eval mode, with the random state kept:

- `_run_plain`: the model as it is, hooks noting what each block gets, returns and writes
  (`roundpipe.models.seen`). Its logits are what the split chain is compared with, bit for bit.
- `roundpipe.models.tracing`: stand-ins that let the hidden state through, gradients on. It tells
  which arguments of blocks carry a gradient, and who reads the tensors outside the blocks.

In a large model only the blocks that differ in structure are run, the others let the hidden state
through: the same in the plain run and in the split chain, so the comparison stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.errors import ModelError, RoundPipeError
from roundpipe.models.blocks import BlockCall, StandIn, StandIns
from roundpipe.models.find_blocks import find_blocks
from roundpipe.models.four_bit import values_of
from roundpipe.models.restoring import Restoring, are_tables
from roundpipe.models.seen import Seen
from roundpipe.models.shell import Home, TensorNames, TreeCopy, TreeShell, find_homes
from roundpipe.models.tiny_inputs import tiny_inputs
from roundpipe.models.tracing import Outside, run_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from roundpipe.models.blocks import Act, BlockForm
    from roundpipe.models.packet import Flow
    from roundpipe.models.shell import Fill
    from roundpipe.models.spec import Inputs
    from roundpipe.store.packed import PackedTensor

_CPU = torch.device("cpu")
_NOTHING: Mapping[Tensor, PackedTensor] = MappingProxyType({})
_RUN_ALL_BELOW = 10_000_000  # parameters in blocks; above, one block of each kind and two more
_FORCED = {"use_cache": False, "return_dict": True}


@dataclass(frozen=True, eq=False)
class Split:
    """A causal LM taken apart: its blocks, how they are called, and who reads what."""

    root: nn.Module
    names: TensorNames = field(repr=False)
    blocks: Sequence[nn.Module] = field(repr=False)  # in the order in which they are called
    uncalled: Sequence[nn.Module] = field(repr=False)  # of the same list
    block_names: Sequence[str] = field(repr=False)
    forms: Sequence[BlockForm]
    outside: Sequence[Home] = field(repr=False)
    read_before: frozenset[Home] = field(repr=False)  # before or between blocks
    read_after: frozenset[Home] = field(repr=False)
    vocabulary: int  # logits of a token; 0: the model gives none
    flow: Flow = field(repr=False)  # what travels beside the hidden state
    rewritten: frozenset[Home] = frozenset()  # outside: buffers that every forward writes to

    def stand_ins(self, act: Act) -> StandIns:
        """Stand-ins for all blocks."""
        return StandIns(self.blocks, act, self.uncalled)

    def idle_after(self, home: Home) -> Fill:
        """What stands for a tensor where what comes before the blocks runs for nothing but shapes.

        What was never seen to be read is NaN: if it is read after all, that must not go unnoticed.
        """
        return "zero" if home in self.read_before else "nan"

    def outside_copy(
        self,
        device: torch.device,
        stand_ins: StandIns,
        *,
        homes: Iterable[Home],
        idle: Callable[[Home], Fill],
    ) -> TreeCopy:
        """Copy the tree without its blocks; tensors not in ``homes`` become placeholders."""
        bound = set(homes)
        return TreeCopy(
            self.root,
            self.names,
            device,
            homes=[home for home in self.outside if home in bound],
            idle=[(home, idle(home)) for home in self.outside if home not in bound],
            stand_ins=stand_ins.modules,
        )


@dataclass(eq=False)
class Recording:
    """What the runs saw."""

    inputs: Inputs
    output: Any  # of the plain run
    calls: Sequence[BlockCall]  # without hidden state; objects as they were before a block wrote
    outputs: Sequence[Any]  # of the blocks
    collected: Sequence[Mapping[str, Sequence[Any]]]  # by hooks in each block
    checked: frozenset[int]  # blocks that really ran
    split: Split


def refuse(root: Any, reason: str) -> ModelError:
    """Make the error for a model that cannot be split exactly."""
    base = root.get_base_model() if hasattr(root, "get_base_model") else root
    return ModelError(
        f"{type(base).__name__} cannot be split exactly: {reason}\n"
        "hint: wrap nn.Sequential(model) to run it as one layer"
    )


def call_arguments(root: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments with which a tree runs: no cache, outputs in a ModelOutput."""
    kwargs = {**(inputs.kwargs or {}), **_FORCED}
    if "is_causal" in kwargs:  # transformers writes it into the config, which devices share
        raise refuse(root, "is_causal as an argument is not supported")
    return kwargs


def record(
    root: nn.Module, device: torch.device = _CPU, packed: Mapping[Tensor, PackedTensor] = _NOTHING
) -> Recording:
    """Run the model on a tiny input and learn its split; raises ModelError where it has none.

    ``device``: where its tensors are, the CPU or meta. On meta nothing has a value. ``packed``:
    the packed values of parameters that are stand-ins.
    """
    list_name, found = find_blocks(root)
    names = TensorNames(root)
    inputs = tiny_inputs(root, device)
    with torch.random.fork_rng(devices=[]):
        try:
            plain = _run_in_order(root, list(found), names, inputs, packed)
            seen, blocks = plain.seen, plain.blocks
            outside = find_homes(root, names, found)
            values = values_of(outside, packed)
            uncalled = [block for block in found if block not in blocks]
            changed = {(home.module, home.local) for home in plain.rewritten}
            rewritten = {home for home in outside if (home.module, home.local) in changed}
            traced = run_traced(
                root,
                (blocks, uncalled),
                seen,
                Outside(names, device, outside, values, rewritten),
                lambda module: _call_tree(module, None, inputs, None),
            )
        except RoundPipeError as error:
            raise refuse(root, str(error).split("\nhint")[0]) from error
        except Exception as error:
            reason = f"its forward failed on a small input: {type(error).__name__}: {error}"
            raise refuse(root, reason) from error
    places = {block: f"{list_name}.{index}" for index, block in reversed([*enumerate(found)])}
    split = Split(
        root,
        names,
        blocks,
        uncalled,
        [places[block] for block in blocks],
        seen.forms(),
        outside,
        frozenset(traced.before),
        frozenset(traced.after),
        _vocabulary(plain.output),
        seen.flow(list(map(structure_of, blocks))).taking(traced.takes).computing(traced.between),
        frozenset(rewritten),
    )
    return Recording(
        inputs,
        plain.output,
        seen.pure_calls(),
        seen.outputs,
        seen.collected(),
        plain.checked,
        split,
    )


def _vocabulary(output: Any) -> int:
    logits = getattr(output, "logits", None)
    return int(logits.shape[-1]) if isinstance(logits, Tensor) else 0


def _device_of(inputs: Inputs) -> torch.device:
    ids: Tensor = (inputs.kwargs or {})["input_ids"]
    return ids.device


def _blocks_to_run(blocks: Sequence[nn.Module]) -> frozenset[int]:
    if sum(p.numel() for block in blocks for p in block.parameters()) <= _RUN_ALL_BELOW:
        return frozenset(range(len(blocks)))
    first: dict[Any, int] = {}
    for index, block in enumerate(blocks):
        first.setdefault(structure_of(block), index)
    return frozenset({0, min(1, len(blocks) - 1), len(blocks) - 1, *first.values()})


def structure_of(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks the same kind: their module tree and their settings but the index."""
    return tuple(
        (name, type(module), *sorted(_settings(module))) for name, module in block.named_modules()
    )


def _settings(module: nn.Module) -> Iterable[tuple[str, str]]:
    for key, value in module.__dict__.items():
        if isinstance(value, (bool, int, float, str)) and "idx" not in key and "index" not in key:
            yield key, repr(value)


@dataclass
class _Plain:
    """A run of the model as it is. ``checked``: the blocks that really ran.

    ``rewritten``: where buffers hang that it wrote to.
    """

    blocks: list[nn.Module]
    seen: Seen
    output: Any
    checked: frozenset[int]
    rewritten: set[Home]


def _run_in_order(
    root: nn.Module,
    blocks: list[nn.Module],
    names: TensorNames,
    inputs: Inputs,
    packed: Mapping[Tensor, PackedTensor],
) -> _Plain:
    """Run the model, with its blocks in the order in which it calls them."""
    for _ in range(2):
        plain = _run_plain(root, blocks, names, inputs, (_blocks_to_run(blocks), packed))
        if plain.blocks == blocks:
            return plain
        blocks = plain.blocks
    raise ModelError("its blocks are called in another order each time")


def _run_plain(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    names: TensorNames,
    inputs: Inputs,
    what: tuple[frozenset[int], Mapping[Tensor, PackedTensor]],
) -> _Plain:
    """Run the model as it is, with the blocks that are to be checked, and note their calls."""
    checked, packed = what
    run = {blocks[index] for index in checked}
    seen = Seen()
    stand_ins: dict[nn.Module, nn.Module] = {
        block: StandIn(block, seen.pass_on(structure_of(block)))
        for block in blocks
        if block not in run
    }
    homes = find_homes(root, names, stand_ins)
    tree = TreeCopy(root, names, _device_of(inputs), homes=homes, stand_ins=stand_ins)
    restoring = Restoring(tree, are_tables(homes))

    def call(module: nn.Module, boundary: Any, given: Inputs, context: Any) -> Any:
        with restoring.restored():
            return _call_tree(module, boundary, given, context)

    shell = TreeShell(tree, call)
    shell.bind(values_of(homes, packed))
    shell.module.eval()
    order: list[nn.Module] = []
    for block in dict.fromkeys(blocks):
        copied = stand_ins[block] if block in stand_ins else tree.copy_of(block)
        if block not in stand_ins:
            shell.unpack_within(copied)  # one block's weights at a time

        def enter(_: Any, args: Any, kwargs: Any, block: nn.Module = block) -> None:
            order.append(block)
            seen.enter(args, kwargs, structure_of(block))

        copied.register_forward_pre_hook(enter, with_kwargs=True)
        copied.register_forward_hook(lambda _m, _a, output: seen.leave(output))
    try:
        with torch.no_grad():
            output = shell(None, inputs, None)
    finally:
        seen.close()
    return _Plain(order, seen, output, checked, restoring.changed)


def _call_tree(module: nn.Module, _boundary: Any, inputs: Inputs, _context: Any) -> Any:
    return module(*inputs.args, **call_arguments(module, inputs))
