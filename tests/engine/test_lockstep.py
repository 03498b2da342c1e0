"""Several microbatches run the same code and ask together."""

from __future__ import annotations

import threading

import pytest
import torch

from roundpipe.engine.lockstep import run_together


def noted(log):
    def serve(requests):
        log.append((requests[0].part, [request.args[0] for request in requests]))
        return [request.args[0] * 10 for request in requests]

    return serve


def test_all_that_ask_for_the_same_are_served_at_once_in_order():
    log = []

    def work(number):
        return lambda ask: ask(1, (ask(0, (number,), {}) + 1,), {})

    assert run_together([work(n) for n in range(3)], noted(log)) == [10, 110, 210]
    assert log == [(0, [0, 1, 2]), (1, [1, 11, 21])]


def test_who_goes_another_way_is_served_when_its_turn_comes():
    log = []
    works = [
        lambda ask: ask(0, (1,), {}),
        lambda ask: ask(1, (ask(0, (2,), {}),), {}),
        lambda ask: ask(0, (ask(1, (3,), {}),), {}),
        lambda _: "none",
    ]
    assert run_together(works, noted(log)) == [10, 200, 300, "none"]
    assert log == [(0, [1, 2]), (1, [20, 3]), (0, [30])]


def test_only_one_runs_at_a_time_in_order():
    log = []

    def work(number):
        def run(ask):
            for turn in range(3):
                log.append((turn, number))
                ask(turn, (0,), {})

        return run

    run_together([work(n) for n in range(3)], lambda requests: [None for _ in requests])
    assert log == [(turn, number) for turn in range(3) for number in range(3)]


@pytest.mark.parametrize("count", [1, 3])
def test_the_caller_s_modes_hold_and_its_own_are_told(count):
    found = []

    def work(ask):
        assert torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            return ask(0, (), {})

    def serve(requests):
        found.extend(request.has_grad for request in requests)
        return [torch.is_grad_enabled() for _ in requests]

    with torch.autocast("cpu"):
        assert run_together([work] * count, serve) == [count > 1] * count
    assert found == [False] * count


@pytest.mark.parametrize("failing", ["work", "serve", "interrupt"])
def test_a_failure_anywhere_ends_all_and_is_raised(failing):
    error = KeyboardInterrupt if failing == "interrupt" else ValueError
    ended = []

    def work(number):
        def run(ask):
            try:
                ask(0, (), {})
            finally:
                ended.append(number)
            if failing == "work" and number == 1:
                raise error("here")
            ask(1, (), {})

        return run

    def serve(requests):
        if failing != "work" and requests[0].part == 1:
            raise error("here")
        return [None for _ in requests]

    before = threading.active_count()
    with pytest.raises(error, match="here"):
        run_together([work(n) for n in range(3)], serve)
    assert sorted(ended) == [0, 1, 2]
    assert threading.active_count() == before


def test_code_that_catches_everything_ends_all_the_same():
    def work(ask):
        try:
            ask(0, (), {})
        except Exception:
            return "caught"

    def serve(_):
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        run_together([work, work], serve)


def test_each_graph_is_the_caller_s():
    weight = torch.ones(2, requires_grad=True)
    parts = run_together(
        [lambda ask, n=n: ask(0, (weight * n,), {}).sum() for n in range(3)],
        lambda requests: [request.args[0] * 2 for request in requests],
    )
    torch.stack(parts).sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 6.0))


def test_whoever_wants_no_gradient_is_served_apart():
    log = []

    def quiet(ask):
        with torch.no_grad():
            return ask(0, (2,), {})

    works = [lambda ask: ask(0, (1,), {}), quiet, lambda ask: ask(0, (3,), {})]
    assert run_together(works, noted(log)) == [10, 20, 30]
    assert log == [(0, [1, 3]), (0, [2])]
