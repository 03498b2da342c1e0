"""What is said of generating before it begins: by arithmetic, and beside what really goes up."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from tests.engine.generating_cases import made, prompts, uploaded, within

from roundpipe import RoundPipe
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.probe import Probe
from roundpipe.engine import generation
from roundpipe.engine.outlook import Outlook, Part, outlook
from roundpipe.finetune.output.rate import outlook_line, rate_text
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.machine_text import parse_machine

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]

CARD = Card(name="card", memory_bytes=24 * 10**9, flops={"bf16": 100e12}, bandwidth=1e12)
LINK = Link(up=25e9, down=25e9)


def seen(*, kept: int, streamed: int, rows: int = 1, **more: Any) -> Outlook:
    """A model of blocks of 1 GB and 1 GB outside of them, on a card with 1 TB/s."""
    block = Part(10**9, 1e9, rows * 1e9)
    return Outlook(
        device="cuda:0",
        place=torch.device("cpu"),
        rows=rows,
        outside=block,
        kept=[block] * kept,
        streamed=[block] * streamed,
        cache_bytes=0,
        **{"card": CARD, "link": LINK, "flops": 100e12, **more},
    )


def test_resident_weights_are_read_once_for_a_token_whatever_the_number_of_prompts() -> None:
    one, many = seen(kept=31, streamed=0), seen(kept=31, streamed=0, rows=8)
    assert one.seconds_per_token == pytest.approx(32e-3)
    assert many.tokens_per_second == pytest.approx(8 / 32e-3)
    assert outlook_line(one, many) == (
        "resident on cuda:0: 32 GB read per token at 1 TB/s: about 31 tokens/s, 250 with 8 prompts "
        "at a time (estimate)"
    )


def test_streamed_blocks_take_the_link_and_many_prompts_share_them() -> None:
    one, many = seen(kept=9, streamed=23), seen(kept=9, streamed=23, rows=8)
    assert one.bytes_per_token == 23 * 10**9
    assert one.seconds_per_token == pytest.approx(23 / 25)  # computing hides behind it
    assert outlook_line(one, many) == (
        "streamed to cuda:0: 9 of 32 blocks stay, 23 GB per token over a link of 25 GB/s: "
        "about 1.1 tokens/s, 8.7 with 8 prompts at a time (estimate)"
    )


def test_what_stays_is_computed_while_no_more_than_one_block_comes_up() -> None:
    slow = Card(name="slow", memory_bytes=1, flops={}, bandwidth=25e9)  # reads as the link brings
    found = seen(kept=9, streamed=2, card=slow).seconds_per_token
    assert found == pytest.approx((1 + 1 + 10) / 25)


def test_many_prompts_are_bound_by_arithmetic_in_the_end() -> None:
    found = seen(kept=31, streamed=0, rows=1000).seconds_per_token
    assert found == pytest.approx(32 * 1000 * 1e9 / 100e12)


def test_small_models_are_bound_by_the_host_that_issues() -> None:
    block = Part(1000, 1e3, 1e3)
    small = Outlook("cuda:0", torch.device("cpu"), 1, block, [block] * 30, [], 0, CARD, LINK)
    assert small.seconds_per_token == pytest.approx(30 * 0.36e-3 + 1e-3)


def test_without_a_known_machine_no_rate_is_said() -> None:
    found = seen(kept=2, streamed=1, card=None, link=None)
    assert found.tokens_per_second is None
    assert outlook_line(found, found) == ("streamed to cuda:0: 2 of 3 blocks stay, 1 GB per token")


def test_rates_have_the_digits_that_mean_something() -> None:
    assert list(map(rate_text, (1234.5, 52.3, 9.96, 0.214))) == ["1,234", "52", "10", "0.21"]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral", "GPT2"])
def test_what_is_said_to_stay_and_to_come_up_is_what_does(name: str) -> None:
    model = made(name)
    given = prompts()
    new = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with RoundPipe(model, devices="cpu") as pipe:
        whole = pipe.generation_outlook(3, 7, 6)
        outside = whole.outside.num_bytes
        work = generation.work_bytes(model, (), {**given, **new})
        block = whole.kept[0].num_bytes
        for blocks, kept in ((4, 4), (3, 1), (2, 0)):
            room = outside + work + blocks * block
            found = outlook(pipe._engine, None, rows=3, prompt=7, new_tokens=6, device_bytes=room)
            assert (len(found.kept), len(found.streamed)) == (kept, 4 - kept)
            before = uploaded(pipe)
            within(pipe, room, **given, **new)
            expected = outside + kept * block + 6 * found.bytes_per_token
            over = 0 if found.is_resident else block  # for a token that was not asked for
            assert uploaded(pipe) - before == expected + over


def test_an_embedding_is_not_read_and_of_experts_those_that_are_used() -> None:
    with RoundPipe(made("Llama"), devices="cpu") as pipe:
        found = pipe.generation_outlook(1, 7, 6)
    table = 96 * 32 * 4
    assert found.outside.num_bytes - found.outside.read == table
    with RoundPipe(made("Mixtral"), devices="cpu") as pipe:
        one, many = (pipe.generation_outlook(rows, 7, 6).kept[0] for rows in (1, 2))
    experts = 4 * 3 * 32 * 48 * 4
    assert one.num_bytes - one.read == experts / 2  # two of four
    assert many.read == many.num_bytes


def test_a_machine_that_is_given_is_what_counts() -> None:
    machine = parse_machine("4090,64GB")
    with RoundPipe(made("Llama"), devices="cpu*2") as pipe:
        found = pipe.generation_outlook(1, 7, 6, machine)
    assert found.card == machine.cards[0]


@pytest.mark.accept
@pytest.mark.parametrize("limit", [None, 30 * 10**6])
def test_the_forecast_is_of_the_size_of_what_is_measured(limit: int | None) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    model = made("Llama", **sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
    device = CpuDevice()
    rates = Probe(device).link(pinned=False)
    bandwidth = Probe(device).bandwidth()
    machine = Machine(
        cards=(Card(name="cpu", memory_bytes=10**10, flops={}, bandwidth=bandwidth, in_host=True),),
        links=(Link(up=rates.up, down=rates.down),),
        host=Host(memory_bytes=10**10, bandwidth=bandwidth),
    )
    ids = torch.randint(3, 96, (1, 8))
    with RoundPipe(model, devices=[device]) as pipe:
        found = outlook(pipe._engine, machine, rows=1, prompt=8, new_tokens=24, device_bytes=limit)
        assert found.is_resident == (limit is None)

        def seconds(new: int) -> float:
            began = time.perf_counter()
            within(pipe, limit, ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            return time.perf_counter() - began

        seconds(2)
        measured = statistics.median((seconds(32) - seconds(8)) / 24 for _ in range(3))
    assert found.seconds_per_token is not None
    assert 1 / 4 < measured / found.seconds_per_token < 4
