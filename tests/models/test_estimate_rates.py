"""Times from counts: the roofline, and published times of layers on one RTX 4090."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from roundpipe.models.estimate import Efficiency, Job, Lora, Method, costs, profile
from roundpipe.models.estimate.amount import Amount
from roundpipe.models.estimate.profile import Pass, Work
from roundpipe.models.estimate.rates import DEFAULT, Arithmetic, seconds
from roundpipe.plan.cards import card_named
from roundpipe.plan.machine import Card

PUBLISHED = json.loads(
    (Path(__file__).parents[1] / "reference" / "published.json").read_text(encoding="utf-8")
)["layer_times_ms_one_4090"]
JOB = Job(dtype="fp16", fp16_accumulation=True, length=2048, microbatch_size=4)
CARD = Card(name="x", memory_bytes=1, flops={"fp16": 1e12, "fp16_fp16": 2e12}, bandwidth=1e9)
FREE = Efficiency(fp16_fp16=1.0, traffic=1.0, kernel_seconds=0.0)


def published_card():
    return card_named("4090").at_work()


def block_times(name, method="full", given=DEFAULT, *, fuse=False):
    """Milliseconds of a block in the middle, forward and backward."""
    found = costs(profile(name, method, fuse=fuse), published_card(), JOB, given)
    layer = found.layers[len(found.layers) // 2]
    return 1e3 * layer.forward_seconds, 1e3 * layer.backward_seconds


def one(sort, *, flops=0.0, moved=0.0, kernels=1):
    return Pass({sort: Work(Amount(fixed=flops), Amount(fixed=moved), kernels)})


def time_of(run, given=FREE, dtype="fp16"):
    return seconds(
        run, CARD, Arithmetic.of(dtype, fp16_accumulation=dtype == "fp16"), (1, 1), given
    )


def test_the_larger_of_arithmetic_and_traffic_counts():
    assert time_of(one("matrix", flops=4e12, moved=1e9)) == 2.0
    assert time_of(one("matrix", flops=4e12, moved=3e9)) == 3.0


def test_attention_and_experts_add_up_in_fp32_whatever_products_do():
    assert time_of(one("attention", flops=4e12)) == 4.0
    assert time_of(one("experts", flops=4e12)) == 4.0
    assert time_of(one("thin", flops=4e12)) == 2.0


def test_a_kernel_costs_something_however_little_it_does():
    given = Efficiency(kernel_seconds=5e-6)
    assert time_of(one("pointwise", kernels=100), given) == pytest.approx(5e-4)


def test_two_numbers_are_fitted_to_the_two_times_of_a_block_of_8b():
    ours = block_times("llama3.1-8b")
    assert ours[0] == pytest.approx(PUBLISHED["llama3.1-8b"]["forward"], rel=0.005)
    assert ours[1] == pytest.approx(PUBLISHED["llama3.1-8b"]["backward"], rel=0.005)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-32b"])
def test_fitted_on_8b_alone_other_dense_models_are_within_20_percent(name):
    forward, backward = block_times(name)
    assert forward == pytest.approx(PUBLISHED[name]["forward"], rel=0.2)
    assert backward == pytest.approx(PUBLISHED[name]["backward"], rel=0.2)


@pytest.mark.accept
def test_report_all_published_times():
    """20B and 235B are reported: their code ran experts one by one, here they are grouped."""
    methods = {"qwen3-235b-a22b": Method(name="lora", lora=Lora(r=32))}
    for name, published in PUBLISHED.items():
        if not isinstance(published, dict):
            continue
        ours = block_times(name, methods.get(name, "full"), fuse=name == "gpt-oss-20b")
        for what, time in zip(("forward", "backward"), ours, strict=True):
            off = time / published[what] - 1
            line = f"{name} {what}: {time:.1f} ms, published {published[what]:.1f} ({off:+.0%})"
            sys.stdout.write(line + "\n")
            assert abs(off) < 0.5
