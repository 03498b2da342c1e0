"""Whether a model keeps packed samples apart: seen on the model itself, before the first step.

Most models of transformers build a mask from position ids that begin again; some have no positions
(ALiBi), some carry a state from token to token (convolutions, linear attention) that no mask stops,
and nothing in a config says which. So a few tokens are run through the wrapped model:

    row 0    A A A A B B B B      two samples
    row 1    a a a a B B B B      another first sample
    row 2    A A A A B B B B      the same tokens as row 0, as one sample
    alone    B B B B

B must come out the same in rows 0 and 1, bit for bit where no kernel sums in another order, and the
same alone. How far B in row 2 is from B alone tells what a sample that is seen does to it: rounding
is far below that, a leak is not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import ConfigError, RoundPipeError

if TYPE_CHECKING:
    from torch import Tensor

    from roundpipe.roundpipe import RoundPipe

_LENGTH = 12  # tokens of a sample: more than the kernel of any convolution between tokens
_LEAK = 0.01  # of what seeing A does to B
_MOVE = 0.05  # the same of B alone, whose sums run in another order
_ROUNDINGS = 2  # of the largest logit: what is below is nothing, also where A does nothing to B


def check_packing(pipe: RoundPipe, *, vocabulary: int) -> None:
    """Raise ConfigError, naming the model, unless packed samples cannot see each other.

    ``vocabulary``: how many tokens the model knows. Runs two small forwards without gradient and
    blocks until they are done; no random state and no weight is changed.
    """
    name = _name_of(pipe.model)
    was_training = pipe.training
    pipe.eval()
    try:
        rows, alone = _logits(pipe, vocabulary)
    except (RoundPipeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"{name} takes no packed samples: {why}\nhint: packing=false") from error
    finally:
        pipe.train(was_training)
    first, other, unpacked = rows.unbind()
    seen = _distance(unpacked, alone)  # what A does to B where B sees it
    seen = seen if math.isfinite(seen) else 0.0
    largest = float(torch.where(first.isfinite(), first.abs(), 0.0).max())
    rounding = _ROUNDINGS * torch.finfo(_dtype_of(pipe)).eps * largest
    if (leak := _distance(first, other)) > max(rounding, _LEAK * seen):
        raise ConfigError(
            f"{name} mixes packed samples: changing one moves logits of the next by {leak:.2g}, "
            f"where seeing it whole moves them by {seen:.2g}\nhint: packing=false"
        )
    if (moved := _distance(first, alone)) > max(rounding, _MOVE * seen):
        raise ConfigError(
            f"{name} reads a packed sample otherwise than one alone: logits differ by {moved:.2g}"
            "\nhint: packing=false"
        )


def _logits(pipe: RoundPipe, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Logits of B in the three rows, [3, tokens, vocabulary], and of B alone, both fp32."""
    # From the middle: what has a meaning of its own stands at the ends of a vocabulary.
    low, high = vocabulary // 8, max(vocabulary // 2, vocabulary // 8 + 2)
    drawn = np.random.RandomState(0).randint(low, high, (3, _LENGTH))
    a, b = torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1])
    # Every token another one, so that also the last before B differs.
    changed = low + (a - low + 1 + torch.from_numpy(drawn[2]) % (high - low - 1)) % (high - low)
    once = torch.arange(_LENGTH)
    packed, whole = torch.cat([once, once]), torch.arange(2 * _LENGTH)
    rows = _run(
        pipe,
        torch.stack([torch.cat([a, b]), torch.cat([changed, b]), torch.cat([a, b])]),
        torch.stack([packed, packed, whole]),
    )
    return rows[:, _LENGTH:], _run(pipe, b[None], once[None])[0]


def _run(pipe: RoundPipe, input_ids: Tensor, position_ids: Tensor) -> Tensor:
    config = RoundPipeRunConfig(requires_grad=False, num_microbatch=1, output_device="cpu")
    with torch.no_grad():
        outputs = pipe(input_ids=input_ids, position_ids=position_ids, roundpipe_run_config=config)
    logits: Tensor = outputs.logits
    return logits.float()


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where there is a number in one only."""
    same = one == other  # also what is -inf in both, as logits that are never wanted
    apart = torch.where(same, 0.0, (one - other).abs())
    return float(apart.nan_to_num(nan=math.inf).max())


def _dtype_of(pipe: RoundPipe) -> torch.dtype:
    """The coarsest of the model's floating dtypes."""
    dtypes = {p.dtype for p in pipe.model.parameters() if p.is_floating_point()}
    return max(dtypes or {torch.float32}, key=lambda dtype: torch.finfo(dtype).eps)


def _name_of(model: Any) -> str:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(base).__name__
