"""A model as an ordered list of layers: what the engine knows of any model.

A *layer* is the smallest piece that is placed. The user's module stays on the host and is never
run by a worker; a worker runs a *shell*, a copy of the layer's module tree that shares no
parameter and no buffer with it and is bound to device memory before it runs
(`torch.func.functional_call` on one module from two threads gives wrong results, so several
devices cannot share one tree).

A layer takes and returns a *boundary*: any pytree of tensors. The first layer gets ``None`` as its
boundary and the microbatch's inputs; every layer may look at the inputs (a causal LM rebuilds masks
and rotary tables from them rather than sending them along).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from roundpipe.store.packed import PackedTensor

Boundary = Any  # a pytree of tensors; between most layers one hidden state [batch, length, hidden]


@dataclass(frozen=True)
class Inputs:
    """What one microbatch calls the model with, on the device that runs it.

    ``wants_logits``: whether anybody reads more of the model's output than its loss.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    wants_logits: bool = True


class Shell(Protocol):
    """One layer on one device. Used by one thread at a time."""

    @property
    def module(self) -> nn.Module:
        """The shell's own module tree; of one structure in all shells of a layer."""
        ...

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The shell's own leaf parameters by full name, for gradients; the same objects always."""
        ...

    @property
    def work_bytes(self) -> int:
        """What the last forward took at its worst moment beside what autograd keeps of it.

        As far as it is known to be much: 0 for most layers.
        """
        ...

    def bind(self, tensors: Mapping[str, Tensor | PackedTensor]) -> None:
        """Point parameters and buffers at ``tensors`` (full name -> device view).

        A packed parameter has its weights, and their memory, only while the layer runs. Takes
        about half a microsecond each; ``tensors`` may hold names of other layers too.
        """
        ...

    def sync_mode(self) -> None:
        """Take over the `training` flags of the user's modules; called at each call's start."""
        ...

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """What hangs in the places of the layer's buffers now, by full name."""
        ...

    @property
    def changing(self) -> set[str]:
        """The buffers that the layer's forward is known to write to in the mode it is in."""
        ...

    def hang(self, tensors: Mapping[str, Tensor]) -> None:
        """Put other tensors in the places of some buffers, until they are bound again."""
        ...

    def changed(self) -> Sequence[str]:
        """The buffers that were written to or replaced since they were bound or hung."""
        ...

    def run(self, boundary: Boundary, inputs: Inputs, context: Any) -> Boundary:
        """Run the layer's forward under the caller's grad mode and return the next boundary.

        What it does to its buffers `changed` tells.
        """
        ...

    def __call__(self, boundary: Boundary, inputs: Inputs, context: Any) -> Boundary:
        """Run it where nobody keeps its buffers; raises ModelError if it changed one."""
        ...


class Layer(Protocol):
    """One placeable piece of a model."""

    @property
    def name(self) -> str:
        """For people, e.g. ``model.layers.3``."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer the layer reads, by full name in the user's model.

        A tensor that several layers read (a tied head) has the same name in each; the first of
        them owns it.
        """
        ...

    def make_shell(self, device: torch.device) -> Shell:
        """A new shell for ``device``: module tree copied, no weights copied, nothing bound.

        Costs about a millisecond. Parameters hold NaN until the first `Shell.bind`.
        """
        ...


class Context(Protocol):
    """Rebuilds, on one device, the arguments of blocks that carry no gradient.

    Used by one thread at a time, like a shell.
    """

    def sync_mode(self) -> None:
        """Take over the `training` flags of the user's modules; called at each call's start."""
        ...

    def __call__(self, inputs: Inputs, layers: range) -> Any:
        """The context that the shells of ``layers`` want for this microbatch; runs without grad."""
        ...


class ModelSpec(Protocol):
    """A module as a chain of layers. Equal to the module's own forward, or not made at all."""

    @property
    def layers(self) -> Sequence[Layer]:
        """In the order in which they run."""
        ...

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        ...

    @property
    def computes_loss(self) -> bool:
        """Whether the last layer's output has a ``.loss`` when the inputs hold ``labels``."""
        ...

    @property
    def takes_num_items(self) -> bool:
        """Whether the loss is its sum over tokens divided by ``num_items_in_batch``, if given."""
        ...

    @property
    def num_predicted(self) -> int:
        """Logits of a token, for a model that predicts tokens; 0 if that is not known."""
        ...

    @property
    def shifts_labels(self) -> bool:
        """Whether the first label of a sequence is not trained: no token is before it."""
        ...

    def refuse_lost_gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ModelError for an argument that wants a gradient and would get none."""
        ...

    def needs_inputs(self, layer: int) -> bool:
        """Whether running this layer reads the microbatch's inputs (directly or by context)."""
        ...

    def make_context(self, device: torch.device) -> Context:
        """A context builder for ``device``; its few buffers are copied there once."""
        ...

    def changed_since_wrapping(self) -> str | None:
        """What hooks or attributes of the module tree changed since it was wrapped, or None.

        ``training`` flags are not a change. Costs well under a millisecond per hundred modules.
        """
        ...

    def accept_changes(self) -> None:
        """Take the module's attributes as they are now; shells and contexts are to be made anew."""
        ...
