"""A device that runs out of memory: the step is dropped whole and made again in smaller pieces.

The engine drops it: no weight, moment or buffer has changed, and the device's memory is back where
it was. Then each microbatch is cut in two, down to one row each, and the step is given again. Its
gradients are the same sums over the same tokens, so the weights are those of a run that had used as
many microbatches from that step on: equal to what they would have been but for the order of sums
(and for what is drawn per microbatch: dropout, noise). At staleness 1 the step that is given again
reads the newest weights, as the first step of a run does: those it read before may be overwritten.
The number stays for all later steps, and goes into checkpoints, so that a run that is gone on with
does not fail first.

A loop does::

    try:
        make_step(step)
    except RoundPipeError as error:      # of this step, or of the one before that was under way
        if not lost_memory(error): raise
        splitting.halve(error, rows)     # raises where rows cannot be cut
        pipe.plan_again()             # for microbatches of another size
        ...                              # and gives the first step again that has not committed
"""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.engine.microbatch import DEFAULT_NUM_MICROBATCH
from roundpipe.errors import DeviceError, NoRoomError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_NO_ROOM = (torch.OutOfMemoryError, NoRoomError)
_HINT = "hint: recompute_grain=layer, or a smaller max_length"


def lost_memory(error: BaseException) -> bool:
    """Whether a device's memory did not suffice, for what ran or for what was to be planned."""
    return any(isinstance(each, _NO_ROOM) for each in _causes(error))


class Splitting:
    """Into how many microbatches steps are cut; doubled whenever that was too few.

    ``num_microbatch``: what the config says; None: the engine's usual number.
    """

    def __init__(self, num_microbatch: int | None = None, factor: int = 1) -> None:
        self._given, self.factor = num_microbatch, factor

    def count(self, num_rows: int) -> int | None:
        """Microbatches of a step of so many rows; None: nobody has said, the engine's number."""
        if self.factor == 1:
            return self._given
        return self.times(self._given, num_rows)

    def count_of_size(self, num_rows: int, size: int) -> int:
        """The same where a microbatch is to have ``size`` rows."""
        return min(num_rows, -(-num_rows // size) * self.factor)

    def times(self, count: int | None, num_rows: int) -> int:
        """So many times ``count``, and no more than there are rows."""
        return max(1, min(num_rows, min(num_rows, count or DEFAULT_NUM_MICROBATCH) * self.factor))

    def halve(
        self,
        error: BaseException,
        num_rows: int,
        *,
        count: int | None = None,
        say: Callable[[str], None] = lambda _: None,
        what: str = "step",
    ) -> None:
        """Cut all microbatches in two from now on, and say so.

        ``num_rows``: of the step that failed; ``count``: its microbatches, where these are not
        `count`'s. Lets go of what ``error`` keeps alive: the tensors of every frame it came
        through. Raises DeviceError, with what was needed and what there was, where each microbatch
        has one row already.
        """
        before = self.times(self._given, num_rows) if count is None else count
        reason = _reason(error)
        _let_go(error)
        if before >= num_rows:
            raise DeviceError(
                f"a device's memory does not suffice for one row: {reason}\n{_HINT}"
            ) from error
        self.factor *= 2
        after = min(num_rows, 2 * before)
        say(
            f"out of device memory: the {what} is made again with {after} microbatches in place of "
            f"{before} ({reason})"
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"factor": self.factor}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint kept."""
        self.factor = int(state.get("factor", 1))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, what that came from, …"""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str:
    """What was asked for and what there was, in the words of whoever ran out of it."""
    found = [e for e in _causes(error) if isinstance(e, _NO_ROOM)]
    text = str(found[-1] if found else error).partition("\nhint:")[0]
    # what follows in the allocator's own text is advice for its tuning
    text = re.split(r"(?<=\.) (?:Of the allocated|If reserved|See documentation)", text)[0]
    return " ".join(text.split())


def _let_go(error: BaseException) -> None:
    """Clear the frames that an error holds: their tensors are device memory."""
    for each in _causes(error):
        if each.__traceback__ is not None:
            traceback.clear_frames(each.__traceback__)
