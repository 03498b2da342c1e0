"""Learn how a causal LM calls its blocks, by running its own forward once on a tiny input.

Two runs, both on copies that share the user's weights, in eval mode, with the random state kept:

- `_run_plain`: the model as it is, hooks noting what each block gets and returns. Its logits are
  what the split chain is compared with, bit for bit.
- `_run_traced`: stand-ins that let the hidden state through, gradients on, every op watched.
  It tells which argument of a block carries a gradient, and which tensors outside the blocks are
  read before the first block and which after the last.

In a large model only the blocks that differ in structure are run, the others let the hidden state
through: the same in the plain run and in the split chain, so the comparison stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from roundpipe.errors import ModelError, RoundPipeError
from roundpipe.models.blocks import BlockCall, BlockForm, StandIn, StandIns, find_blocks
from roundpipe.models.four_bit import values_of
from roundpipe.models.reads import Reads
from roundpipe.models.shell import Home, TensorNames, TreeCopy, TreeShell, find_homes
from roundpipe.models.spec import Inputs
from roundpipe.store.packed import PackedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from roundpipe.models.shell import Fill

_CPU = torch.device("cpu")
_NOTHING: Mapping[Tensor, PackedTensor] = MappingProxyType({})
_RUN_ALL_BELOW = 10_000_000  # parameters in blocks; above, one block of each kind and two more
_FORCED = {"use_cache": False, "return_dict": True}
_OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True, eq=False)
class Split:
    """A causal LM taken apart: its blocks, how they are called, and who reads what."""

    root: nn.Module
    names: TensorNames = field(repr=False)
    blocks: Sequence[nn.Module] = field(repr=False)
    block_names: Sequence[str] = field(repr=False)
    forms: Sequence[BlockForm]
    outside: Sequence[Home] = field(repr=False)
    read_before: frozenset[Home] = field(repr=False)  # before or between blocks
    read_after: frozenset[Home] = field(repr=False)
    vocabulary: int  # logits of a token; 0: the model gives none

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
    calls: Sequence[BlockCall]
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
    """The keyword arguments with which a tree runs: no cache, outputs in a ModelOutput.

    Raises ModelError for outputs that are collected inside the blocks.
    """
    kwargs = {**(inputs.kwargs or {}), **_FORCED}
    config = getattr(root, "config", None)
    for flag in _OUTPUT_FLAGS:
        if kwargs.get(flag) or (kwargs.get(flag) is None and getattr(config, flag, False)):
            raise refuse(root, f"{flag} is not supported yet, set it to False")
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
    blocks = list(found)
    names = TensorNames(root)
    inputs = tiny_inputs(root, device)
    checked = _blocks_to_run(blocks)
    with torch.random.fork_rng(devices=[]):
        try:
            seen, output = _run_plain(root, blocks, names, inputs, (checked, packed))
            forms = seen.forms()
            outside = find_homes(root, names, blocks)
            values = values_of(outside, packed)
            before, after = _run_traced(root, blocks, forms, (outside, values), names, inputs)
        except RoundPipeError as error:
            raise refuse(root, str(error).split("\nhint")[0]) from error
        except Exception as error:
            reason = f"its forward failed on a small input: {type(error).__name__}: {error}"
            raise refuse(root, reason) from error
    split = Split(
        root,
        names,
        blocks,
        [f"{list_name}.{index}" for index in range(len(blocks))],
        forms,
        outside,
        frozenset(before),
        frozenset(after),
        _vocabulary(output),
    )
    calls = [form.with_hidden(call, None) for form, call in zip(forms, seen.calls, strict=True)]
    return Recording(inputs, output, calls, checked, split)


def tiny_inputs(root: Any, device: torch.device = _CPU) -> Inputs:
    """Two short sequences, one of them padded, with labels."""
    config = root.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(text.vocab_size)
    ids = (torch.arange(2 * 8).view(2, 8) * 7 + 5) % vocabulary
    pad = getattr(text, "pad_token_id", None)
    ids[ids == pad] = (int(pad) + 1) % vocabulary if isinstance(pad, int) else 0
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Inputs((), {name: tensor.to(device) for name, tensor in named.items()})


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
class _Seen:
    """Notes each block's call and what came back, and checks how the hidden state is passed on."""

    calls: list[BlockCall] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    _states: list[Any] = field(default_factory=list)
    _hidden: int | str | None = None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.outputs:
            self._follow_hidden(args, kwargs)
        self.calls.append(BlockCall(args, kwargs))
        self._states.append(_state(args, kwargs))

    def leave(self, output: Any) -> None:
        call = self.calls[-1]
        if _state(call.args, call.kwargs) != self._states[-1]:
            raise ModelError(
                "a block writes into what it is called with (keys and values shared between "
                "blocks, or its own input), which is not supported yet"
            )
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor):
            raise ModelError(
                "a block returns neither a tensor nor a tuple that begins with one: "
                f"{type(output).__name__}"
            )
        self.outputs.append(output)

    def _follow_hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        before = _first(self.outputs[-1])
        places: list[int | str] = [i for i, value in enumerate(args) if value is before]
        places += [key for key, value in kwargs.items() if value is before]
        if len(places) != 1 or self._hidden not in (None, places[0]):
            raise ModelError(
                "a block is not called with just what the block before returned: "
                f"block {len(self.calls)}"
            )
        self._hidden = places[0]

    def hidden_place(self) -> int | str:
        if self._hidden is not None:
            return self._hidden
        return 0 if self.calls and self.calls[0].args else "hidden_states"

    def forms(self) -> list[BlockForm]:
        return [
            BlockForm(self.hidden_place(), len(output) if isinstance(output, tuple) else None)
            for output in self.outputs
        ]


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _state(*values: Any) -> list[Any]:
    """Versions of the tensors and identities of the other things within arguments."""
    state: list[Any] = []
    pending = list(values)
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, nn.Module):
            continue
        seen.add(id(value))
        state.append((id(value), value._version if isinstance(value, Tensor) else None))
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, (list, tuple)):
            pending += value
        elif not isinstance(value, Tensor) and hasattr(value, "__dict__"):
            pending += vars(value).values()
    return state


def _run_plain(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    names: TensorNames,
    inputs: Inputs,
    what: tuple[frozenset[int], Mapping[Tensor, PackedTensor]],
) -> tuple[_Seen, Any]:
    """Run the model as it is, with the blocks that are to be checked, and note their calls."""
    checked, packed = what
    seen = _Seen()
    first: dict[Any, int] = {}
    stand_ins: dict[nn.Module, nn.Module] = {}
    for index, block in enumerate(blocks):
        kind = first.setdefault(structure_of(block), index)
        if index not in checked:
            stand_ins[block] = StandIn(block, _passing_on(seen, kind))
    homes = find_homes(root, names, stand_ins)
    tree = TreeCopy(root, names, _device_of(inputs), homes=homes, stand_ins=stand_ins)
    shell = TreeShell(tree, _call_tree)
    shell.bind(values_of(homes, packed))
    shell.module.eval()
    order: list[nn.Module] = []
    for block in dict.fromkeys(blocks):
        copied = stand_ins[block] if block in stand_ins else tree.copy_of(block)
        if block not in stand_ins:
            shell.unpack_within(copied)  # one block's weights at a time

        def enter(_: Any, args: Any, kwargs: Any, block: nn.Module = block) -> None:
            order.append(block)
            seen.enter(args, kwargs)

        copied.register_forward_pre_hook(enter, with_kwargs=True)
        copied.register_forward_hook(lambda _m, _a, output: seen.leave(output))
    with torch.no_grad():
        output = shell(None, inputs, None)
    if order != list(blocks):
        raise ModelError("its blocks are not called in order, each once")
    return seen, output


def _passing_on(seen: _Seen, kind: int) -> Callable[..., Any]:
    """What a block does that is not run: let the hidden state through, like block ``kind``."""

    def called(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = seen.forms()[kind]
        return form.pack(form.hidden_of(args, kwargs))

    return called


def _call_tree(module: nn.Module, _boundary: Any, inputs: Inputs, _context: Any) -> Any:
    return module(*inputs.args, **call_arguments(module, inputs))


def _run_traced(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    forms: Sequence[BlockForm],
    of_outside: tuple[Sequence[Home], Mapping[str, Tensor | PackedTensor]],
    names: TensorNames,
    inputs: Inputs,
) -> tuple[set[Home], set[Home]]:
    """Let the hidden state through the blocks; return what is read before and after them."""
    outside, values = of_outside
    before: set[Home] = set()
    after: set[Home] = set()

    def act(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        form = forms[index]
        call = form.with_hidden(BlockCall(args, kwargs), None)
        for path, leaf in tree_flatten_with_path((call.args, call.kwargs))[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ModelError(
                    "a block gets an argument with a gradient beside the hidden state, which is "
                    f"not supported yet: {_argument(path)}"
                )
        if index == len(blocks) - 1:
            watched.reading = after
        return form.pack(form.hidden_of(args, kwargs))

    stand_ins = StandIns(blocks, act)
    tree = TreeCopy(
        root,
        names,
        _device_of(inputs),
        homes=(),
        idle=[(home, "zero") for home in outside],
        stand_ins=stand_ins.modules,
    )
    # A leaf for each place, so that a tied tensor tells through which of them it is read.
    whole = {
        name: value.unpack() if isinstance(value, PackedTensor) else value.data
        for name, value in values.items()
    }
    leaves = [
        tree.hang(home, whole[home.name], requires_grad=whole[home.name].is_floating_point())
        for home in outside
    ]
    tree.module.eval()
    watched = Reads({id(leaf): home for leaf, home in zip(leaves, outside, strict=True)})
    watched.reading = before
    with torch.enable_grad(), watched:
        _call_tree(tree.module, None, inputs, None)
    stand_ins.require_all_called()
    return before, after


def _argument(path: Any) -> str:
    keys = [str(key).strip("[]'.") for key in path[1:]]
    return ".".join(keys)
