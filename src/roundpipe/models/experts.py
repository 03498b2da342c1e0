"""Lets a shell run stacked experts, and adapters on them, as grouped products.

transformers keeps the experts of a layer as stacks of weights, [experts, out, in], and runs them by
what ``config._experts_implementation`` names; unless told otherwise by grouped products. A shell
leaves that as it is, with two exceptions, both made on the shell's own copy of the module:

1. Frozen experts in grouped products, given many tokens, run in pieces: the same numbers in a
   fraction of the memory (`roundpipe.models.grouped`).
2. Adapters that peft puts on stacks (``target_parameters``, `peft.tuners.lora.ParamWrapper`) are
   two more grouped products beside each stack's. peft builds W + B A of all experts in every
   forward, and in backward its gradient. The values are peft's to rounding; its modules, names and
   files stay.

A wrapper hangs around the experts, or around another wrapper for their other stack:

    ParamWrapper(down_proj) > ParamWrapper(gate_up_proj) > experts

In a shell wrappers only pass the call on, hooks and all, and the experts ask them for their
factors. What this module does not know (another layout, a stack whose sides grouped products do not
take, weights in 8 bits) keeps running the way of transformers and peft.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from roundpipe.models.grouped import Experts, Factors, Stack, is_alignable, tokens_in_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

log = logging.getLogger(__name__)

GROUPED = "grouped_mm"  # transformers' name
_DOWN = "down_proj"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Wrapper(Protocol):
    """What is read of peft's ParamWrapper."""

    parameter_name: str
    base_layer: nn.Module
    num_experts: int
    active_adapters: Sequence[str]
    disable_adapters: bool
    merged: bool
    scaling: Mapping[str, float]
    lora_A: Mapping[str, nn.Linear]  # noqa: N815 (peft's names)
    lora_B: Mapping[str, nn.Linear]  # noqa: N815
    _activate_lora: Callable[[list[str]], AbstractContextManager[None]]


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is experts in stacks, as transformers' decorator makes them."""
    held = module.__dict__
    known = all(key in held for key in ("has_gate", "has_bias", "is_transposed"))
    return known and _DOWN in module._parameters and _up_name(module) in module._parameters


def run_grouped(modules: Iterable[nn.Module]) -> None:
    """Let the experts among a shell's own ``modules`` run as the module docstring says."""
    modules = list(modules)
    inner = {id(w.base_layer) for w in map(_as_wrapper, modules) if w is not None}
    for module in modules:
        if id(module) in inner:
            continue
        wrappers, experts = _unwrap(module)
        if is_stacked(experts) and all(_is_known(w, experts) for w in wrappers):
            for wrapper in wrappers:
                _pass_on(wrapper)
            _take_over(experts, wrappers)
        else:
            for wrapper in wrappers:
                _sum_anew(wrapper, experts)


def tell_slow_experts(root: nn.Module) -> None:
    """Log, once for a model, if its experts run one after the other, or adapters as in peft."""
    for name, module in root.named_modules():
        if (said := _slow(name, module)) is not None:
            log.warning(said)
            return


def _slow(name: str, module: nn.Module) -> str | None:
    """What is slow about one module."""
    if is_stacked(module) and _implementation(module) == "eager":
        hint = f"model.set_experts_implementation({GROUPED!r})"
        return f"experts run one after the other: experts_implementation: eager\nhint: {hint}"
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if is_list and name.rpartition(".")[2] == "experts":
        return f"experts are modules of their own and run one after the other: {name}"
    if (wrapper := _as_wrapper(module)) is not None and not _is_known(wrapper, _unwrap(module)[1]):
        return f"adapters are added to all weights in every forward, as in peft: {name}"
    return None


def most_tokens_at_once(root: nn.Module, top_k: int) -> int | None:
    """Tokens up to which a shell of ``root`` runs its experts whole; None where it always does."""
    found = []
    for experts in root.modules():
        if is_stacked(experts) and _can_group(experts) and _can_be_cut(experts):
            stack = experts.get_parameter(_up_name(experts))
            inner = stack.shape[-2 if experts.is_transposed else -1]
            found.append(tokens_in_piece(top_k, inner * stack.element_size()))
    return min(found, default=None)


def _unwrap(module: nn.Module) -> tuple[list[Wrapper], nn.Module]:
    """The wrappers around a module, outermost first, and what is inside."""
    wrappers = []
    while (wrapper := _as_wrapper(module)) is not None:
        wrappers.append(wrapper)
        module = wrapper.base_layer
    return wrappers, module


def _as_wrapper(module: nn.Module) -> Wrapper | None:
    # by its parts: importing peft takes seconds, and estimates have one of their own
    held = module.__dict__.get("_modules", {})
    is_wrapper = "parameter_name" in module.__dict__ and {"base_layer", "lora_A"} <= held.keys()
    return cast("Wrapper", module) if is_wrapper else None


def _is_known(wrapper: Wrapper, experts: nn.Module) -> bool:
    """Whether the adapter's layout is the one that `_factors` reads."""
    stack = experts._parameters.get(wrapper.parameter_name)
    if stack is None or wrapper.parameter_name not in (_DOWN, _up_name(experts)):
        return False
    sides = tuple(stack.shape[-2:] if experts.is_transposed else stack.shape[-2:][::-1])
    return (
        _can_group(experts)
        and wrapper.num_experts == stack.shape[0] > 1
        and all(
            (wrapper.lora_A[name].in_features, wrapper.lora_B[name].out_features) == sides
            for name in wrapper.lora_A
        )
    )


def _can_group(experts: nn.Module) -> bool:
    stacks = [experts.get_parameter(name) for name in (_up_name(experts), _DOWN)]
    return not experts.__dict__.get("_is_expert_parallel", False) and all(
        stack.dim() == 3 and stack.dtype in _DTYPES and is_alignable(stack) for stack in stacks
    )


def _can_be_cut(experts: Any) -> bool:
    """Whether nothing of the experts is trained, and all of it is what pieces know."""
    return not experts.has_post_expert_norm and not any(
        parameter.requires_grad for parameter in experts.parameters()
    )


def _sum_anew(wrapper: Wrapper, inside: nn.Module) -> None:
    """Let peft add adapters to weights once for each forward of a shell, whatever others do.

    It keeps the sum in torch's cache of parametrizations, one for all threads, which is emptied
    when nobody is inside (torch 2.13). While another device's worker is, a forward would find the
    sum of the one before: of older weights, without gradient, or of a graph that is gone.
    """
    activate, key = wrapper._activate_lora, (id(inside), wrapper.parameter_name)

    @contextmanager
    def alone(active_adapters: list[str]) -> Iterator[None]:
        parametrize._cache.pop(key, None)
        try:
            with activate(active_adapters):
                yield
        finally:
            parametrize._cache.pop(key, None)

    wrapper.__dict__["_activate_lora"] = alone


def _pass_on(wrapper: Wrapper) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper.base_layer(*args, **kwargs)

    wrapper.__dict__["forward"] = forward


def _take_over(experts: Any, wrappers: Sequence[Wrapper]) -> None:
    """Replace the ``forward`` of a shell's own copy of experts."""
    plain = experts.forward
    can_group = _can_group(experts)

    def forward(
        hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *rest: Any, **others: Any
    ) -> Any:
        given = (hidden_states, top_k_index, top_k_weights)
        if rest or others:
            assert not wrappers, (rest, others)
            return plain(*given, *rest, **others)
        factors = {w.parameter_name: f for w in wrappers if (f := _factors(w, experts)) is not None}
        top_k = top_k_index.shape[-1]
        tokens = tokens_in_piece(top_k, hidden_states.shape[-1] * hidden_states.element_size())
        many = hidden_states.shape[0] > tokens
        is_cut = many and _implementation(experts) == GROUPED
        experts.__dict__["work_bytes"] = 0
        if not factors and not is_cut:
            return plain(*given)
        run = _grouped(experts, factors)
        if not (can_group and _can_be_cut(experts)):
            return run.run(*given) if factors else plain(*given)
        experts.__dict__["work_bytes"] = run.work_bytes(hidden_states, top_k, tokens=tokens)
        return run.run_in_pieces(*given, tokens=tokens)

    experts.__dict__["forward"] = forward


def _factors(wrapper: Wrapper, experts: nn.Module) -> Factors | None:
    """The factors of the adapters that are on, as peft lays them out: see `Factors`.

    ``lora_A``: [experts x rank, in]; ``lora_B``: [out, rank x experts].
    """
    if wrapper.disable_adapters or wrapper.merged:
        return None
    dtype = experts.get_parameter(wrapper.parameter_name).dtype
    pairs = []
    for name in wrapper.active_adapters:
        if name in wrapper.lora_A:
            a, b = wrapper.lora_A[name].weight.to(dtype), wrapper.lora_B[name].weight.to(dtype)
            a = a.view(wrapper.num_experts, -1, a.shape[-1])
            b = b.view(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
            pairs.append((a, b.contiguous() * wrapper.scaling[name]))
    return Factors.of(pairs)


def _grouped(experts: Any, factors: Mapping[str, Factors]) -> Experts:
    def stack(name: str) -> Stack:
        weight = getattr(experts, name)
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        return Stack(weight, bias, factors.get(name), experts.is_transposed)

    gate = experts._apply_gate if experts.has_gate else experts.act_fn
    finish = experts.post_expert_norm if experts.has_post_expert_norm else None
    return Experts(stack(_up_name(experts)), gate, stack(_DOWN), finish)


def _up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.__dict__.get("has_gate", True) else "up_proj"


def _implementation(experts: nn.Module) -> str | None:
    found: str | None = getattr(experts.__dict__.get("config"), "_experts_implementation", None)
    return found
