"""Outputs that hooks collect inside blocks, for a forward that runs elsewhere.

``output_router_logits`` and its like work so in transformers: the model's forward sets a collector
in a context variable, hooks on modules inside the blocks append to its lists, and what the lists
hold becomes part of the output; the auxiliary loss of a mixture of experts is computed from it.
Here blocks and the model's forward run apart. So a block runs under a collector of its own, filled
with what blocks before it collected; what it adds travels on in the boundary, and where the suffix
runs the model's forward, stand-ins add it to that forward's collector in the same order.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from roundpipe.models.packet import Packet

FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")
_SELECTED = "_hidden_states_layers"  # beside the lists: which hidden states are wanted


def active() -> dict[str, Any]:
    """The collector of the model's forward that runs now; empty where none collects."""
    collector = _variable().get() if _has_collectors() else None
    return {} if collector is None else collector


def asked(root: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """The flags by which a call asks for collected outputs, in its arguments or the config."""
    config = getattr(root, "config", None)
    configs: list[Any] = [config]
    if config is not None and hasattr(config, "get_text_config"):
        configs.append(config.get_text_config())
    return [
        flag
        for flag in FLAGS
        if kwargs.get(flag)
        or (kwargs.get(flag) is None and any(getattr(each, flag, False) for each in configs))
    ]


def require_collected(flags: Sequence[str]) -> None:
    """Raise ModelError where an output that is asked for is not collected by hooks."""
    keys = active()
    for flag in flags:
        if flag.removeprefix("output_") not in keys:
            raise ModelError(
                f"{flag} is not supported for a model that gathers it in its own forward\n"
                f"hint: set it to False: {flag}=False"
            )


def wanted() -> dict[str, Any] | None:
    """What the forward that runs now wants to be collected, for `collecting`; None: nothing."""
    collector = active()
    if not any(key != _SELECTED for key in collector):
        return None
    return {key: each if key == _SELECTED else None for key, each in collector.items()}


@contextmanager
def collecting(
    wants: Mapping[str, Any] | None, packet: Packet
) -> Iterator[dict[str, list[list[Any]]]]:
    """Collect what hooks give inside; yields a dict that holds, afterwards, all lists so far."""
    found: dict[str, list[list[Any]]] = {}
    if wants is None:
        yield found
        return
    collector: dict[str, Any] = {}
    for key, selected in wants.items():
        before = packet.collected.get(key, ())
        is_list = key != _SELECTED
        collector[key] = [each for block in before for each in block] if is_list else selected
    counts = {key: len(each) for key, each in collector.items() if key != _SELECTED}
    variable = _variable()
    token = variable.set(collector)
    try:
        yield found
    finally:
        variable.reset(token)
    for key, count in counts.items():
        found[key] = [*map(list, packet.collected.get(key, ())), collector[key][count:]]


def hand_over(packet: Packet, index: int) -> None:
    """Give what block ``index`` collected to the forward that runs now."""
    collector = active()
    for key, blocks in packet.collected.items():
        collector[key].extend(blocks[index])


class Hooks:
    """Installs the hooks that collect on the copy of a block, when they are first needed.

    ``root``, ``name``: the user's model and the block's full name in it.
    """

    def __init__(self, root: nn.Module, name: str) -> None:
        self._name = name
        self._owner = _owner(root, name)
        # copied with the block if the model has run with such a flag before
        self._are_there = getattr(self._owner, "_output_capturing_hooks_installed", False)

    def install(self, block: nn.Module) -> None:
        """Have the modules of ``block`` append to whatever collector is active."""
        if self._are_there or self._owner is None:
            return
        from transformers.utils import output_capturing as capturing  # noqa: PLC0415 (late)

        tasks = []
        registry: Any = capturing._CAN_RECORD_REGISTRY
        for key, given in registry.get(self._owner).items():
            for each in given if isinstance(given, list) else [given]:
                tasks.append((key, each if _is_recorder(each) else _recorder(key, each)))
        capturing.recursively_install_hooks(block, f".{self._name}", tasks)
        self._are_there = True


def _is_recorder(spec: object) -> bool:
    return hasattr(spec, "target_class") and hasattr(spec, "layer_name")


def _recorder(key: str, spec: Any) -> Any:
    """A class, or the end of a module's name, as transformers writes it out."""
    from transformers.utils.output_capturing import OutputRecorder  # noqa: PLC0415 (late)

    is_name = isinstance(spec, str)
    return OutputRecorder(
        target_class=None if is_name else spec,  # type: ignore[arg-type]
        index=0 if "hidden_states" in key else 1,
        class_name=spec if is_name else None,
    )


def _owner(root: nn.Module, name: str) -> nn.Module | None:
    """The innermost model of transformers that holds the module called ``name``."""
    if not _has_collectors():
        return None
    from transformers import PreTrainedModel  # noqa: PLC0415 (late)

    owner, module = None, root
    for part in name.split("."):
        if isinstance(module, PreTrainedModel):
            owner = module
        module = module.get_submodule(part)
    return owner


def _has_collectors() -> bool:
    if "transformers" not in sys.modules:  # importing it takes seconds, and nobody has yet
        return False
    try:
        _variable()
    except ImportError:
        return False
    return True


def _variable() -> Any:
    from transformers.utils.output_capturing import _active_collector  # noqa: PLC0415 (late)

    return _active_collector
