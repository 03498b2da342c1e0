"""The loss that keeps a mixture's router from sending all tokens to few experts.

TRL's SFTTrainer adds it wherever a model's config has a coefficient for it, transformers' Trainer
where the config says ``output_router_logits``, our commands do as the config says. It is a product
of two means over a batch, so it hangs on how a step is cut: here it is the mean of the
microbatches', weighted by their trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roundpipe.finetune.run.batches import Batches

_FLAG, _COEFFICIENT = "output_router_logits", "router_aux_loss_coef"


@dataclass(frozen=True)
class WithRouterLoss:
    """Batches of ``inner`` that ask the model for its router's loss.

    Vision-language classes hear of it by a call's arguments alone.
    """

    inner: Batches

    def batch(self, samples: Any, rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """See `Batches`."""
        return {**self.inner.batch(samples, rows), _FLAG: True}

    def split(self, micro_batch_size: int | None) -> Any:
        """See `Batches`."""
        return self.inner.split(micro_batch_size)

    def tokens_in(self, batch: dict[str, Tensor]) -> int:
        """See `Batches`."""
        return self.inner.tokens_in(batch)


def set_router_loss(model: Any, coefficient: float | None, *, is_wrapped: bool = False) -> float:
    """Have ``model`` add its router's loss as TRL does, and return what it is multiplied with.

    ``coefficient`` None: that of the model's config; 0, as for every model without experts: no such
    loss is added, whatever the config said. Raises ConfigError for a coefficient where there is no
    router's loss, and for another one than that of a model that ``is_wrapped`` already.
    """
    text = model.config.get_text_config()
    is_there = hasattr(text, _FLAG)
    if coefficient and not is_there:
        raise ConfigError(
            f"{_COEFFICIENT}={coefficient:g}, and {type(model).__name__} has no router's loss"
            f"\nhint: leave {_COEFFICIENT} out"
        )
    if not hasattr(text, _COEFFICIENT):
        return 0.0
    own = getattr(text, _COEFFICIENT) or 0.0
    wanted = float(own if coefficient is None else coefficient) if is_there else 0.0
    setattr(text, _FLAG, bool(wanted))
    setattr(text, _COEFFICIENT, wanted)
    for module in model.modules():  # classes read it of the config when they are made
        had = getattr(module, _COEFFICIENT, wanted)
        if wanted and had != wanted:
            if is_wrapped:
                raise ConfigError(
                    f"{_COEFFICIENT}={wanted:g} changes the model, and it is in a RoundPipe already"
                    f", with {had:g}\nhint: model=MODEL, before it is wrapped, or leave it out"
                )
            setattr(module, _COEFFICIENT, wanted)
    return wanted


def no_router_loss(model: Any, error: Exception) -> ConfigError:
    """What to say where ``error`` tells that the engine cannot collect what the loss is made of."""
    reason = str(error).partition("\n")[0]
    return ConfigError(
        f"the router's loss, which args add, is not supported for {type(model).__name__}: {reason}"
        f"\nhint: args=SFTConfig({_COEFFICIENT}=0.0) trains the router by the loss alone"
    )
