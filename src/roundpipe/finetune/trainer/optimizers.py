"""An optimizer that was made over a model's own parameters becomes one over its masters.

transformers' Trainer is given optimizers over ``model.parameters()``. Here devices compute with
working weights and an optimizer updates masters. So an optimizer of the same class is made, with
the same groups and settings, over the masters of the same parameters; a scheduler that was given
with it goes on to move its learning rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from roundpipe.errors import ConfigError
from roundpipe.finetune.run.training import Optimizing

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from roundpipe.roundpipe import RoundPipe


def over_masters(optimizers: Any, pipe: RoundPipe, names: dict[int, str]) -> Optimizing | None:
    """What steps ``pipe`` for what a Trainer was given as ``optimizers``; None: nothing.

    ``names``: of the parameters that the model had before it was wrapped, by ``id``. Raises
    ConfigError for an optimizer that has made steps, or over parameters of another model.
    """
    optimizer, scheduler = _pair(optimizers)
    if optimizer is None:
        if scheduler is not None:
            raise ConfigError(
                "optimizers: a scheduler without its optimizer\n"
                "hint: optimizers=(optimizer, scheduler), or lr_scheduler_type in args"
            )
        return None
    masters = dict(pipe.optim_named_parameters())
    held = {id(master) for master in masters.values()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    if all(id(parameter) in held for parameter in given):
        return Optimizing(optimizer, scheduler)
    if optimizer.state:
        raise ConfigError(
            "optimizers: the optimizer has made steps already, on weights that are not the masters"
            "\nhint: resume_from_checkpoint goes on with a run; else make a new optimizer"
        )
    made = _rebuilt(optimizer, masters, names)
    if scheduler is not None:
        _move(scheduler, made)
    return Optimizing(made, scheduler)


def names_of(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters by ``id``."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _pair(optimizers: Any) -> tuple[Optimizer | None, Any]:
    if isinstance(optimizers, (tuple, list)) and len(optimizers) == 2:
        return optimizers[0], optimizers[1]
    raise ConfigError(
        "optimizers: not a pair\nhint: optimizers=(optimizer, scheduler), each may be None"
    )


def _move(scheduler: Any, optimizer: Optimizer) -> None:
    """Have a scheduler move the rate of another optimizer, with the same groups.

    torch tells by a mark on its ``step`` whether a scheduler has seen an optimizer; making one
    sets it.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    LambdaLR(optimizer, lambda _: 1.0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.optimizer = optimizer


def _rebuilt(optimizer: Optimizer, masters: dict[str, Any], names: dict[int, str]) -> Optimizer:
    groups = []
    for group in optimizer.param_groups:
        kept = [_master(parameter, masters, names) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({**settings, "params": [master for master in kept if master is not None]})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(
            "optimizers: the optimizer holds no trained parameter of the model\n"
            "hint: make it over the parameters of the model that is given"
        )
    kind: Any = type(optimizer)
    try:
        return kind(groups)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(
            f"optimizers: another {kind.__name__} cannot be made over the masters: {error}\n"
            "hint: model=RoundPipe(…) and an optimizer over its optim_parameters()"
        ) from error


def _master(parameter: Any, masters: dict[str, Any], names: dict[int, str]) -> Any:
    """The master of a parameter, None where that is not trained."""
    name = names.get(id(parameter))
    if name is None:
        raise ConfigError(
            "optimizers: the optimizer holds a parameter that the model does not have: "
            f"{tuple(parameter.shape)}\nhint: make it over the parameters of the model that is "
            "given; with a name, or with peft_config, the trainer makes the weights: "
            "optim, learning_rate and weight_decay in args"
        )
    return masters.get(name)
