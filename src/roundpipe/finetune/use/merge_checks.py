"""What tells a merged model from another more sharply than logits do.

Rounding to 16 bits moves logits by some hundredths of their spread, and a layer whose adapter was
added wrongly, or not at all, may move them by less. So each layer is asked by itself, in fp32 and
before anything is rounded; each weight that was opened again is compared with what was made; and
stock transformers must find every weight by its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roundpipe.errors import RoundPipeError
from roundpipe.finetune.model.from_transformers import quiet_transformers
from roundpipe.models.loading.own_class import class_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ROWS = 4
_TOKENS = 512
_SAMPLES = 1024  # elements of a weight
# Of the root of the mean squared output: sums in another order, in fp32, over some ten thousand.
_ANOTHER = 1e-4
REPORT = "hint: use the adapter with peft as it is, and please report this"


def question_for(module: nn.Module) -> Tensor | None:
    """An input that a layer can be told by; None for one that is no product and no table.

    ``module``: of peft, in fp32. The same each time; no random state is touched.
    """
    inner: Any = module
    while hasattr(inner, "base_layer") or hasattr(inner, "original_module"):
        inner = getattr(inner, "base_layer", None) or inner.original_module
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors):
        return None
    if type(inner) is nn.Embedding or hasattr(inner, "embed_scale"):
        some = range(0, len(inner.weight), max(1, len(inner.weight) // _TOKENS))
        trained = [getattr(part, "token_indices", None) or {} for part in module.modules()]
        own = [token for each in trained for tokens in each.values() for token in tokens]
        return torch.tensor([*some, *own])
    width = _width(inner)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_ROWS, width, generator=generator)


def _width(inner: Any) -> int | None:
    if type(inner) is nn.Linear:
        return int(inner.in_features)
    if type(inner).__name__ == "Conv1D":  # of transformers: a matrix the other way round
        return int(inner.weight.shape[0])
    return None


def require_same_layer(name: str, before: Tensor, after: Tensor) -> None:
    """Raise RoundPipeError where a merged layer gives another output than the one with its adapter.

    Both in fp32, of the same input.
    """
    gap = (before - after).square().mean().sqrt()
    size = before.square().mean().sqrt()
    if not gap <= _ANOTHER * size:
        raise RoundPipeError(
            f"a merged layer is another than with its adapter: {name}: its output differs by "
            f"{float(gap):.2g}, and is {float(size):.2g} large\n{REPORT}"
        )


def sample_of(tensor: Tensor) -> Tensor:
    """Some of a weight's elements, from all over it."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def require_same_weights(made: Mapping[str, Tensor], opened: Mapping[str, Any]) -> None:
    """Raise RoundPipeError where a weight that was opened again is not the one that was made.

    ``made``: samples by `sample_of`; ``opened``: the weights, maybe in another dtype.
    """
    for name, sample in made.items():
        found = sample_of(opened[name])
        if not torch.equal(found, sample.to(found.dtype)):
            raise RoundPipeError(
                f"a weight that was written is opened as another: {name}\n{REPORT}"
            )


def require_stock_keys(folder: Path) -> None:
    """Raise RoundPipeError unless stock transformers finds every weight it looks for, and no other.

    ``folder``: of a whole model.
    """
    try:
        found = _stock_keys(folder)
    except (OSError, ValueError, RuntimeError) as error:
        told = str(error).strip().partition("\n")[0]
        raise RoundPipeError(
            f"what was written is not a model that stock transformers opens: {told}\n{REPORT}"
        ) from error
    wrong = [key for keys in found.values() for key in keys]
    if wrong:
        some = ", ".join(map(str, wrong[:3]))
        raise RoundPipeError(
            f"what was written is not the model: {len(wrong)} weights are missing or too many: "
            f"{some}\n{REPORT}"
        )


def _stock_keys(folder: Path) -> dict[str, Any]:
    """What stock transformers found missing, unexpected or of another shape, by kind."""
    with quiet_transformers():
        from transformers import AutoConfig  # noqa: PLC0415 (imports late)

        kind = class_for(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        _, found = kind.from_pretrained(
            folder, device_map="meta", output_loading_info=True, use_safetensors=True
        )
    return dict(found)
