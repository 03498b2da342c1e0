"""Balanced stages: `ModelExecutePlan.auto` over wrapped models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from roundpipe import ConfigError, ModelExecutePlan, PlanError, RoundPipe, RoundPipeRunConfig
from roundpipe.models.ghost import ghost_chain
from roundpipe.optim import AdamW
from roundpipe.plan.costs import Costs, LayerCost

MB = 10**6
BLOCK = LayerCost(
    forward_seconds=0.010,
    backward_seconds=0.022,
    weight_bytes=200 * MB,
    gradient_bytes=400 * MB,
)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def batch():
    return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))


def pipes(*sizes):
    return [RoundPipe(ghost_chain(Costs((BLOCK,) * n, frozenset(range(n)))),
                      devices="emulated:4x4090,512GB,time_scale=0") for n in sizes]  # fmt: skip


@pytest.fixture
def two_pipes():
    made = pipes(8, 3)
    yield made
    for pipe in made:
        pipe.close()


def covers(stages, layers):
    return [layer for stage in stages for layer in stage] == list(layers)


def test_balanced_stages_cover_what_their_kind_of_run_runs(two_pipes):
    pipe, _ = two_pipes
    infer = ModelExecutePlan.auto("infer", pipe)
    assert covers(infer.fwd_plan, range(8))
    assert infer.bwd_plan == []
    train = ModelExecutePlan.auto("train", pipe)
    assert covers(train.fwd_plan, range(8))
    assert covers(train.bwd_plan[::-1], range(8))
    fused = ModelExecutePlan.auto("fused", pipe)
    top = fused.bwd_plan[0].start
    assert covers(fused.fwd_plan, range(top))
    assert covers(fused.bwd_plan[::-1], range(8))
    # A layer forward and backward takes 0.032 s: three of them forward take no longer.
    assert {len(stage) for stage in train.bwd_plan} == {1}
    assert max(len(stage) for stage in train.fwd_plan) == 3


def test_several_models_are_cut_at_one_limit(two_pipes):
    plans = ModelExecutePlan.auto("infer", *two_pipes, upper_threshold=3.0, min_stages=1)
    assert [len(plan.fwd_plan) for plan in plans] == [3, 1]
    finer = ModelExecutePlan.auto("infer", *two_pipes, upper_threshold=3.0, min_stages=5)
    assert sum(len(plan.fwd_plan) for plan in finer) >= 5
    few = ModelExecutePlan.auto("infer", *two_pipes, upper_threshold=3.0, min_stages=99)
    assert sum(len(plan.fwd_plan) for plan in few) == 11  # no more layers than there are


def test_half_of_the_memory_is_for_the_stage_that_comes_next(two_pipes):
    pipe, _ = two_pipes
    loose = ModelExecutePlan.auto("infer", pipe, upper_threshold=8.0, min_stages=1)
    assert len(loose.fwd_plan) == 1
    tight = ModelExecutePlan.auto(
        "infer", pipe, upper_threshold=8.0, min_stages=1, model_memory_limit=0.8
    )
    assert max(len(stage) for stage in tight.fwd_plan) == 2  # 2 * 2 * 200 MB


def test_balanced_stages_run():
    with RoundPipe(chain(), devices="cpu*2") as pipe:
        optimizer = AdamW(pipe.optim_parameters(), lr=1e-2)
        plan = ModelExecutePlan.auto("fused", pipe)
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
        x, y = batch()
        pipe.forward_backward((x,), label=y, loss_fn=mse_loss, run_config=config)
        pipe.step(optimizer)
        assert pipe.plan.partition.fused == plan.bwd_plan[0]
        infer = RoundPipeRunConfig(execute_plan=ModelExecutePlan.auto("infer", pipe))
        with torch.no_grad():
            assert torch.equal(pipe(x, roundpipe_run_config=infer), pipe(x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("both",), {}, "run_type must be 'infer', 'train' or 'fused': 'both'"),
        (("infer",), {}, "no model to plan for"),
        (("infer", nn.Linear(2, 2)), {}, "not a wrapped model: Linear\nhint: RoundPipe"),
        (("infer", None), {"upper_threshold": 0.5}, "upper_threshold must be at least 1: 0.5"),
        (("infer", None), {"min_stages": 0}, "min_stages must be at least 1: 0"),
        (("infer", None), {"model_memory_limit": 0}, "model_memory_limit must be above 0: 0"),
    ],
)
def test_what_cannot_be_balanced_is_refused(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        ModelExecutePlan.auto(*arguments, **options)


def test_stages_by_hand_that_miss_a_layer_are_refused():
    with RoundPipe(chain(), devices="cpu") as pipe:
        config = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(3)], [range(4, 6)]))
        with torch.no_grad(), pytest.raises(PlanError, match="cover layers 0 to 6"):
            pipe(batch()[0], roundpipe_run_config=config)


def test_stages_may_grow_from_one_step_to_the_next_with_the_same_bits():
    """What a device computes with moves to larger memory: nothing goes on reading the old.

    Ten visits, so that layer 0 begins the second step where it began the first.
    """
    small = ([range(2), *(range(at, at + 1) for at in (2, 3, 4))],
             [range(at, at + 1) for at in (5, 4, 3, 2, 1, 0)])  # fmt: skip
    large = ([range(3)], [range(3, 6), range(3)])
    found = []
    for stages in ((small, large), (large, large)):
        with RoundPipe(chain(), devices="cpu") as pipe:
            optimizer = AdamW(pipe.optim_parameters(), lr=0.1)
            for forward, backward in stages:
                plan = ModelExecutePlan()
                plan.fwd_plan, plan.bwd_plan = forward, backward
                config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=2)
                pipe.forward_backward(
                    (batch(),), label=-batch(), loss_fn=mse_loss, run_config=config
                )
                pipe.step(optimizer)
            found.append({name: value.clone() for name, value in pipe.state_dict().items()})
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())
