"""What decides which weights of a model are trained, and which are added to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from roundpipe.errors import ConfigError

MethodName = Literal["full", "lora", "qlora", "freeze"]
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """What of peft's ``LoraConfig`` decides sizes and work.

    ``target_modules``: ``all-linear``, another string as a regular expression for the whole name,
    or ends of names. On a mixture of experts ``all-linear`` means attention and shared experts.
    ``target_parameters``: ends of names of stacked experts that get adapters too.
    ``modules_to_save``: ends of names of modules that are trained as they are.
    """

    r: int = 16
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"lora_r must be at least 1: {self.r}\nhint: lora_r=16")


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
                r"hint: unfrozen_parameters=['layers\.(30|31)\.']"
            )

    @property
    def has_adapter(self) -> bool:
        """Whether the base model is frozen and an adapter is trained."""
        return self.name in ("lora", "qlora")

    @property
    def is_packed(self) -> bool:
        """Whether the frozen base weights are kept in 4 bits."""
        return self.name == "qlora"
