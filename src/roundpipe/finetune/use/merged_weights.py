"""The weights of an adapter and its base as those of one model, made when they are asked for.

    name -> the module of peft that stands in its way -> a copy of that one in fp32, merged by peft
                                                         `-- asked for its weight, rounded once --'

Every formula (LoRA, rsLoRA, DoRA, embeddings, convolutions, stacked experts, trained tokens) is
peft's own: a copy of one of its layers, all of its tensors in fp32, is merged as it merges itself.
The base is read, never written to, and no more than one such copy is there at a time, so that
memory holds the base once.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.errors import ConfigError
from roundpipe.finetune.use.merge_checks import question_for, require_same_layer, sample_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.store.packed import PackedTensor

_FP32 = torch.float32


class MergedWeights(Mapping[str, Tensor]):
    """What `roundpipe.models.saving` asks for, by the names of ``target``, in its dtypes.

    ``base``: the model of transformers, with what peft has put into it; ``packed``: the values of
    its weights in 4 bits. ``tell`` is called with the bytes made so far.
    """

    def __init__(
        self,
        base: Any,
        target: Any,
        *,
        packed: Mapping[Tensor, PackedTensor],
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._base, self._packed = base, packed
        self._like: dict[str, Tensor] = {
            name: tensor
            for name, tensor in target.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }
        self._places = dict(_outermost(base))
        self._made: tuple[str, dict[str, Tensor]] | None = None
        self._done = 0
        self._asked: set[str] = set()
        self.samples: dict[str, Tensor] = {}
        self.tell = tell

    @property
    def num_merged(self) -> int:
        """Modules that something of the adapter is put into."""
        return len(self._places)

    @property
    def num_asked(self) -> int:
        """Of these, how many have given the same output before and after, in fp32."""
        return len(self._asked)

    def is_touched(self, name: str) -> bool:
        """Whether the adapter has a part in a weight."""
        return self._place_of(name) is not None

    def exact(self, name: str) -> Tensor:
        """A weight before it is rounded: in fp32 where the adapter has a part in it."""
        place = self._place_of(name)
        if place is None:
            return self._value(self._tensor(name))
        if self._made is None or self._made[0] != place:
            self._made = None  # before the next one is made
            self._made = (place, self._merged(place))
        return self._made[1][name.removeprefix(f"{place}.")]

    def __getitem__(self, name: str) -> Tensor:
        like = self._like[name]
        tensor = self.exact(name).detach().to(like.dtype)
        assert tensor.shape == like.shape, f"{name}: {tensor.shape}, not {like.shape}"
        self.samples[name] = sample_of(tensor)
        self._done += tensor.nbytes
        self.tell(self._done)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)

    def _place_of(self, name: str) -> str | None:
        end = len(name)
        while (end := name.rfind(".", 0, end)) > 0:
            if name[:end] in self._places:
                return name[:end]
        return None

    def _tensor(self, name: str) -> Tensor:
        path, _, local = name.rpartition(".")
        found: Tensor = getattr(self._base.get_submodule(path), local)
        return found

    def _value(self, tensor: Tensor) -> Tensor:
        """What a parameter is; one in 4 bits as the model computes with it."""
        packed = self._packed.get(tensor)
        return tensor.detach() if packed is None else packed.unpack()

    def _merged(self, place: str) -> dict[str, Tensor]:
        """The tensors of a module of peft once it is merged, by their names in the base.

        Raises RoundPipeError where the merged module gives another output.
        """
        module = self._places[place]
        own = [*module.parameters(), *module.buffers()]
        # What hangs elsewhere too (an embedding whose tokens a head shares) is read, not copied.
        memo: dict[int, Any] = {id(p): p for p in self._base.parameters()}
        memo |= {id(tensor): self._in_fp32(tensor) for tensor in own}
        copied: Any = copy.deepcopy(module, memo)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of bf16 and of what is merged already
            question = question_for(copied)
            before = None if question is None else copied(question)
            if hasattr(copied, "unload_and_optionally_merge_module"):
                plain = copied.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=None
                )
            else:
                copied.merge(safe_merge=False, adapter_names=None)
                plain = copied.get_base_layer()
            if before is not None:
                require_same_layer(place, before, plain(question))
                self._asked.add(place)
        return {
            name: tensor
            for name, tensor in plain.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }

    def _in_fp32(self, tensor: Tensor) -> Tensor:
        """A copy that may be written to."""
        value = self._value(tensor)
        value = value.to(_FP32 if value.is_floating_point() else value.dtype, copy=True)
        return nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value


def _outermost(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that peft put in place of others, none that lies in another."""
    last: str | None = None
    for name, module in base.named_modules():
        if last is not None and name.startswith(f"{last}."):
            continue
        if hasattr(module, "base_layer") or hasattr(module, "unload_and_optionally_merge_module"):
            last = name
            yield name, module


def require_mergeable(model: Any) -> None:
    """Raise ConfigError for an adapter of peft that cannot be part of its base.

    ``model``: a PeftModel.
    """
    way_out = "hint: use it with peft as it is"
    if any(getattr(each, "layer_replication", None) for each in model.peft_config.values()):
        raise ConfigError(
            f"an adapter over layers that are there twice (layer_replication) cannot be merged: "
            f"they share the weights of the base\n{way_out}"
        )
    without = next(_without_bias(model), None)
    if without is not None:
        raise ConfigError(
            "an adapter with a bias of its own (lora_bias) over a layer that has none cannot be "
            f"merged: {without}\n{way_out}"
        )
    try:
        model.base_model._check_merge_allowed()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"the adapter cannot be merged: {error}\n{way_out}") from error


def _without_bias(model: Any) -> Iterator[str]:
    """Layers without a bias whose adapter has one: the model's class has no place for it."""
    for name, module in model.get_base_model().named_modules():
        has_own = any((getattr(module, "lora_bias", None) or {}).values())
        if has_own and getattr(module.get_base_layer(), "bias", None) is None:
            yield name


def bare_copy(model: Any) -> Any:
    """A copy of a model of transformers whose tensors hold no data; tied weights are tied in it."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        bare = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(bare, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(model, memo)


def set_dtype_(bare: Any, dtype: torch.dtype) -> None:
    """Have the weights of a model without data in ``dtype``, as transformers would load them.

    What the model's class keeps in fp32 is so, and buffers stay as they are.
    """
    plan = [(re.compile(each), kept) for each, kept in bare._get_dtype_plan(dtype).items()]
    made: dict[int, nn.Parameter] = {}
    for path, module in bare.named_modules():
        for local, old in module._parameters.items():
            if old is None or not old.is_floating_point():
                continue
            name = f"{path}.{local}" if path else local
            if id(old) not in made:
                chosen = next((kept for each, kept in plan if each.search(name)), dtype)
                made[id(old)] = nn.Parameter(old.to(chosen), requires_grad=False)
            module._parameters[local] = made[id(old)]


def untie_(target: Any, weights: MergedWeights) -> list[str]:
    """Part the weights of ``target`` that were one in the base and are not any more.

    Returns their names. Such a model says in its config that nothing is tied, so that what loads it
    reads both.
    """
    parted = []
    for name, source in list((getattr(target, "all_tied_weights_keys", None) or {}).items()):
        if not (weights.is_touched(name) or weights.is_touched(source)):
            continue
        first = weights.exact(source)
        if torch.equal(first, weights.exact(name)):
            continue
        path, _, local = name.rpartition(".")
        module = target.get_submodule(path)
        old = getattr(module, local)
        setattr(module, local, nn.Parameter(torch.empty_like(old), requires_grad=False))
        del target.all_tied_weights_keys[name]
        parted += [name, source]
    if parted:
        for config in {id(c): c for c in (target.config, target.config.get_text_config())}.values():
            config.tie_word_embeddings = False
    return sorted(set(parted))
