"""The library's settings: frozen, each checked once, here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

RecomputeGrain = Literal["stage", "layer"]
_GB = 1e9


class _Planner(Protocol):
    """What a wrapped model brings: it knows what its layers cost."""

    def balanced_stages(
        self,
        planners: Sequence[Any],
        run_type: Any,
        *,
        min_stages: int | None,
        upper_threshold: float,
        memory_limit: float | None,
    ) -> list[tuple[list[range], list[range]]]:
        """Forward and backward stages of each planner's model."""
        ...


@dataclass
class ModelExecutePlan:
    """Stages given by hand, as ranges of layers.

    ``fwd_plan`` lists the forward stages from the first layer up; ``bwd_plan`` the stages that run
    backward, in the order in which they run: first the fused one (the last layers: forward, loss
    and backward at once), then those below it, top down.
    """

    fwd_plan: list[range] = field(default_factory=list)
    bwd_plan: list[range] = field(default_factory=list)

    @classmethod
    def auto(
        cls,
        run_type: str,
        *models: Any,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> Any:
        """Balanced stages for one wrapped model, or a list for several, balanced together.

        ``run_type``: ``"infer"``, forward alone; ``"train"``, forward and backward over all layers,
        for ``forward``; ``"fused"`` for ``forward_backward``: the first backward stage runs forward
        too. ``min_stages`` (default: the number of devices) is kept where there are layers enough.
        No stage takes longer than ``upper_threshold`` times the slowest layer.
        ``model_memory_limit``: GB of a device for weights and gradients, half of it for the stage
        that comes next (default: 60 % of the smallest device). By times measured so far.
        """
        if run_type not in ("infer", "train", "fused"):
            raise ConfigError(f"run_type must be 'infer', 'train' or 'fused': {run_type!r}")
        if not upper_threshold >= 1:
            raise ConfigError(f"upper_threshold must be at least 1: {upper_threshold}")
        if min_stages is not None and min_stages < 1:
            raise ConfigError(f"min_stages must be at least 1: {min_stages}")
        if model_memory_limit is not None and not model_memory_limit > 0:
            raise ConfigError(f"model_memory_limit must be above 0: {model_memory_limit}")
        planners: list[_Planner] = [_planner_of(model) for model in models]
        if not planners:
            raise ConfigError("no model to plan for\nhint: ModelExecutePlan.auto('fused', model)")
        stages = planners[0].balanced_stages(
            planners,
            run_type,
            min_stages=min_stages,
            upper_threshold=upper_threshold,
            memory_limit=None if model_memory_limit is None else model_memory_limit * _GB,
        )
        plans = [cls(forward, backward) for forward, backward in stages]
        return plans[0] if len(plans) == 1 else plans


def _planner_of(model: Any) -> _Planner:
    planner = getattr(model, "planner", None)
    if not hasattr(planner, "balanced_stages"):
        raise ConfigError(
            f"not a wrapped model: {type(model).__name__}\nhint: RoundPipe(model) first"
        )
    return cast("_Planner", planner)


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """How a call runs. None means: as the model's own config says, else the default named here.

    ``requires_grad``: whether ``forward`` joins the caller's autograd graph (default: where grad
    mode is on).
    ``output_device``: where losses and outputs are put (default: the host).
    ``preserve_rng_state``: accepted; recompute always repeats the random draws of forward.
    ``recompute_grain``: ``"stage"`` (default) keeps one stage's activations during its backward,
    ``"layer"`` one layer's, for one more forward.
    ``num_microbatch``: into how many microbatches a batch is cut (default: at most 8, whatever the
    devices); fewer when samples are fewer.
    ``split_input``: in place of the cut along the first dimension a function (args, kwargs, number
    of microbatches) -> (list of args, list of kwargs), or a spec (of args, of kwargs): trees of
    ``TensorChunkSpec`` and ``_Replicate`` of ``torch.distributed.pipelining.microbatch``, None for
    what is cut as usual. ``split_label``: a function (label, number) -> list, or a spec.
    ``merge_output``: a function (list of outputs) -> result, a spec, in which ``_CustomReducer``
    may stand too, or False, which gives ``RoundPipePackedData`` in place of each leaf.
    ``execute_plan``: stages given by hand. ``loss_only``: a pass without gradient of a causal LM
    that is given labels returns its loss and no logits, which then are never there all at once.

    Raises ConfigError for values that mean nothing.
    """

    requires_grad: bool | None = None
    output_device: Any = None
    preserve_rng_state: bool | None = None
    recompute_grain: RecomputeGrain | None = None
    num_microbatch: int | None = None
    split_input: Any = None
    split_label: Any = None
    merge_output: Any = None
    execute_plan: ModelExecutePlan | None = None
    loss_only: bool | None = None

    def __post_init__(self) -> None:
        if self.recompute_grain not in (None, "stage", "layer"):
            raise ConfigError(
                f"recompute_grain must be 'stage' or 'layer': {self.recompute_grain!r}"
            )
        if self.num_microbatch is not None and self.num_microbatch < 1:
            raise ConfigError(f"num_microbatch must be at least 1: {self.num_microbatch}")

    def over(self, default: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """This config, with what it leaves open taken from ``default``."""
        given = {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) is not None
        }
        return replace(default, **given)
