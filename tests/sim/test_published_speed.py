"""Published speeds are predicted from published layer times, and from configs alone.

``benchmarks/published_speed.py`` and ``benchmarks/published_estimates.py`` print the same figures
as tables, with those that no bar is set for.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.partition import Partition

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Longest sequences of an offloader that runs the head at once, in thousand tokens.
WHOLE_HEAD = {"qwen3-1.7b": 9, "llama3.1-8b": 9, "qwen3-32b": 6}


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """Imports a benchmark by name; all of them are forgotten afterwards."""
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture(scope="module")
def speed(scripts) -> Any:
    return scripts("published_speed")


@pytest.fixture(scope="module")
def estimates(scripts) -> Any:
    return scripts("published_estimates")


@pytest.fixture(scope="module")
def verdict(speed) -> tuple[float, float, float]:
    found: tuple[float, float, float] = speed.verdict()
    return found


def chain(*layers: tuple[float, float]) -> Costs:
    """Layers of so many seconds forward and backward."""
    return Costs(
        tuple(
            LayerCost(forward_seconds=forward, backward_seconds=backward, gradient_bytes=4)
            for forward, backward in layers
        ),
        frozenset(range(len(layers))),
    )


def test_twelve_published_speeds_are_predicted_within_3_percent(verdict) -> None:
    assert verdict[0] <= 3.0


def test_the_prediction_beats_a_fraction_of_the_ceiling_that_was_fitted(verdict) -> None:
    ours, _, constant = verdict
    assert ours < constant - 0.2


def test_the_best_fraction_is_the_best_of_a_fine_grid(speed) -> None:
    ceilings, speeds = [10.0, 20.0, 40.0, 80.0], [9.9, 18.0, 37.0, 76.0]
    fraction, error = speed.best_fraction(ceilings, speeds)

    def of(constant: float) -> float:
        pairs = zip(ceilings, speeds, strict=True)
        return sum(abs(constant * most / each - 1) for most, each in pairs) / 4 * 100

    assert error == pytest.approx(of(fraction))
    assert error <= min(of(constant / 1e4) for constant in range(8000, 11000)) + 1e-9


def test_a_job_has_the_published_microbatches(speed) -> None:
    job = speed.Job.of("llama3.1-8b", 8)
    assert (job.sequences, job.microbatches, job.rounds, job.tokens) == (256, 10, 2, 256 * 2048)
    assert job.growth == pytest.approx(12.8 / 4)
    setting = job.setting()
    assert setting.microbatches == 20
    assert setting.costs.layers[1].forward_seconds == pytest.approx(0.01850370313 * 3.2)
    # The ceiling is the published one: layer times add up, whatever the size of microbatches.
    assert speed.ceiling(job) == pytest.approx(25066, abs=1)


def test_the_objective_takes_shorter_stages_where_more_devices_wait_at_the_ramp(speed) -> None:
    costs = chain(*[(2.0, 3.0)] * 25)
    few = speed.by_objective(costs, 1, 2)
    many = speed.by_objective(costs, 8, 2)
    assert few.fused == many.fused == range(24, 25)
    assert few.num_stages < many.num_stages
    assert speed.longest_stage(costs, few) > speed.longest_stage(costs, many)


def test_the_longest_stage_counts_backward_only_where_it_runs(speed) -> None:
    costs = chain((5.0, 1.0), (1.0, 3.0), (2.0, 2.5))
    forward, fused = (range(2),), range(2, 3)
    assert speed.longest_stage(costs, Partition(forward, fused, (range(1, 2), range(1)))) == 6.0
    assert speed.longest_stage(costs, Partition(forward, fused, (range(2),))) == 10.0


def test_synchronous_steps_are_slower_and_end_with_all_updates(speed) -> None:
    job = speed.Job.of("qwen3-1.7b", 8)
    found, updates = speed.synchronous(job)
    assert updates > 0
    assert found < speed.tokens_per_second(job)
    assert found == pytest.approx(56489, rel=0.1)


def test_each_thing_that_is_known_makes_it_slower_not_faster(speed) -> None:
    job = speed.Job.of("qwen3-1.7b", 8)
    *known, _published = speed.mechanisms(job, full=False).values()
    assert all(later <= earlier * 1.0005 for earlier, later in itertools.pairwise(known))
    assert known[-1] < 0.98 * known[0]


def test_python_of_experts_bounds_what_eight_devices_reach(speed) -> None:
    largest = speed.Job.of("qwen3-235b-a22b", 8)
    bound = speed.most_by_python(largest, speed.python_of_forward(largest.name))
    assert bound == pytest.approx(largest.speed, rel=0.15)
    small = speed.Job.of("gpt-oss-20b", 8)
    fixed = speed.fixed_seconds(speed.Job.of(small.name, 1))
    assert small.speed < speed.most_by_python(small, fixed) < 1.15 * small.speed


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-32b"])
def test_speeds_from_a_config_alone_are_within_20_percent(estimates, name: str) -> None:
    of = estimates.estimated(estimates.counted(name), length=2048, sequences=4)
    for job, found in estimates.speeds(name, of):
        assert found == pytest.approx(job.speed, rel=0.2)


@pytest.mark.parametrize("name", WHOLE_HEAD)
def test_the_longest_sequence_under_a_whole_head_is_what_others_reach(estimates, name: str) -> None:
    limit = 24 * 10**9
    found = estimates.longest(estimates.counted(name), limit, head="whole")
    assert found == pytest.approx(WHOLE_HEAD[name], abs=1)


@pytest.mark.parametrize("name", WHOLE_HEAD)
def test_the_longest_sequence_with_a_head_in_pieces_is_near_the_published(
    estimates, name: str
) -> None:
    given = estimates.published()["max_sequence_length_k_tokens_8x4090"]
    published = dict(zip(given["order"], given["roundpipe"], strict=True))[name]
    found = estimates.longest(estimates.counted(name), 24 * 10**9, head="pieces")
    assert found == pytest.approx(published, rel=0.25)


@pytest.mark.accept
def test_report_speeds_and_lengths(scripts, capsys) -> None:
    for name in ("published_speed", "published_estimates"):
        script = scripts(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name])
            assert script.main() == 0
        with capsys.disabled():
            sys.stdout.write(capsys.readouterr().out)
