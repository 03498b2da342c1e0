"""What a training method does to a model: which weights are trained, which adapters are added."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from roundpipe.errors import ConfigError
from roundpipe.models.estimate.adapter import Lora, add_adapters

if TYPE_CHECKING:
    from torch import nn

MethodName = Literal["full", "lora", "qlora", "freeze"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a model is trained. ``unfrozen``: for freeze, regular expressions found in names."""

    name: MethodName = "full"
    lora: Lora = field(default_factory=Lora)
    unfrozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = get_args(MethodName)
        if self.name not in known:
            raise ConfigError(f"unknown method: {self.name}\nhint: {', '.join(known)}")
        if self.name == "freeze" and not self.unfrozen:
            raise ConfigError(
                "freeze needs to know what stays trainable\n"
                "hint: unfrozen_parameters=['layers\\.(30|31)\\.']"
            )

    @property
    def has_adapter(self) -> bool:
        """Whether the base model is frozen and an adapter is trained."""
        return self.name in ("lora", "qlora")

    @property
    def is_packed(self) -> bool:
        """Whether the frozen base weights are kept in 4 bits."""
        return self.name == "qlora"


def apply_method(model: nn.Module, method: Method) -> None:
    """Freeze and add adapters in place; the model may be on meta.

    Raises ConfigError where nothing would be trained.
    """
    if method.has_adapter:
        add_adapters(model, method.lora)
    elif method.name == "freeze":
        patterns = [re.compile(pattern) for pattern in method.unfrozen]
        for name, parameter in model.named_parameters():
            is_trained = any(pattern.search(name) for pattern in patterns)
            parameter.requires_grad_(is_trained and parameter.is_floating_point())
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"nothing would be trained: no parameter is called like {', '.join(method.unfrozen)}\n"
            "hint: names look like " + next(name for name, _ in model.named_parameters())
        )
