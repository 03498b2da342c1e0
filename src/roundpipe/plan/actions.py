"""What a schedule is made of: one thing done once, as data.

An action is written ``[-]<op><index>[.<microbatch>][#<chunk>]``. The index is a visit for what
devices do and a layer for what the optimizer does: ``F3.1`` runs the forward of visit 3 on
microbatch 1, ``U3#2`` uploads chunk 2 of its weights, ``S12`` updates layer 12. A leading minus, in
waits only, names the action of the step before: ``-S12``. The text is the same in logs, traces,
errors and golden files.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field


class Op(enum.Enum):
    """What an action does. Lower case goes out of a device, upper case comes in or computes."""

    UPLOAD = "U"  # weights of a visit, host -> device
    FORWARD = "F"
    FUSED = "X"  # forward, loss and backward at once
    RECOMPUTE = "R"  # forward again, with gradient, from the saved input
    BACKWARD = "B"
    ACTIVATION_IN = "A"  # boundary activation, host -> device
    ACTIVATION_OUT = "a"  # boundary activations, or the loss of a fused visit, device -> host
    GRADIENT_IN = "G"  # gradient of a boundary, host -> device
    GRADIENT_OUT = "g"  # gradient of a boundary, device -> host
    DOWNLOAD = "O"  # gradients of a visit's parameters, device -> host
    MERGE = "M"  # add up partial gradients, of which a visit brought the last, on the host
    NORM = "N"  # norm of a layer's gradient, on the host
    UPDATE = "S"  # optimizer update of a layer, on the host
    PUBLISH = "P"  # master weights -> working weights of a layer, on the host


COMPUTE = frozenset({Op.FORWARD, Op.FUSED, Op.RECOMPUTE, Op.BACKWARD})
OF_LAYERS = frozenset({Op.NORM, Op.UPDATE, Op.PUBLISH})

_TEXT = re.compile(r"(-?)([UFXRBAaGgOMNSP])(\d+)(?:\.(\d+))?(?:#(\d+))?")


def is_action(text: str) -> bool:
    """Whether ``Action.parse`` can read ``text``."""
    return _TEXT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do; ``index`` is a visit, or a layer for the ops in ``OF_LAYERS``."""

    op: Op
    index: int
    microbatch: int | None = None
    chunk: int | None = None
    before: bool = False  # of the step before; in waits only
    _hash: int = field(init=False, repr=False, compare=False)  # actions are keys everywhere

    def __post_init__(self) -> None:
        microbatch = -1 if self.microbatch is None else self.microbatch
        chunk = -1 if self.chunk is None else self.chunk
        # Of ints alone: the same in every process, so sets of actions have one order everywhere.
        key = (ord(self.op.value), self.index, microbatch, chunk, self.before)
        object.__setattr__(self, "_hash", hash(key))

    def __str__(self) -> str:
        minus = "-" if self.before else ""
        microbatch = "" if self.microbatch is None else f".{self.microbatch}"
        chunk = "" if self.chunk is None else f"#{self.chunk}"
        return f"{minus}{self.op.value}{self.index}{microbatch}{chunk}"

    def __hash__(self) -> int:
        return self._hash

    def of_step_before(self) -> Action:
        """The same action, one step earlier."""
        return Action(self.op, self.index, self.microbatch, self.chunk, before=True)

    def of_this_step(self) -> Action:
        """The same action without its minus."""
        if not self.before:
            return self
        return Action(self.op, self.index, self.microbatch, self.chunk)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form back: ``Action.parse(str(a)) == a``. Raises ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}, expected e.g. 'F3.1', 'U3#2' or '-S12'")
        minus, op, index, microbatch, chunk = match.groups()
        return cls(
            Op(op),
            int(index),
            None if microbatch is None else int(microbatch),
            None if chunk is None else int(chunk),
            before=bool(minus),
        )
