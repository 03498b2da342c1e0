"""What AdamW, Adam and SGD share: an optimizer that updates one parameter in one pass over memory.

Gradient in, state in place, working weights out. See `execution.py` for who does it and by how many
threads, `forms.py` for the forms of state.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, overload

import torch
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.optim.execution import resolve, update_in_one_pass_
from roundpipe.optim.forms import Form, form_of
from roundpipe.optim.operands import Operands
from roundpipe.optim.state import adopted, check_trainable, complete

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.optim.optimizer import ParamsT

    from roundpipe.optim.compiled import Kernel
    from roundpipe.optim.execution import Implementation
    from roundpipe.optim.operands import Numbers
    from roundpipe.optim.state import Names

logger = logging.getLogger(__name__)


class Config(Protocol):
    """Hyperparameters of one parameter group."""

    def names(self) -> Names:
        """The moments kept."""
        ...

    def numbers(self, step: int, *, is_first: bool) -> Numbers:
        """Those of step ``step``, from 1; ``is_first``: a moment is new."""
        ...


AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True)
class Frozen(Generic[AnyConfig]):
    """What one parameter is updated with: hyperparameters, and the form of new moments."""

    config: AnyConfig
    form: Form


class SinglePass(torch.optim.Optimizer, Generic[AnyConfig]):
    """The part of such an optimizer that does not depend on its rule.

    Learning-rate schedulers work. Parameters are fp32 or fp64, or bf16: then the state holds the
    low halves of their fp32 values as ``remainder``, and small steps are not lost.
    """

    signs: ClassVar[Mapping[str, bool]]
    """All moments the rule may keep, and whether they are signed."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        state_dtype: torch.dtype | str,
        implementation: Implementation,
    ) -> None:
        form = form_of(state_dtype)
        self.config(defaults)
        ran = "chunks" if resolve(implementation) is None else "compiled"
        super().__init__(params, {**defaults, "state_dtype": form, "implementation": ran})

    def config(self, group: Mapping[str, Any]) -> AnyConfig:
        """The hyperparameters of a parameter group; raises ConfigError if out of range."""
        raise NotImplementedError

    @property
    def implementation(self) -> str:
        """What updates: ``"compiled"``, or ``"chunks"`` of plain PyTorch."""
        return str(self.defaults["implementation"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with hyperparameters of their own where given; see torch.optim."""
        given = {**self.defaults, **param_group}
        self.config(given)
        form = form_of(given["state_dtype"])
        own = {"state_dtype": form, "implementation": self.implementation}
        super().add_param_group({**param_group, **own})
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_trainable(parameter, form)
        except ConfigError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a ``.grad``; return the closure's loss, if given one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        snapshot = self.hyperparameters()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_(parameter, parameter.grad, snapshot)
        return loss

    def hyperparameters(self) -> dict[Tensor, Frozen[AnyConfig]]:
        """What every parameter is to be updated with, as of now.

        Later changes to ``param_groups`` do not reach it: updates may run in another thread while
        a scheduler sets the next learning rate. Counts as a step for schedulers.
        """
        self._opt_called = True  # what schedulers look at to warn that they run before the step
        return {p: frozen for group in self.param_groups
                for frozen in (Frozen(self.config(group), group["state_dtype"]),)
                for p in group["params"]}  # fmt: skip

    @torch.no_grad()
    def update_(
        self,
        parameter: Tensor,
        grad: Tensor,
        snapshot: Mapping[Tensor, Frozen[AnyConfig]],
        *,
        grad_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Update one parameter and its state from ``grad`` times ``grad_scale`` (0-d).

        ``out``: working weights of any floating dtype, get a cast of the new parameter in the same
        pass; None where the parameter is the working weight. Its step is counted last: an update
        that ran out of memory has changed nothing. Safe beside other threads unless they touch
        this parameter or its state.
        """
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"{type(self).__name__} needs dense gradients: {grad.layout}\n"
                "hint: nn.Embedding(sparse=False)"
            )
        frozen = snapshot[parameter]
        known = self.state.get(parameter, {})
        kept = complete(parameter, known, frozen.config.names(), frozen.form)
        operands = Operands(
            param=parameter.detach(),
            grad=grad,
            first=kept[0],
            second=kept[1],
            remainder=kept.remainder,
            out=out,
            grad_scale=grad_scale,
        )
        step = int(kept.step.item()) + 1
        numbers = frozen.config.numbers(step, is_first=kept.is_first)
        update_in_one_pass_(operands, numbers, self._compiled())
        self.state[parameter].update(kept.entries())
        kept.step.add_(1)

    def _compiled(self) -> Kernel | None:
        if self.implementation == "chunks":
            return None
        found = resolve("auto")
        if found is None:  # made on a machine with a compiler, copied to one without
            for settings in (self.defaults, *self.param_groups):
                settings["implementation"] = "chunks"
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over groups and state, of this class or of torch's optimizer of the same name.

        State in another form than ``state_dtype`` is converted, to nearest. Form and implementation
        stay this optimizer's; a state that another implementation made is said in the log, because
        the next step may then differ in a last bit from what it would have been.
        """
        own = [{k: g[k] for k in ("state_dtype", "implementation")} for g in self.param_groups]
        groups, saved = state_dict["param_groups"], state_dict["state"]
        # Without the state: torch would cast all of it to the parameters' dtype.
        super().load_state_dict({**state_dict, "state": {}})
        for group, kept in zip(self.param_groups, own, strict=True):
            group.update(kept)
        for group, theirs in zip(self.param_groups, groups, strict=True):
            for parameter, key in zip(group["params"], theirs["params"], strict=True):
                if key in saved:
                    self.state[parameter] = adopted(
                        parameter, saved[key], self.signs, group["state_dtype"]
                    )
        made_by = {group["implementation"] for group in groups if "implementation" in group}
        if made_by - {self.implementation}:
            logger.info(
                "the optimizer's state was made by another implementation: %s, now %s",
                ", ".join(sorted(made_by)),
                self.implementation,
            )
