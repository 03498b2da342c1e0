from __future__ import annotations

import json
import math

from roundpipe.finetune.run.best import Best


def test_the_lowest_loss_is_the_best_and_what_follows_is_counted() -> None:
    best = Best()
    losses = [math.inf, 3.0, 2.0, 2.5, 2.0, 1.0, math.nan]
    assert [best.add(step, loss) for step, loss in enumerate(losses, start=-1)] == [
        False,  # a number, but none that JSON has
        True,
        True,
        False,
        False,  # no better
        True,
        False,
    ]
    assert (best.step, best.loss, best.num_worse) == (4, 1.0, 1)


def test_patience_is_counted_in_evaluations() -> None:
    best = Best()
    best.add(1, 1.0)
    for step in (2, 3):
        best.add(step, 2.0)
    assert best.is_given_up(2)
    assert not best.is_given_up(3)
    assert not best.is_given_up(None)


def test_it_goes_through_json() -> None:
    best, other = Best(), Best()
    for step, loss in enumerate([3.0, math.nan, 4.0]):
        best.add(step, loss)
    other.restore(json.loads(json.dumps(best.state())))
    assert other == best
