"""Arguments of a causal LM that a gradient may be asked of: what the prefix alone reads.

Every layer of a split model looks at the call's arguments: the context rebuilds masks from them,
without a graph, and what comes after the blocks runs the model's forward from its start. A gradient
comes back through the prefix only. So embeddings may want one, unless the model reads them once
more further up; a mask, or what an encoder made, would silently get none, and is refused.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.models.recording import Split

_EMBEDDINGS = "inputs_embeds"


class LostGradients:
    """Refuses arguments whose gradient would be lost, or be a part of it."""

    def __init__(self, split: Split) -> None:
        root: Any = split.root
        base = root.get_base_model() if hasattr(root, "get_base_model") else root
        self._parameters = tuple(inspect.signature(base.forward).parameters)
        embedding = _embedding_of(base)
        between = (home for each in split.flow.between.values() for home in each.homes)
        late = {id(home.module) for home in (*split.read_after, *between)}
        is_once = embedding is not None and late.isdisjoint(map(id, embedding.modules()))
        self._allowed = {_EMBEDDINGS} if is_once else set()

    def refuse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ModelError, naming the argument, for one that wants a gradient and gets none."""
        for name, value in (*zip(self._parameters, args, strict=False), *kwargs.items()):
            if name not in self._allowed and any(map(_wants_gradient, tree_leaves(value))):
                raise ModelError(
                    f"an argument wants a gradient that would be lost: {name}\n"
                    "hint: detach() it, or wrap nn.Sequential(model) to run it as one layer"
                )


def _embedding_of(base: Any) -> nn.Module | None:
    """The model's embedding, by its own word; None if it does not say."""
    try:
        found = getattr(base, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _wants_gradient(leaf: Any) -> bool:
    each = leaf if isinstance(leaf, list) else [leaf]  # one for each microbatch
    return any(isinstance(value, Tensor) and value.requires_grad for value in each)
