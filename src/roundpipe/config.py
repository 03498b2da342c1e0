"""The library's settings: frozen, each checked once, here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

RecomputeGrain = Literal["stage", "layer"]


@dataclass
class ModelExecutePlan:
    """Stages given by hand, as ranges of layers.

    ``fwd_plan`` lists the forward stages from the first layer up; ``bwd_plan`` the stages that run
    backward, in the order in which they run: first the fused one (the last layers: forward, loss
    and backward at once), then those below it, top down.
    """

    fwd_plan: list[range] = field(default_factory=list)
    bwd_plan: list[range] = field(default_factory=list)


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """How a call runs. None means: as the model's own config says, else the default named here.

    ``requires_grad``: whether ``forward`` is to be differentiable (False until that is supported).
    ``output_device``: where losses and outputs are put (default: the host).
    ``preserve_rng_state``: accepted; recompute always repeats the random draws of forward.
    ``recompute_grain``: ``"stage"`` (default) keeps one stage's activations during its backward,
    ``"layer"`` one layer's, for one more forward.
    ``num_microbatch``: into how many microbatches a batch is cut (default: at most 8, whatever the
    devices); fewer when samples are fewer.
    ``split_input``, ``split_label``, ``merge_output``: functions in place of the cut along the
    first dimension and of joining along it; ``merge_output=False`` gives a list.
    ``execute_plan``: stages given by hand.
    """

    requires_grad: bool | None = None
    output_device: Any = None
    preserve_rng_state: bool | None = None
    recompute_grain: RecomputeGrain | None = None
    num_microbatch: int | None = None
    split_input: Callable[..., Any] | None = None
    split_label: Callable[..., Any] | None = None
    merge_output: Callable[..., Any] | bool | None = None
    execute_plan: ModelExecutePlan | None = None

    def __post_init__(self) -> None:
        if self.recompute_grain not in (None, "stage", "layer"):
            raise ConfigError(
                f"recompute_grain must be 'stage' or 'layer': {self.recompute_grain!r}"
            )
        if self.num_microbatch is not None and self.num_microbatch < 1:
            raise ConfigError(f"num_microbatch must be at least 1: {self.num_microbatch}")
        for name in ("split_input", "split_label"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name} is not supported yet\n"
                    "hint: tensors are cut along their first dimension"
                )
        if callable(self.merge_output):
            raise ConfigError(
                "a merge_output function is not supported yet\n"
                "hint: merge_output=False gives a list of the microbatches' outputs"
            )

    def over(self, default: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """This config, with what it leaves open taken from ``default``."""
        given = {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) is not None
        }
        return replace(default, **given)
