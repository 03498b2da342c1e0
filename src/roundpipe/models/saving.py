"""A model of transformers, or an adapter, back in files of the form that stock libraries load.

    names -> groups -> reverse conversion without data -> headers -> [ convert a group, write it ]
    `---- nothing allocated, every mistake found ---------------'   per group

Weights are given by name and asked for one after another, so that no second copy of a model is ever
in memory: a group is a block's tensors, or a single tensor outside the blocks. transformers'
own conversions are reverted within a group (experts are unstacked, old names come back) with its
own function. Where groups taken one by one do not give what the whole would, all is one group.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.models.loading.write_shards import plan_shards, write_index, write_shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roundpipe.durable import Fingerprint

    Meta = dict[str, Tensor]  # tensors without data, by name in the files

SHARD_BYTES = 5 << 30
ADAPTER_FILE = "adapter_model.safetensors"
_BLOCK = re.compile(r"(.*?\.\d+)\.")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that are converted together, and what the files get of them."""

    names: Sequence[str]
    made: Meta


def save(
    folder: Path, model: Any, weights: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES
) -> dict[str, Fingerprint]:
    """Write a model by `save_model`, or the adapter that peft has put on one by `save_adapter`.

    Returns what was written of weights, by the files' names.
    """
    if _is_adapted(model):
        return save_adapter(folder, model, weights)
    return save_model(folder, model, weights, shard_bytes=shard_bytes)


def is_of_transformers(model: Any) -> bool:
    """Whether `save` knows how stock libraries would write it."""
    return _is_adapted(model) or (hasattr(model, "save_pretrained") and hasattr(model, "config"))


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def save_model(
    folder: Path, model: Any, weights: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES
) -> dict[str, Fingerprint]:
    """Write a transformers model as its own class and names would be: config and safetensors.

    ``weights``: by the names of ``model.state_dict()``, each asked for when it is written and
    dropped then; those in ``model`` are not read. A tied weight is written once. What lay in the
    folder stays until all is written; other weights of a model are removed then. Blocks on the
    disk. Raises ConfigError for a module that is not of transformers, and for weights that
    another library holds in few bits.
    """
    _require_transformers(model)
    with _moved_when_whole(folder) as place:
        with _no_progress_bar():
            model.save_pretrained(place, state_dict={})  # all but the weights
        model = _with_mapping(model)
        with torch.no_grad():
            groups = _groups(model, _stripped(model))
            shards = plan_shards([group.made for group in groups], shard_bytes)
            written = {}
            for number, shard in enumerate(shards):
                parts = (_made(model, groups[index], weights) for index in shard.groups)
                name = shard.file_name(number, len(shards))
                written[name] = write_shard(place / name, shard.tensors, parts)
        write_index(place, shards)
    return written


def save_adapter(
    folder: Path, model: Any, weights: Mapping[str, Tensor], *, adapter: str | None = None
) -> dict[str, Fingerprint]:
    """Write an adapter of peft alone, with the names that stock peft loads, and its config.

    ``weights``: the trained ones at least, by the names of ``model``. Embeddings whose number of
    rows is not that of the base model's own config come along if they are among them; that is
    looked up on this machine, never asked of the hub. ``adapter``: the active one by default.
    """
    name = model.active_adapter if adapter is None else adapter
    tensors = _of_adapter(model, name, weights)
    shards = plan_shards([{key: _bare(tensor) for key, tensor in tensors.items()}], None)
    config = copy.copy(model.peft_config[name])
    config.inference_mode = True
    base = model.get_base_model()
    if config.task_type is None:  # peft's own classes then tell by this what to open
        kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.auto_mapping = kind
    generation = getattr(base, "generation_config", None)
    with _moved_when_whole(folder) as place:
        file = place / ADAPTER_FILE
        written = write_shard(file, shards[0].tensors, [tensors])
        config.save_pretrained(str(place))
        if generation is not None:
            generation.save_pretrained(place)
    return {file.name: written}


def _of_adapter(model: Any, name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What peft puts into an adapter's file; of ``weights`` nothing else is asked for."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 (takes seconds)

    def chosen(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=name, save_embedding_layers=was_resized
        )
        return found

    was_resized = _was_resized(model, name)
    held = model.state_dict(keep_vars=True)
    bare = {key: _bare(held[key]) for key in weights if isinstance(held.get(key), Tensor)}
    names = {id(tensor): key for key, tensor in bare.items()}
    places = chosen(bare)
    if all(id(tensor) in names for tensor in places.values()):
        return {key: weights[names[id(tensor)]].detach() for key, tensor in places.items()}
    return chosen(dict(weights))  # it computes with them


def _was_resized(model: Any, name: str) -> bool:
    """Whether the vocabulary is another than in the files that the base model came from."""
    from transformers import AutoConfig  # noqa: PLC0415 (imports late)

    base = model.get_base_model()
    source = getattr(model.peft_config[name], "base_model_name_or_path", None)
    if not source or not hasattr(base, "config"):
        return False
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):  # nothing is known of it here
        return False
    return bool(config.get_text_config().vocab_size != base.config.get_text_config().vocab_size)


@contextlib.contextmanager
def _moved_when_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, whose files are moved to ``folder`` when all of them are there.

    Other weights of a model that lie there are removed then; nothing happens to ``folder`` if the
    block raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
        place = Path(name)
        yield place
        new = {path.name for path in place.iterdir()}
        is_model = any(map(_WEIGHTS.fullmatch, new))
        for path in folder.iterdir() if is_model else ():
            if _WEIGHTS.fullmatch(path.name) and path.name not in new:
                path.unlink()
        for path in place.iterdir():
            path.replace(folder / path.name)


def _require_transformers(model: Any) -> None:
    if not is_of_transformers(model):
        raise ConfigError(
            f"not a model of transformers: {type(model).__name__}\n"
            "hint: torch.save(model.state_dict(), path)"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"weights that another library holds in few bits: {type(model).__name__}\n"
            "hint: close() the RoundPipe, then model.save_pretrained(folder) writes them in that "
            "library's form"
        )


def _stripped(model: Any) -> Meta:
    """What is to be saved, without data: a tied weight once, nothing that is computed."""
    held = model.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    ignored = set(model._keys_to_ignore_on_save or ())
    targets = set(getattr(model, "all_tied_weights_keys", None) or ())
    first: dict[int, str] = {}
    for name, tensor in sorted(state.items(), key=lambda each: each[0] in targets):
        first.setdefault(id(tensor), name)
    return {
        name: _bare(tensor)
        for name, tensor in state.items()
        if name not in ignored and (name not in targets or first[id(tensor)] == name)
    }


def _bare(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _groups(model: Any, state: Meta) -> list[_Group]:
    """Names that are converted together, in the order of the model."""
    whole = _reverted(model, state)
    by_place: dict[str, list[str]] = {}
    for name in state:
        block = _BLOCK.match(name)
        by_place.setdefault(block[1] if block else name, []).append(name)
    groups = [
        _Group(names, _reverted(model, {name: state[name] for name in names}))
        for names in by_place.values()
    ]
    apart = [(name, tensor.shape) for group in groups for name, tensor in group.made.items()]
    if sorted(apart) != sorted((name, tensor.shape) for name, tensor in whole.items()):
        return [_Group(list(state), whole)]
    return groups


def _made(model: Any, group: _Group, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _reverted(model, {name: weights[name].detach() for name in group.names})


def _reverted(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import (  # noqa: PLC0415 (imports late)
        revert_weight_conversion,
    )

    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted


def _with_mapping(model: Any) -> Any:
    """The model with the conversions that saving reverts, which transformers finds anew each time.

    They are those that were used when the model was loaded. A model that was never loaded gets
    those of its class, but none that adds a prefix: nobody knows of one. Or rather a shallow copy
    does: the model itself may be in training meanwhile.
    """
    if getattr(model, "_weight_conversions", None) is not None:
        return model
    from transformers.conversion_mapping import (  # noqa: PLC0415 (imports late)
        get_model_conversion_mapping,
    )
    from transformers.core_model_loading import PrefixChange  # noqa: PLC0415

    found = get_model_conversion_mapping(model, add_legacy=False)
    model = copy.copy(model)
    model._weight_conversions = [each for each in found if not isinstance(each, PrefixChange)]
    return model


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as settings  # noqa: PLC0415 (imports late)

    quiet: Any = settings  # its functions carry no types
    had_bars = quiet.is_progress_bar_enabled()
    quiet.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            quiet.enable_progress_bar()
