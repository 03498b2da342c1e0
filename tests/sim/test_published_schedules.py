"""The published bubbles come out of the published layer times, stages and rules.

``benchmarks/published_schedules.py`` reads them and prints the same figures as a table.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "published_schedules.py"
MODELS = ("qwen3-1.7b", "llama3.1-8b", "gpt-oss-20b", "qwen3-32b", "qwen3-235b-a22b")
# Two of the published figures let the head begin before its input has come: 13.98 and 6.67.
ROUND_ROBIN = dict(zip(MODELS, (19.07, 14.28, 15.02, 6.91, 3.29), strict=True))
BASELINES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("published_schedules", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def baseline(script) -> Callable[[str, str], tuple[float, float]]:
    """``baseline(row, model)``: bubbles with recompute behind its gradient and ahead of it."""
    return functools.cache(functools.partial(script.baseline_bubbles, script.figures()))


@pytest.mark.parametrize("model", MODELS)
def test_round_robin_in_two_rounds_has_the_published_bubble(script, model: str) -> None:
    found = script.round_robin_bubble(script.figures(), model)
    assert found == pytest.approx(ROUND_ROBIN[model], abs=0.05)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row", BASELINES)
def test_a_weight_bound_schedule_has_the_published_bubble(
    script, baseline, row: str, model: str
) -> None:
    rows = script.figures()["simulated_bubble_percent_8_gpus_16_microbatches"]
    waiting, ahead = baseline(row, model)
    assert waiting == pytest.approx(rows[row][rows["order"].index(model)], abs=0.1)
    assert ahead < waiting - 0.5


@pytest.mark.parametrize("model", MODELS)
def test_round_robin_leaves_less_idle_than_any_of_them_on_equal_terms(
    script, baseline, model: str
) -> None:
    ahead = [baseline(row, model)[1] for row in BASELINES]
    assert script.round_robin_bubble(script.figures(), model) < min(ahead)


def test_the_published_order_of_models_is_as_here(script) -> None:
    rows = script.figures()["simulated_bubble_percent_8_gpus_16_microbatches"]
    assert tuple(rows["order"]) == MODELS


def test_stages_are_read_as_they_are_written(script) -> None:
    assert script.counts([7, "head", 3]) == [7, 3]
    assert script.counts("2, 2, then 3 stages of 3") == [2, 2, 3, 3, 3]
    assert script.counts("head then 2 stages of 4") == [4, 4]
    assert script.counts("0, 2 of 1, 0") == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="not a number of layers: 'many'"):
        script.counts("2, many")
