"""Places for partial sums: as large as the plan counts, however many visits there are."""

from __future__ import annotations

import pytest

from roundpipe.plan.host_bytes import host_bytes


@pytest.mark.parametrize(
    ("count", "schedule"),
    [(1, {"rounds": 3}), (2, {"rounds": 3}), (3, {"replicas": (3, 3, 3)}), (2, {})],
    ids=str,
)
def test_the_engine_holds_what_the_plan_counts(rig, count, schedule):
    trainer = rig.trainer(["cpu"] * count, microbatches=3)
    trainer.use_schedule(**schedule)
    trainer.train(2)
    trainer.pipe.synchronize()
    chain, engine = trainer.pipe._chain, trainer.pipe._engine
    visits = chain._planner.training(chain._kind, 0).schedule.visits
    buffers = engine._partials.buffers
    planned = host_bytes(chain._planner.costs, visits).partial_sums
    assert sum(buffer.numel() for buffer in buffers.values()) == planned
    assert len(buffers) <= 2 * count
    assert bool(buffers) == bool(schedule)


def test_a_larger_program_makes_places_larger_and_a_smaller_one_keeps_them(rig):
    trainer = rig.trainer("cpu", microbatches=2)
    sizes = []
    for rounds in (1, 2, 1):
        trainer.use_schedule(rounds=rounds)
        trainer.pipe.synchronize()
        trainer.pipe._chain._last = None
        trainer.train(1)
        trainer.pipe.synchronize()
        sizes.append(sum(b.numel() for b in trainer.pipe._engine._partials.buffers.values()))
    assert sizes[0] == 0 < sizes[1] == sizes[2]
