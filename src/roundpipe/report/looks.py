"""How pictures and traces show each kind of action and stream: one word, one colour, one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.plan.actions import OF_LAYERS, Action, Op

if TYPE_CHECKING:
    from roundpipe.plan.timeline import StepSpans, Timeline

HOST = "host"  # the place of streams that belong to no device


@dataclass(frozen=True)
class Look:
    """``light`` and ``dark`` are the colours on such a ground; ``trace`` is a trace viewer's name
    of a colour: viewers know a fixed set of them."""

    words: str
    light: str
    dark: str
    trace: str


LOOKS = {
    Op.FORWARD: Look("forward", "#4078c8", "#5b97e6", "thread_state_runnable"),
    Op.FUSED: Look("forward, loss and backward", "#7d56bd", "#a07ce0", "rail_animation"),
    Op.RECOMPUTE: Look("recompute", "#b87a14", "#cf9330", "yellow"),
    Op.BACKWARD: Look("backward", "#cd5a3e", "#e27a5c", "terrible"),
    Op.UPLOAD: Look("weights up", "#3f8c83", "#5bb0a5", "thread_state_running"),
    Op.DOWNLOAD: Look("gradients down", "#a34c78", "#c9719d", "bad"),
    Op.ACTIVATION_IN: Look("activations up", "#7990a8", "#8fa6be", "generic_work"),
    Op.ACTIVATION_OUT: Look("activations or loss down", "#6f84b4", "#8b9fd0", "generic_work"),
    Op.GRADIENT_IN: Look("boundary gradient up", "#b08a72", "#c4a08a", "thread_state_iowait"),
    Op.GRADIENT_OUT: Look("boundary gradient down", "#9c8178", "#b79c93", "thread_state_iowait"),
    Op.MERGE: Look("sum of partial gradients", "#7f8a36", "#a5b052", "olive"),
    Op.NORM: Look("gradient norm", "#8c8c52", "#adad72", "grey"),
    Op.UPDATE: Look("optimizer update", "#2f9159", "#4fb87c", "good"),
    Op.PUBLISH: Look("publishing of weights", "#5da581", "#7cc7a0", "cq_build_passed"),
}

_STREAMS = {
    "compute": "compute",
    "activations_up": "activations up",
    "activations_down": "activations down",
    "weights": "weights up",
    "gradients": "gradients down",
    "sums": "sums of gradients",
    HOST: "updates",
    "memory": "memory",
}
_ORDER = list(_STREAMS)


def place_of(stream: str) -> str:
    """``"0"`` for ``0.compute``, ``"host"`` for what runs or lies on the host."""
    device, dot, _ = stream.partition(".")
    return device if dot and device.isdecimal() else HOST


def kind_of(stream: str) -> str:
    """``compute`` of ``0.compute``; the name itself where there is no place before it."""
    return stream.rpartition(".")[2]


def stream_words(stream: str) -> str:
    """What people call a stream, without its place."""
    kind = kind_of(stream)
    return _STREAMS.get(kind, kind.replace("_", " "))


def stream_order(stream: str) -> tuple[bool, int, int, str]:
    """Sorts devices by number, compute first on each, then the host."""
    place, kind = place_of(stream), kind_of(stream)
    at = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    return (place == HOST, int(place) if place != HOST else 0, at, stream)


def place_words(place: str, timeline: Timeline) -> str:
    """What people call a device: its number and name."""
    if place == HOST:
        return HOST
    names = timeline.devices
    name = names[int(place)] if int(place) < len(names) else ""
    return f"device {place} ({name})" if name else f"device {place}"


def layer_words(layers: range, timeline: Timeline) -> str:
    """``layer 3`` or ``layers 0-11``, by name where the names are known."""
    ends = [layers[0], layers[-1]] if len(layers) > 1 else [layers[0]]
    numbers = "–".join(str(end) for end in ends)
    named = [timeline.layers[end] for end in ends if end < len(timeline.layers)]
    names = f" ({' to '.join(named)})" if len(named) == len(ends) else ""
    return f"layer{'s' * (len(ends) > 1)} {numbers}{names}"


def layers_of(action: Action, step: StepSpans) -> range:
    """The layers an action is about."""
    if action.op in OF_LAYERS:
        return range(action.index, action.index + 1)
    return step.visits[action.index].layers
