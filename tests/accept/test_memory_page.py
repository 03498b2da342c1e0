"""The table of docs/memory.md is what `roundpipe plan` says of each of its rows."""

from __future__ import annotations

import json
import re

import pytest
from tests.pages import ROOT

pytestmark = pytest.mark.accept

ROW = re.compile(
    r"^\| (Qwen3-\d+B), (full|LoRA|QLoRA)(?:, `(\S+)`)? \| (\S+) \| ([\d.]+) \| ([\d.]+) \| "
    r"([\d,]+) \| ([\d,]+) \|$",
    re.MULTILINE,
)
ROWS = ROW.findall((ROOT / "docs" / "memory.md").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:4]))
def test_a_row_of_the_table_is_planned(
    row: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from roundpipe.cli import main

    model, method, more, machine, device, host, speed, longest = row
    words = [f"model=Qwen/{model}", f"method={method.lower()}", f"machine={machine}", "--json"]
    words += [more] if more else []
    words += ["batch_size=128"] if machine.startswith("8x") else []
    assert main(["plan", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    in_host = plan["bytes"]["pinned_host"] + plan["bytes"]["pageable_host"]
    assert plan["bytes"]["device"] / 1e9 == pytest.approx(float(device), rel=0.02)
    assert in_host / 1e9 == pytest.approx(float(host), rel=0.02)
    assert plan["tokens_per_second"] == pytest.approx(float(speed.replace(",", "")), rel=0.02)
    assert plan["max_length"] == pytest.approx(int(longest.replace(",", "")), rel=0.01)


def test_the_table_has_rows() -> None:
    assert len(ROWS) == 7
