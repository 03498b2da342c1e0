"""What a model that also sees or hears is trained on here: text alone.

The tower that turns images into vectors belongs to no layer; a sample that needs it is refused
where it comes in, by the name of the argument or by the tokens that stand for images. Else the
model would be trained on text with holes in it.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.models.tiny_inputs import configs_within
from roundpipe.models.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from roundpipe.models.spec import ModelSpec

_HINT = "drop the samples with images, sound or video: such a model is trained on text alone"
_SEEN = re.compile(r"pixel|image|video|audio|vision|speech|patch_|grid_|input_features|mm_encoder")
_STANDS_FOR = re.compile(
    r"(^|_)(image|video|audio|speech|vision|media_placeholder)_(pad_)?token_(id|index|idx)$"
)


class TextOnly:
    """Refuses what is not text among a call's arguments. ``model``: a causal LM, or None for any.

    An argument is text that the model's own text decoder takes. ``num_predicted``: logits of a
    token, 0 if that is not known.
    """

    def __init__(self, model: nn.Module | None, num_predicted: int = 0) -> None:
        base: Any = model
        if base is not None and hasattr(base, "get_base_model"):
            base = base.get_base_model()
        self._parameters = () if base is None else tuple(inspect.signature(base.forward).parameters)
        decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
        takes = () if decoder is None or decoder is base else _parameters(decoder)
        self._text = frozenset(takes)
        self._main = frozenset() if base is None else frozenset(_main_inputs(base)) - self._text
        self._tokens = {} if base is None else _tokens(base.config)
        self._vocabulary = Vocabulary(base, num_predicted)

    @classmethod
    def of(cls, spec: ModelSpec) -> TextOnly:
        """For a wrapped model, whatever it is."""
        return cls(spec.module if spec.computes_loss else None, spec.num_predicted)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments by name; none of a model that is no causal LM."""
        if not self._parameters:
            return {}
        return {**dict(zip(self._parameters, args, strict=False)), **(kwargs or {})}

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Raise ConfigError, naming the argument, for a batch with anything but text, or with
        tokens that the model does not have.

        Looks at ``input_ids`` where they are on the host.
        """
        given = self.named(args, kwargs)
        for name, value in given.items():
            is_other = name in self._main or (_SEEN.search(name) and name not in self._text)
            if is_other and value is not None:
                raise ConfigError(f"only text is trained on: {name} is given\nhint: {_HINT}")
        ids = given.get("input_ids")
        if self._tokens and isinstance(ids, Tensor) and ids.device.type == "cpu":
            found = torch.isin(ids, torch.tensor(list(self._tokens), dtype=ids.dtype))
            if found.any():
                token = int(ids[found][0])
                raise ConfigError(
                    f"only text is trained on: input_ids hold {self._tokens[token]}: {token}\n"
                    f"hint: {_HINT}"
                )
        self._vocabulary.check(given)


def other_parts(model: Any) -> list[str]:
    """The names of what a model holds beside its text decoder and its head: towers, projectors.

    Each whole, none within another; none for a model that does not tell its decoder apart.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, torch.nn.Module) or decoder is model:
        return []
    head = model.get_output_embeddings()
    below = {id(module) for module in decoder.modules()}
    kept = below | {id(module) for module in (head, model.get_input_embeddings())}
    found: list[str] = []
    pending = list(model.named_children())[::-1]
    while pending:
        name, module = pending.pop()
        if id(module) in kept:
            continue
        if any(id(part) in kept for part in module.modules()):
            pending += [(f"{name}.{local}", c) for local, c in module.named_children()][::-1]
        else:
            found.append(name)
    return found


def _parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _main_inputs(base: Any) -> Iterator[str]:
    """The main arguments of the models within a model: ``pixel_values`` of a vision tower."""
    for module in base.modules():
        name = getattr(type(module), "main_input_name", None)
        if isinstance(name, str) and name not in ("input_ids", "inputs_embeds"):
            yield name


def _tokens(config: Any) -> dict[int, str]:
    """The tokens that stand for images and the like, and what the config calls them."""
    return {
        value: name
        for each in configs_within(config)
        for name, value in vars(each).items()
        if type(value) is int and _STANDS_FOR.search(name)
    }
