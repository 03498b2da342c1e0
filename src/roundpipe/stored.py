"""What a wrapper offers of the weights it keeps on the host: masters, gradients, state dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.store.build import newest_state, require_writable, trained_state
from roundpipe.wrapped import Wrapped, wants_masters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roundpipe.chain import Chain
    from roundpipe.store.layer import HostLayer


class Stored(Wrapped):
    """A wrapper whose model's tensors lie in host layers."""

    _layers: Sequence[HostLayer]
    _chain: Chain

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
        """The working weights by the model's own names; in an ``OptimizerCtx`` the masters."""
        if wants_masters():
            prefix = kwargs.get("prefix", args[0] if args else "")
            return self.optim_named_parameters(prefix)
        return super().named_parameters(*args, **kwargs)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the calls since the last step, by name; blocks until they are complete.

        Views of host memory in the working dtype, or fp32 where several calls or visits add up.
        Parameters that got none are left out. A ``grad_scaler`` has scaled them.
        """
        self.synchronize()
        found: dict[str, Tensor] = {}
        for layer in self._layers:
            for name in layer.trainable:
                gradient = layer.gradient(name)
                if gradient is not None:
                    found[name] = gradient
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the calls since the last step."""
        self.synchronize()
        for layer in self._layers:
            layer.clear_gradients()
        self._chain.making.end()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The newest weights by the model's own names, in its dtypes; waits until they are made."""
        self.synchronize()
        return newest_state(self.model, self._layers, *args, **kwargs)

    def trained_state_dict(self) -> dict[str, Tensor]:
        """Of ``state_dict`` what is trained: all that an adapter is saved from, nothing unpacked.

        Copies; waits until they are made.
        """
        self.synchronize()
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
        self.synchronize()
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
