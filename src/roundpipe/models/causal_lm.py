"""Any Hugging Face causal LM as a chain, found by structure, with no code for any one model.

The split is learned from a recording run and then tried: the chain of prefix, blocks and suffix
must give the model's own logits and loss, bit for bit, on a padded input, and every argument must
be rebuilt exactly: by the context, which has no weights, or else brought by the prefix. A model
where it does not is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.errors import ModelError
from roundpipe.models import paths
from roundpipe.models.causal_layers import Block, CausalLMContext, Prefix, Suffix
from roundpipe.models.changes import TreeWatch
from roundpipe.models.chunk_trial import loss_can_be_cut
from roundpipe.models.collecting import asked
from roundpipe.models.experts import tell_slow_experts
from roundpipe.models.four_bit import values_of
from roundpipe.models.gap import Gap
from roundpipe.models.loss import IGNORED, count_trained_tokens
from roundpipe.models.lost_gradients import LostGradients
from roundpipe.models.packet import Packet
from roundpipe.models.recording import record, refuse
from roundpipe.models.refusals import refuse_unsupported
from roundpipe.models.shell import find_homes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roundpipe.models.blocks import BlockCall
    from roundpipe.models.causal_layers import Calls
    from roundpipe.models.paths import Path
    from roundpipe.models.recording import Recording, Split
    from roundpipe.models.shell import TreeShell
    from roundpipe.models.spec import Inputs
    from roundpipe.store.packed import PackedTensor

_CPU = torch.device("cpu")
CausalLayer = Prefix | Block | Gap | Suffix


@dataclass(frozen=True, eq=False)
class CausalLMSpec:
    """A causal LM as a chain of prefix, blocks and suffix."""

    module: nn.Module
    layers: Sequence[CausalLayer]
    split: Split = field(repr=False)
    divides: bool  # whether the loss divides by ``num_items_in_batch``, as it was recorded
    shifts_labels: bool  # whether the first label of a sequence is not trained
    computes_loss: bool = True
    _watch: TreeWatch = field(kw_only=True, repr=False)
    _lost: LostGradients = field(kw_only=True, repr=False)

    @property
    def takes_num_items(self) -> bool:
        """Not where the config asks for a router's auxiliary loss, which no tokens divide."""
        return self.divides and "output_router_logits" not in asked(self.module, {})

    def refuse_lost_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ModelError for an argument that wants a gradient and would get none."""
        self._lost.refuse(args, kwargs)

    @property
    def num_predicted(self) -> int:
        """Logits of a token; 0 if it gives none."""
        return self.split.vocabulary

    def needs_inputs(self, layer: int) -> bool:
        """Every layer does: blocks by their context."""
        return True

    def make_context(self, device: torch.device) -> CausalLMContext:
        """A context builder for ``device``; copies the buffers there."""
        return CausalLMContext(self.split, device)

    def changed_since_wrapping(self) -> str | None:
        """What hooks or attributes of the tree changed since it was wrapped, or None."""
        return self._watch.difference()

    def accept_changes(self) -> None:
        """Take the module's attributes as they are now."""
        self._watch.retake()


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
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            split = recording.split = _carry_what_weights_made(recording)
            layers = chain_of(split)
            hidden, shifts, divides = _check_chain(recording, layers, packed)
            suffix, inputs = layers[-1], recording.inputs
            if isinstance(suffix, Suffix) and not loss_can_be_cut(suffix, hidden, inputs, packed):
                layers[-1] = replace(suffix, in_chunks=False)
        except ModelError:
            raise
        except Exception as error:
            reason = f"the chain failed on a small input: {type(error).__name__}: {error}"
            raise refuse(model, reason) from error
    watch, lost = TreeWatch(model), LostGradients(split)
    return CausalLMSpec(model, layers, split, divides, shifts, _watch=watch, _lost=lost)


def chain_of(split: Split) -> list[CausalLayer]:
    """The layers of a model that was taken apart, in order."""
    layers: list[CausalLayer] = [Prefix(split)]
    for index, block in enumerate(split.blocks):
        if index in split.flow.between:
            layers.append(Gap(split, index))
        layers.append(Block(split, index, find_homes(block, split.names)))
    return [*layers, Suffix(split)]


def _carry_what_weights_made(recording: Recording) -> Split:
    """Have the prefix make the arguments that a context cannot rebuild.

    It has no weights; and where the model drops out some of an argument in training, all layers
    must get the same.
    """
    split = recording.split
    context = CausalLMContext(split, _CPU)
    context.eval()
    every = range(split.flow.num_layers)
    rebuilt = context(recording.inputs, every)
    drawn = _rebuilt_in_training(context, recording.inputs, every)
    more: list[dict[Path, str]] = []
    keys: dict[int, str] = {}
    for index, call in enumerate(recording.calls):
        layer = split.flow.layer_of(index)
        more.append({})
        for path, value in _differences(call, rebuilt[layer]):
            if path in split.flow.blocks[index].takes:
                continue
            if not isinstance(value, Tensor):
                name = f"{paths.named(path[1:])} of {split.block_names[index]}"
                raise refuse(split.root, f"an argument depends on weights: {name}")
            key = f"{index}: {paths.named(path[1:])}"
            more[-1][path] = keys.setdefault(id(value), key)
        for path, value in _differences(rebuilt[layer], drawn.get(layer, rebuilt[layer])):
            is_known = path in more[-1] or path in split.flow.blocks[index].takes
            if isinstance(value, Tensor) and not is_known:
                key = f"{index}: {paths.named(path[1:])}"
                more[-1][path] = keys.setdefault(id(paths.get(_pair(call), path)), key)
    return replace(split, flow=split.flow.taking(more)) if keys else split


def _rebuilt_in_training(context: CausalLMContext, inputs: Inputs, layers: range) -> Calls:
    """What the blocks are called with in training, dropout and all; nothing where that fails."""
    context.train()
    try:
        return context(inputs, layers)
    except ModelError:  # layers left out at random: a training call says so
        return {}


def _pair(call: BlockCall) -> tuple[Any, dict[str, Any]]:
    return call.args, dict(call.kwargs)


def _differences(left: BlockCall, right: BlockCall) -> Iterator[tuple[Path, Any]]:
    return paths.differences(_pair(left), _pair(right))


def _check_chain(
    recording: Recording,
    layers: Sequence[CausalLayer],
    packed: Mapping[Tensor, PackedTensor],
) -> tuple[Any, bool, bool]:
    """Compare the chain with the plain run.

    Returns what the last layer got, whether its loss shifts labels and takes a number of items.
    """
    split, inputs = recording.split, recording.inputs
    context = CausalLMContext(split, _CPU)
    context.eval()
    calls = context(inputs, range(len(layers)))
    boundary: Any = None
    for layer in layers:
        if isinstance(layer, Block) and layer.index not in recording.checked:
            boundary = _passed_by(recording, layer.index, boundary)
            continue
        if isinstance(layer, Block):
            _check_carried(recording, layer.index, boundary)
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
    shifts = _loss_shifts_labels(shell, before, inputs)
    count = count_trained_tokens((inputs.kwargs or {})["labels"], shifted=shifts)
    return before, shifts, _loss_takes_num_items(shell, before, inputs, count, boundary.loss)


def _passed_by(recording: Recording, index: int, boundary: Any) -> Any:
    """What goes past a block that was not run, as in the plain run."""
    split, packet = recording.split, Packet.of(boundary)
    output = recording.outputs[index]
    if isinstance(output, (tuple, list)):
        output = type(output)([packet.hidden, *output[1:]])
    else:
        output = packet.hidden
    after = split.flow.after(index, packet, (split.forms[index], output), {})
    collected = {
        key: [*packet.collected.get(key, ()), list(each)]
        for key, each in recording.collected[index].items()
    }
    return after._replace(collected=collected).boundary()


def _check_carried(recording: Recording, index: int, boundary: Any) -> None:
    """Refuse what the prefix made if blocks before, which it does not run, have a part in it."""
    split, call = recording.split, recording.calls[index]
    for path, key in split.flow.blocks[index].takes.items():
        plain = paths.get((call.args, dict(call.kwargs)), path)
        ours = Packet.of(boundary).carried[key]
        if plain.dtype != ours.dtype or not torch.equal(plain, ours):
            name = f"{paths.named(path[1:])} of {split.block_names[index]}"
            raise refuse(
                split.root, f"an argument depends on weights and on what blocks return: {name}"
            )


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


def _loss_shifts_labels(suffix: TreeShell, hidden: Any, inputs: Inputs) -> bool:
    """Whether a sequence's first label changes nothing; in most models no token predicts it."""
    kwargs: Mapping[str, Any] = inputs.kwargs or {}
    none = torch.full_like(kwargs["labels"], IGNORED)
    first = none.clone()
    first[:, 0] = kwargs["input_ids"][:, 0]

    def loss_of(labels: Tensor) -> Tensor:
        given = replace(inputs, kwargs={**kwargs, "labels": labels})
        loss: Tensor = suffix(hidden, given, None).loss
        return loss

    found = loss_of(first)
    return bool(found.isnan()) or torch.equal(found, loss_of(none))  # a mean over nothing is NaN


def _loss_takes_num_items(
    suffix: TreeShell, hidden: Any, inputs: Inputs, count: int, mean: Tensor
) -> bool:
    """Whether twice the trained tokens as ``num_items_in_batch`` halve the loss.

    Not so a loss with a part that no tokens divide (the auxiliary one of a router): it grew with
    the number of microbatches. Each of them gets its share of the whole loss then.
    """
    kwargs: Mapping[str, Any] = inputs.kwargs or {}
    twice = {**kwargs, "num_items_in_batch": 2 * count}
    try:
        output = suffix(hidden, replace(inputs, kwargs=twice), None)
    except TypeError:
        return False
    is_whole = output.get("aux_loss") is None
    return is_whole and torch.allclose(2 * output.loss, mean, rtol=1e-3)


def _bound_shell(layer: CausalLayer, packed: Mapping[Tensor, PackedTensor]) -> TreeShell:
    shell = layer.make_shell(_CPU)
    shell.bind(values_of(layer.homes, packed))
    shell.module.eval()
    return shell
