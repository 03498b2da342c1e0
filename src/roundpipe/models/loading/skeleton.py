"""The model without its weights: built on the meta device, tied, its computed buffers made.

What is not in files (rotary tables, masks) must have the values that the model's own ``__init__``
would have given. transformers knows how: it makes them when it loads a model, and is asked to do
just that here, while all weights are still without data and marked as loaded.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.causal_lm import chain_of
from roundpipe.models.estimate.meter import Answering
from roundpipe.models.find_blocks import find_blocks
from roundpipe.models.loading.own_class import class_for, config_of
from roundpipe.models.mended import mend
from roundpipe.models.recording import record
from roundpipe.models.shell import TensorNames, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from torch import Tensor

    from roundpipe.models.loading.recipes import Recipe, Recipes

logger = logging.getLogger(__name__)

_META = torch.device("meta")


def build(config: Any, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    """Build a causal LM on the meta device, nothing tied yet; raises ConfigError if it cannot be.

    Of the class that wrote the files, where that makes text: see `class_for`. The config is
    changed: it takes the dtype.
    """
    from transformers import initialization  # noqa: PLC0415 (imports late)

    kind = class_for(config)
    chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with (
        torch.device("meta"),
        initialization.no_tie_weights(),
        initialization.meta_device_safe_creation_ops(),
    ):
        model: Any = kind._from_config(config_of(kind, config), dtype=dtype, **chosen)
    mend(model)
    return model.to(_META).eval()


def tie(model: Any, recipes: Recipes) -> set[str]:
    """Tie what the config ties; returns the names that neither files nor ties provide.

    Weights that are tied but lie in the files twice, with different values, stay apart, as in
    transformers. Reads such pairs. What a tied name made of the files is forgotten.
    """
    missing = set(model.state_dict()) - recipes.by_target.keys()
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in missing or source in missing:
            continue
        if _is_equal(recipes.by_target[target], recipes.by_target[source], target, source):
            del recipes.by_target[target]
            missing.add(target)
        else:
            logger.warning(
                "tied weights differ in the files and stay apart: %s and %s", target, source
            )
            del model.all_tied_weights_keys[target]
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    return missing


def make_buffers(model: Any, missing: Set[str]) -> None:
    """Make what is computed rather than loaded, on the host, as the model's ``__init__`` would.

    ``missing``: names that no file provides. Those that the model may do without are made too.
    Raises ConfigError for any other: it would be trained from random numbers.
    """
    patterns = list(model._keys_to_ignore_on_load_missing or ())
    optional = {name for name in missing if any(re.search(each, name) for each in patterns)}
    absent = sorted(missing - optional)
    if absent:
        raise ConfigError(
            f"{len(absent)} weights of {type(model).__name__} are not in the files: "
            f"{', '.join(absent[:3])}\n"
            "hint: they would start from random numbers; give a causal language model whose files "
            "are complete"
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in optional:
            tensor._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        model._move_missing_keys_from_meta_to_device(optional, None, None, None)
        model._initialize_missing_keys(False)


def split_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """The parameters that each layer owns, by canonical name, in the order of the layers.

    What no layer reads comes last, under the name ``""``. So does all that is outside the blocks
    if the model can only be split when its values are known.
    """
    names = TensorNames(model)
    parameters = {id(p): names.of(p) for p in model.parameters()}
    left = dict.fromkeys(parameters.values())
    layers = []
    for layer, tensors in _layers(model, names):
        own = [name for name in tensors if name in left]
        for name in own:
            del left[name]
        layers.append((layer, own))
    return [*layers, ("", list(left))]


def hang(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Hang ``tensors`` (canonical name -> parameter or buffer) wherever their like hangs now."""
    names = TensorNames(model)
    for module in walk(model):
        for held in (module._parameters, module._buffers):
            for local, old in held.items():
                if old is not None and names.of(old) in tensors:
                    held[local] = tensors[names.of(old)]  # type: ignore[assignment]


def _layers(model: nn.Module, names: TensorNames) -> list[tuple[str, Sequence[str]]]:
    try:
        with Answering():
            split = record(model, _META).split
        return [(layer.name, list(layer.tensors)) for layer in chain_of(split)]
    except ModelError as error:
        logger.info("layers are found by their names alone: %s", error)
    try:
        list_name, blocks = find_blocks(model)
    except ModelError:
        return []
    return [
        (f"{list_name}.{index}", [names.of(p) for p in block.parameters()])
        for index, block in enumerate(blocks)
    ]


def _is_equal(left: Recipe, right: Recipe, left_name: str, right_name: str) -> bool:
    if left.targets[left_name] != right.targets[right_name]:
        return False
    dtype = left.targets[left_name][1]
    one, other = left.only, right.only
    if one is not None and other is not None and type(one) is type(other):
        pairs = zip(one.pieces(dtype), other.pieces(dtype), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)
    made = []
    for recipe, name in ((left, left_name), (right, right_name)):
        made.append(torch.empty(recipe.targets[name][0], dtype=dtype))
        recipe.fill({name: made[-1]})
    return torch.equal(*made)
