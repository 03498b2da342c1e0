"""What a wrapper offers of the weights it keeps on the host: masters, gradients, state dicts.

[Note: gradients in sight] Gradients lie in the layers' own segments. Whoever synchronizes or asks
for ``parameters()`` between a call and its step finds them in ``.grad`` of the working weights: as
views, so that a norm is the true one and clipping in place is what the step will use. Nothing else
reads them there, and they are taken away again when the step has them or a further call adds to
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from roundpipe.engine.worker import is_worker
from roundpipe.errors import ConfigError
from roundpipe.models.saving import SHARD_BYTES, save
from roundpipe.plan.amounts import read_bytes
from roundpipe.store.build import NewestState, newest_state, require_writable, trained_state
from roundpipe.wrapped import Wrapped, wants_masters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.chain import Chain
    from roundpipe.store.layer import HostLayer


class Stored(Wrapped):
    """A wrapper whose model's tensors lie in host layers."""

    _layers: Sequence[HostLayer]
    _chain: Chain
    _shown: list[Tensor]  # whose gradients are in sight

    def optim_parameters(self) -> list[nn.Parameter]:
        """The master weights, for an optimizer."""
        return [parameter for _, parameter in self.optim_named_parameters()]

    def optim_named_parameters(
        self,
        prefix: str = "",
        remove_duplicate: bool = True,  # a master is one, however often its weight is read
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The master weights by the names they have in the model, behind ``prefix`` and a dot."""
        for layer in self._layers:
            for name, master in layer.masters.items():
                yield (f"{prefix}.{name}" if prefix else name), master

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The working weights by the model's own names; in an ``OptimizerCtx`` the masters.

        Waits for what is under way: after a step they are updated, and between a call and its step
        gradients are there. See [Note: gradients in sight].
        """
        if wants_masters():
            prefix = kwargs.get("prefix", args[0] if args else "")
            return self.optim_named_parameters(prefix)
        if not is_worker():
            self._settle()
        return super().named_parameters(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then all within the model, whose weights are as in ``named_parameters``."""
        if not is_worker():
            self._settle()
        return super().named_modules(memo, prefix, remove_duplicate)

    def _show_gradients(self) -> None:
        """Put gradients where a plain loop has them. See [Note: gradients in sight].

        Nothing may be under way. Those of calls that each divided by tokens of their own become
        those of one mean over all their tokens.
        """
        scale = self._chain.making.settle()
        for layer in self._layers:
            for name in layer.trainable:
                gradient, tensor = layer.gradient(name), layer.tensors[name]
                if gradient is None:
                    continue
                if scale != 1.0:
                    gradient.mul_(scale)
                tensor.grad_dtype = gradient.dtype
                tensor.grad = gradient
                self._shown.append(tensor)

    def _hide_gradients(self) -> None:
        """Take them away again."""
        for tensor in self._shown:
            tensor.grad = None
            tensor.grad_dtype = tensor.dtype
        self._shown.clear()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train all parameters, or none; see ``synchronize``."""
        self.model.requires_grad_(requires_grad)
        self._settle()
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Run ``fn`` on every module of the model, as to initialise it; masters follow."""
        self._settle()
        for layer in self._layers:
            layer.publish()
        super().apply(fn)
        for layer in self._layers:
            layer.reload_masters()
        self._chain.notice_load()
        return self

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the calls since the last step, by name; blocks until they are complete.

        Views of host memory in the working dtype, or fp32 where several calls or visits add up.
        Parameters that got none are left out. A ``grad_scaler`` has scaled them.
        """
        self._settle()  # which settles what several calls have divided by
        found: dict[str, Tensor] = {}
        for layer in self._layers:
            for name in layer.trainable:
                gradient = layer.gradient(name)
                if gradient is not None:
                    found[name] = gradient
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the calls since the last step."""
        self._settle()
        self._hide_gradients()
        for layer in self._layers:
            layer.clear_gradients()
        self._chain.making.end()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The newest weights by the model's own names, in its dtypes; waits until they are made."""
        self._settle()
        return newest_state(self.model, self._layers, *args, **kwargs)

    def newest_weights(self) -> Mapping[str, Any]:
        """``state_dict`` without a copy: each tensor is made, or viewed, when it is asked for.

        Waits until nothing is under way; to be read before the next call.
        """
        self._settle()
        return NewestState(self.model, self._layers)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        max_shard_size: int | str = SHARD_BYTES,
        safe_serialization: bool = True,
    ) -> None:
        """Write the newest weights as stock transformers, or an adapter as stock peft, loads them.

        The checkpoint's own class, names, shapes and dtypes, towers that are not trained included;
        of a model under ``peft`` the adapter alone. What was packed into 4 bits is unpacked. Takes
        the memory of one tensor or block; files appear when all are written. Blocks until nothing
        is under way and on the disk. ``max_shard_size``: bytes, or as ``"5GB"``; a file of the
        model is larger only if one block is. Raises ConfigError for a module that is not of
        transformers, and for ``safe_serialization=False``: only safetensors are written.
        """
        if not safe_serialization:
            raise ConfigError(
                "only safetensors are written: safe_serialization=False\n"
                "hint: torch.save(model.state_dict(), path)"
            )
        limit = read_bytes(str(max_shard_size))
        if not limit:
            raise ConfigError(f"max_shard_size is no size: {max_shard_size!r}\nhint: '5GB'")
        save(Path(folder), self.model, self.newest_weights(), shard_bytes=limit)

    def trained_state_dict(self) -> dict[str, Tensor]:
        """Of ``state_dict`` what is trained: all that an adapter is saved from, nothing unpacked.

        Copies; waits until they are made.
        """
        self._settle()
        return trained_state(self.model, self._layers)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load weights by the model's own names; masters follow."""
        if assign:
            raise ConfigError(
                "assign=True would take the weights out of their segments\nhint: leave it out"
            )
        self._settle()
        require_writable(self.model, self._layers, state_dict)
        for layer in self._layers:  # what is not loaded keeps its newest value
            layer.publish()
        result = self.model.load_state_dict(state_dict, strict=strict)
        named = self.model.named_parameters(remove_duplicate=False)
        loaded = {tensor for name, tensor in named if name in state_dict}
        for layer in self._layers:
            layer.reload_masters([n for n in layer.trainable if layer.tensors[n] in loaded])
        self._chain.notice_load()
        return result
