"""What of a loaded model is trained: all of it, an adapter, or what was named.

    full | freeze: patterns | lora, qlora: a new adapter, or one that exists

Whatever a user might not expect is said in a line before training: that an adapter's own settings
count, what adapters on routed experts add, that weights which were one are two from now on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.adapters import (
    add_adapter,
    count_parameters,
    refuse_packed,
    short_count,
)
from roundpipe.finetune.model.peft_quietly import PeftModel
from roundpipe.finetune.model.started import start_from
from roundpipe.models.freeze import unfrozen
from roundpipe.models.routed import is_routed

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import LoraConfig
    from torch import Tensor, nn

    from roundpipe.finetune.model.base_model import BaseModel
    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.models.loading.hub import Hub

_MOMENTS = {"fp32": 8, "bf16": 4, "int8": 2}  # bytes of a trained weight
_MASTER = 4


def prepare_method(
    base: BaseModel,
    config: TrainConfig,
    source: ModelSource,
    *,
    say: Callable[[str], None],
    hub: Hub | None = None,
    lora: LoraConfig | None = None,
) -> nn.Module:
    """Freeze ``base`` and add to it what ``config`` trains; the model to wrap in a RoundPipe.

    An adapter is put around the base, everything else changes the base in place. ``lora``: its
    settings, where they are not the config's. ``say`` shows a line. May download an adapter. Raises
    ConfigError where nothing would be trained, where what is named is not there, and for weights in
    4 bits that are to be trained themselves.
    """
    model: Any = base.model
    ends = _ends(model)
    if config.finetuning_type == "freeze":
        _freeze(model, config, say)
    elif config.finetuning_type in ("lora", "qlora"):
        if config.adapter_name_or_path is not None:
            model = start_from(
                model,
                config.adapter_name_or_path,
                source,
                is_packed=base.is_packed,
                hub=hub,
                say=say,
            )
        else:
            model = add_adapter(model, config, source, seed=config.seed, lora=lora)
        _say_routed(model, config, say)
    if base.is_packed:
        refuse_packed(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "nothing would be trained: no weight is left that is not frozen\n"
            "hint: target_modules=all-linear, or finetuning_type=full"
        )
    if ends is not None:
        _say_tied(model, ends, say)
    return model  # type: ignore[no-any-return]


def _freeze(model: Any, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Freeze all but what unfrozen_parameters names."""
    if not config.unfrozen_parameters:
        raise ConfigError(
            "freeze needs to know what stays trainable: unfrozen_parameters\n"
            "hint: unfrozen_parameters=layers:-2 trains the last two blocks"
        )
    trained = unfrozen(model, config.unfrozen_parameters)
    model.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    names = list(trained)
    some = ", ".join(names[:2]) + (f", … {names[-1]}" if len(names) > 2 else "")
    say(f"trained: {some} ({len(names)} tensors, {count_parameters(model)})")


def _say_routed(model: Any, config: TrainConfig, say: Callable[[str], None]) -> None:
    """Say what adapters on routed experts and routers add, where the user asked for them."""
    routed = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and is_routed(name)
    )
    if not routed:
        return
    rest = count_parameters(model).trained - routed
    weight = next(model.parameters()).element_size()
    each = 2 * weight + _MASTER + _MOMENTS[config.optim_state_dtype]
    say(
        f"adapters on routed experts and routers add {short_count(routed)} trained weights to "
        f"{short_count(rest)}: {routed * each / 1e9:.2f} GB of host memory ({each} bytes each)"
    )


def _ends(model: Any) -> tuple[str, str] | None:
    """The names of embedding and head where both are one weight; None where they are not."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table is None or head is None or getattr(head, "weight", None) is not table.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return names[id(table)], names[id(head)]


def _say_tied(model: Any, ends: tuple[str, str], say: Callable[[str], None]) -> None:
    """Say what has become of the weight that embedding and head share, if it is trained."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    trained = [_trained_in(base, name) for name in ends]
    if not any(trained):
        return
    table, head = ends
    if model is base or {id(t) for t in trained[0]} & {id(t) for t in trained[1]}:
        if base is not model:
            say(f"{head} and {table} are one weight, and stay one")
        elif not all(p.requires_grad for p in model.parameters()):
            say(f"{head} and {table} are one weight: both are trained")
        return
    apart = " and ".join(name for name, found in zip(ends, trained, strict=True) if found)
    say(
        f"{head} and {table} are one weight in the base and are two from here on: {apart} trained "
        "apart (peft={ensure_weight_tying: true} keeps them one)"
    )


def _trained_in(base: Any, name: str) -> list[Tensor]:
    return [p for p in base.get_submodule(name).parameters() if p.requires_grad]
