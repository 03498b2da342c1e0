"""How many rows go to each microbatch of a batch, longest first.

A microbatch is as wide as its longest row, so neighbours in length belong together:

    dealt in order   5 tokens, 9    2, 8       2 × 9 + 2 × 8 = 34 tokens
    by length        9, 8           5, 2       2 × 9 + 2 × 5 = 28 tokens

Nor need each have as many rows: what counts is that microbatches take the same time and the largest
fits. The sum of their squared sizes is least where they are alike and little is padded. No torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_PLACES = 512  # at which a batch may be cut; with more rows, several are kept together
_MOST_CHOSEN = 64  # microbatches; more are cut evenly: choosing would take longer than it saves


def even_sizes(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Rows of each of ``count`` microbatches, as even as can be."""
    small, extra = divmod(len(lengths), count)
    return np.array([small + (at < extra) for at in range(count)], np.int64)


def best_sizes(lengths: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Rows of each of ``count`` microbatches, for at least as many rows of falling ``lengths``.

    The sum of squared tokens is the least of all cuts of which no microbatch is larger than the
    longest row times the rows of an even cut, by which memory is planned. Of more than 64
    microbatches the cut is even; of more than 512 rows neighbours stay together.

    Dynamic programming over the places where a batch may be cut: ``best[j]`` is the least cost of
    the rows before place j in so many microbatches.
    """
    if count > _MOST_CHOSEN:
        return even_sizes(lengths, count)
    num_rows = len(lengths)
    most = int(lengths[0]) * -(-num_rows // count)  # of an even cut's largest
    step = -(-num_rows // _MOST_PLACES)
    places = np.append(np.arange(0, num_rows, step), num_rows)
    rows = places[None, :] - places[:, None]  # of a microbatch from one place to another
    tokens = rows * np.append(lengths, 0)[places][:, None].astype(np.float64)
    costs = np.where((rows > 0) & (tokens <= most), tokens**2, np.inf)
    best, choices = costs[0], []
    for _ in range(count - 1):
        through = best[:, None] + costs
        choices.append(through.argmin(axis=0))
        best = through[choices[-1], np.arange(len(places))]
    if not np.isfinite(best[-1]):
        return even_sizes(lengths, count)
    cuts = [len(places) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return np.diff(places[[0, *reversed(cuts)]])
