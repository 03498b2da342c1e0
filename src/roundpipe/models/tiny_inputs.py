"""A tiny text input on which a causal LM is run once to learn how it works.

Token ids stand for things in some models: an image's place, a video's, a pad. A model that meets
one of these asks for the image. So the ids are ordinary ones, whatever the config says of others.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.models.spec import Inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU = torch.device("cpu")
_SPECIAL = re.compile(r"_(token_id|token_ids|token_index|token_idx)$")
_USUAL = ("pad_token_id", "bos_token_id", "eos_token_id")  # in configs that are plain classes too
_SHAPE = (2, 8)


def tiny_inputs(root: Any, device: torch.device = _CPU) -> Inputs:
    """Two short sequences, one of them padded, with labels, of ordinary tokens."""
    config = root.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(text.vocab_size)
    special = special_ids(config)
    count = torch.arange(_SHAPE[0] * _SHAPE[1]).view(_SHAPE)
    ids = (count * 7 + 5) % vocabulary
    ordinary = [i for i in range(min(vocabulary, len(special) + 1)) if i not in special] or [0]
    for each in special & set(ids.flatten().tolist()):
        ids[ids == each] = ordinary[0]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return Inputs((), {name: tensor.to(device) for name, tensor in named.items()})


def special_ids(config: Any) -> set[int]:
    """The token ids that a config and those within it give a meaning of their own."""
    found: set[int] = set()
    for each in configs_within(config):
        values = [value for name, value in vars(each).items() if _SPECIAL.search(name)]
        for value in [*values, *(getattr(each, name, None) for name in _USUAL)]:
            found.update(value if isinstance(value, (list, tuple)) else [value])
    return {value for value in found if type(value) is int}


def configs_within(config: Any) -> Iterator[Any]:
    """A config and all configs within it."""
    yield config
    for value in vars(config).values():
        if value is not config and hasattr(value, "to_diff_dict"):
            yield from configs_within(value)
