"""One parameter's entry in an optimizer's state: completed before an update, converted at a load.

The entry is a dict as torch's optimizers keep it: ``step`` (0-d fp32) and a tensor a moment, with
torch's names. Beside them stand what torch does not have: the scales of 8-bit moments
(``<moment>_scale``) and the ``remainder`` of a bf16 parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.optim.forms import Form, convert, new_moment
from roundpipe.optim.operands import Moment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Names = tuple[tuple[str, bool], ...]
"""Moments, first and second: name in the state, whether signed."""


@dataclass(frozen=True)
class Kept:
    """A parameter's state, complete. ``is_first``: a moment is new, all zeros."""

    moments: Mapping[str, Moment]
    remainder: Tensor | None
    step: Tensor
    is_first: bool

    def __getitem__(self, index: int) -> Moment | None:
        """The first (0) or second (1) moment; None if the rule has none."""
        moments: Sequence[Moment] = list(self.moments.values())
        return moments[index] if index < len(moments) else None

    def entries(self) -> dict[str, Tensor]:
        """As they stand in the optimizer's state."""
        entries = {"step": self.step}
        for name, moment in self.moments.items():
            entries[name] = moment.values
            if moment.scale is not None:
                entries[f"{name}_scale"] = moment.scale
        return entries if self.remainder is None else {**entries, "remainder": self.remainder}


def check_trainable(parameter: Tensor, form: Form) -> None:
    """Raise ConfigError for a parameter that no state of ours can train."""
    dtype = parameter.dtype
    if dtype not in {torch.float32, torch.bfloat16, torch.float64}:
        raise ConfigError(
            f"parameters must be fp32, bf16 or fp64: {dtype}\nhint: optim_dtype=torch.float32"
        )
    if dtype == torch.float64 and form != "fp32":
        raise ConfigError(f"fp64 parameters have moments of their own dtype only: {form}\n"
                          "hint: state_dtype='fp32'")  # fmt: skip


def complete(parameter: Tensor, known: Mapping[str, Any], names: Names, form: Form) -> Kept:
    """The state to update with: what is known, and zeros in ``form`` for what is not.

    Changes nothing; what it allocates lives only if the caller stores it.
    """
    is_first, moments = False, {}
    for name, is_signed in names:
        values, scale = known.get(name), known.get(f"{name}_scale")
        if values is None:
            is_first = True
            moments[name] = new_moment(parameter, form, is_signed=is_signed)
        else:
            moments[name] = Moment(values.contiguous(), scale, is_signed)
    remainder = known.get("remainder")
    if parameter.dtype != torch.bfloat16:
        remainder = None
    elif remainder is None:
        remainder = torch.zeros(parameter.shape, dtype=torch.int16, device=parameter.device)
    step = known.get("step")
    return Kept(
        moments,
        None if remainder is None else remainder.contiguous(),
        torch.tensor(0.0, dtype=torch.float32, device="cpu") if step is None else step,
        is_first,
    )


@torch.no_grad()
def adopted(
    parameter: Tensor, saved: Mapping[str, Any], signs: Mapping[str, bool], form: Form
) -> dict[str, Any]:
    """What a saved entry is for ``parameter`` and ``form``: the very tensors where they fit.

    From any form, torch's own included; rounded to nearest where the form is narrower.
    """
    here = {k: v.to(parameter.device) if isinstance(v, Tensor) and k != "step" else v
            for k, v in saved.items()}  # fmt: skip
    entry = {k: v for k, v in here.items() if not k.endswith("_scale") and k != "remainder"}
    for name, is_signed in signs.items():
        values = here.get(name)
        if isinstance(values, Tensor):
            moment = Moment(values, here.get(f"{name}_scale"), is_signed)
            if parameter.dtype == torch.float64:
                entry[name] = values.to(torch.float64)
                continue
            moment = convert(moment, form)
            entry[name] = moment.values
            if moment.scale is not None:
                entry[f"{name}_scale"] = moment.scale
    if parameter.dtype == torch.bfloat16 and "remainder" in here:
        entry["remainder"] = here["remainder"]
    return entry
