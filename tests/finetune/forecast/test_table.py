"""The table of what a machine can train."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roundpipe.finetune.forecast.table import METHODS, MODELS, cell, model_table
from roundpipe.models.known import find_known
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from types import ModuleType


def test_every_model_of_the_table_is_well_known() -> None:
    assert all(find_known(name) is not None for name in MODELS)


def test_a_cell_says_how_long_and_how_fast(small: ModuleType) -> None:
    case = small.small_case(batch=16)
    found = cell(case)
    assert found.missing == ()
    assert found.longest == case.longest()
    assert found.tokens_per_second > 0


def test_a_cell_says_what_is_missing_and_with_that_it_would_fit(small: ModuleType) -> None:
    poor = small.small_case("2x3090,300MB")
    ((place, lacking),) = cell(poor).missing
    assert place == "host"
    host = replace(poor.machine.host, memory_bytes=poor.machine.host.memory_bytes + lacking)
    assert cell(replace(poor, machine=replace(poor.machine, host=host))).missing == ()


def test_a_cpu_lacks_host_memory_and_nothing_else(small: ModuleType) -> None:
    poor = small.small_case("2xcpu,300MB", dtype="fp32")
    assert [place for place, _ in cell(poor).missing] == ["host"]


@pytest.mark.slow  # all of the command's work
def test_the_table_has_a_row_a_model_and_a_column_a_method() -> None:
    begin = time.process_time()
    table = model_table(parse_machine("1x3060,32GB"))
    assert time.process_time() - begin < 10  # what the command may take in all
    assert [len(cells) for _, cells in table.rows] == [len(METHODS)] * len(MODELS)
    assert table.rows[0][0] == "SmolLM2-135M"
    values = table.as_values()
    assert values["models"][0]["fits"]
    assert not values["models"][-1]["fits"]
