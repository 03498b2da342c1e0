"""Any Hugging Face causal LM as a chain, found by structure, with no code for any one model.

The split is learned from a recording run and then tried: the chain of prefix, blocks and suffix
must give the model's own logits and loss, bit for bit, on a padded input, and the context must
rebuild every argument exactly without weights. A model where it does not is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.errors import ModelError
from roundpipe.models.causal_layers import Block, CausalLMContext, Prefix, Suffix
from roundpipe.models.changes import TreeWatch
from roundpipe.models.chunk_trial import loss_can_be_cut
from roundpipe.models.experts import tell_slow_experts
from roundpipe.models.four_bit import values_of
from roundpipe.models.loss import count_trained_tokens
from roundpipe.models.recording import record, refuse
from roundpipe.models.refusals import refuse_unsupported
from roundpipe.models.shell import find_homes
from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.recording import Recording, Split
    from roundpipe.models.shell import TreeShell
    from roundpipe.store.packed import PackedTensor

_CPU = torch.device("cpu")
CausalLayer = Prefix | Block | Suffix


@dataclass(frozen=True, eq=False)
class CausalLMSpec:
    """A causal LM as a chain of prefix, blocks and suffix."""

    module: nn.Module
    layers: Sequence[CausalLayer]
    split: Split = field(repr=False)
    takes_num_items: bool  # whether ``num_items_in_batch`` reaches the loss
    computes_loss: bool = True
    _watch: TreeWatch = field(kw_only=True, repr=False)

    def needs_inputs(self, layer: int) -> bool:
        """Every layer does: blocks by their context."""
        return True

    def make_context(self, device: torch.device) -> CausalLMContext:
        """A context builder for ``device``; copies the buffers there."""
        return CausalLMContext(self.split, device)

    def changed_since_wrapping(self) -> str | None:
        """What hooks or attributes of the tree changed since it was wrapped, or None."""
        return self._watch.difference()


def causal_lm_spec(
    model: nn.Module, packed: Mapping[Tensor, PackedTensor] | None = None
) -> CausalLMSpec:
    """Split a Hugging Face causal LM, plain or wrapped by peft, after the structure of its forward.

    Runs the model a few times on 16 tokens, on the CPU, on copies that share its weights: the
    user's modules, their ``training`` flags and the random state stay as they are. ``packed``: the
    packed values of parameters that are stand-ins; unpacked for the blocks that run. Raises
    ModelError naming the class and the reason if the chain would not equal the model bit for bit.
    """
    refuse_unsupported(model)
    tell_slow_experts(model)
    packed = packed or {}
    recording = record(model, packed=packed)
    split = recording.split
    layers = chain_of(split)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            _check_context(recording)
            hidden, takes_num_items = _check_chain(recording, layers, packed)
            suffix, inputs = layers[-1], recording.inputs
            if isinstance(suffix, Suffix) and not loss_can_be_cut(suffix, hidden, inputs, packed):
                layers[-1] = replace(suffix, in_chunks=False)
        except ModelError:
            raise
        except Exception as error:
            reason = f"the chain failed on a small input: {type(error).__name__}: {error}"
            raise refuse(model, reason) from error
    return CausalLMSpec(model, layers, split, takes_num_items, _watch=TreeWatch(model))


def chain_of(split: Split) -> list[CausalLayer]:
    """The layers of a model that was taken apart, in order."""
    blocks = enumerate(split.blocks)
    return [
        Prefix(split),
        *(Block(split, index, find_homes(block, split.names)) for index, block in blocks),
        Suffix(split),
    ]


def _check_context(recording: Recording) -> None:
    split = recording.split
    context = CausalLMContext(split, _CPU)
    context.eval()
    rebuilt = context(recording.inputs, range(len(split.blocks) + 1))
    for index, call in enumerate(recording.calls):
        if not _equal(call, rebuilt[index + 1]):
            name = split.block_names[index]
            raise refuse(split.root, f"an argument of {name} depends on weights")


def _check_chain(
    recording: Recording,
    layers: Sequence[CausalLayer],
    packed: Mapping[Tensor, PackedTensor],
) -> tuple[Tensor, bool]:
    """Compare the chain with the plain run.

    Returns what the last layer got, and whether its loss takes a number of items.
    """
    split, inputs = recording.split, recording.inputs
    context = CausalLMContext(split, _CPU)
    context.eval()
    calls = context(inputs, range(len(layers)))
    boundary: Any = None
    for layer in layers:
        if isinstance(layer, Block) and layer.index not in recording.checked:
            continue
        shell = _bound_shell(layer, packed)
        before, boundary = boundary, shell(boundary, inputs, calls)
    for key in ("logits", "loss"):
        plain, ours = recording.output.get(key), boundary.get(key)
        if not isinstance(plain, Tensor) or not isinstance(ours, Tensor):
            raise refuse(split.root, f"its output has no {key}")
        if not torch.equal(plain, ours):
            if plain.isnan().any():
                raise _not_numbers(split.root, key, packed)
            difference = (plain - ours).abs().max().item()
            raise refuse(split.root, f"the {key} of the chain differ by {difference:.3g}")
    return before, _loss_takes_num_items(shell, before, inputs, boundary.loss)


def _not_numbers(root: nn.Module, key: str, packed: Mapping[Tensor, PackedTensor]) -> ModelError:
    """Make the error for a model whose own logits are NaN, naming weights that are to blame."""
    bad = [
        name
        for name, tensor in root.named_parameters()
        if tensor.is_floating_point() and tensor not in packed and not tensor.isfinite().all()
    ]
    where = f": {', '.join(bad[:3])}" if bad else ""
    hint = "fetch the weights again, or load them in bfloat16 or float32"
    if packed:
        hint = (
            "adapters that begin with the values of weights (DoRA, PiSSA, OLoRA, modules_to_save) "
            "cannot be made of weights in 4 bits"
        )
    return ModelError(
        f"the {key} of {type(root).__name__} on a tiny input are not numbers; {len(bad)} of its "
        f"weights are not finite{where}\n"
        f"hint: {hint}"
    )


def _loss_takes_num_items(suffix: TreeShell, hidden: Any, inputs: Inputs, mean: Tensor) -> bool:
    """Whether twice the trained tokens as ``num_items_in_batch`` halve the loss."""
    kwargs: Mapping[str, Any] = inputs.kwargs or {}
    twice = 2 * count_trained_tokens(kwargs["labels"])
    try:
        half = suffix(hidden, Inputs((), {**kwargs, "num_items_in_batch": twice}), None).loss
    except TypeError:
        return False
    return torch.allclose(2 * half, mean, rtol=1e-3)


def _bound_shell(layer: CausalLayer, packed: Mapping[Tensor, PackedTensor]) -> TreeShell:
    shell = layer.make_shell(_CPU)
    shell.bind(values_of(layer.homes, packed))
    shell.module.eval()
    return shell


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if hasattr(left, "__dict__"):
        left, right = vars(left), vars(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
