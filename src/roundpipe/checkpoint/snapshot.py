"""What a checkpoint is to hold, taken down between two steps: references, hardly a copy.

    layers       by the layer, read while the next step runs; see `roundpipe.store.reading`
    state.json   all that is not a layer's: the optimizer's groups, the scheduler, the loss scaler,
                 counters and random state, what plans decide of the bits, and the caller's own;
                 its tensors in state.safetensors

The second kind is small, and taken down as it is now.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.checkpoint.layer_files import Keeper
from roundpipe.checkpoint.values import encode
from roundpipe.errors import ConfigError
from roundpipe.store.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from roundpipe.optim.on_disk import StateOnDisk
    from roundpipe.store.layer import HostLayer

STATE_FILE, STATE_TENSORS = "state.json", "state.safetensors"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands beside weights and optimizer, for equal bits after it.

    ``staleness`` of the next call; ``seed`` as given to the model; ``calls`` and ``passes`` made so
    far, of which draws depend; ``plans``: `Candidate.as_plain` by number of microbatches, which
    are of so many ``devices``.
    """

    staleness: int
    seed: int | None
    calls: int
    passes: int
    devices: int
    plans: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Snapshot:
    """See the module docstring. ``document`` and ``tensors`` are of the second kind."""

    model: nn.Module
    layers: Sequence[HostLayer]
    keepers: Sequence[Keeper]
    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)

    def begin(self) -> None:
        """From now on nobody changes a layer before it is read."""
        for layer in self.layers:
            layer.reading = Reading()

    def end(self) -> None:
        """Let everybody go on, read or not. Idempotent."""
        for layer in self.layers:
            if layer.reading is not None:
                layer.reading.end()


def take(  # noqa: PLR0913 - all that a run consists of
    model: nn.Module,
    layers: Sequence[HostLayer],
    progress: Progress,
    *,
    optimizer: Optimizer | None,
    on_disk: StateOnDisk | None,
    late: Mapping[int, Mapping[str, Tensor]],
    scheduler: Any,
    scaler: Any,
    state: Mapping[str, Any],
) -> Snapshot:
    """Take down what there is, with nothing under way. ``late``: by layer, see `Keeper`.

    Raises ConfigError for state that cannot be saved without pickle.
    """
    tensors: dict[str, Tensor] = {}
    parts = {
        "optimizer": None if optimizer is None else _described(optimizer, layers),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "progress": vars(progress),
        "random": torch.get_rng_state(),
        "state": dict(state),
    }
    document = {name: encode(part, tensors, name) for name, part in parts.items()}
    document["scheduler class"] = None if scheduler is None else class_of(scheduler)
    keepers = [Keeper(layer, optimizer, on_disk, late.get(layer.index, {})) for layer in layers]
    for layer in layers:
        assert layer.masters is not None  # made now, not in another thread
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    return Snapshot(model, layers, keepers, {"format": FORMAT, **document}, own)


def class_of(thing: object) -> str:
    """The full name of its class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def names_of(layers: Sequence[HostLayer]) -> dict[Tensor, str]:
    """The name of each master that an optimizer may hold, frozen ones too."""
    held = ({**layer.retired_masters, **layer.masters} for layer in layers)
    return {master: name for masters in held for name, master in masters.items()}


def _described(optimizer: Optimizer, layers: Sequence[HostLayer]) -> dict[str, Any]:
    names = names_of(layers)
    groups = [
        {
            "parameters": [names[parameter] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    return {"class": class_of(optimizer), "groups": groups}


def require_settled(*, has_gradients: bool, is_mixed: bool) -> None:
    """Raise ConfigError in the middle of a step, or for weights of two versions."""
    if has_gradients:
        raise ConfigError(
            "there are gradients of a step that was not made\n"
            "hint: step(optimizer) or zero_grad() before save_checkpoint"
        )
    if is_mixed:
        raise ConfigError(
            "the weights are mixed: some may be a step ahead of others\n"
            "hint: load_checkpoint(…) of the last one"
        )
