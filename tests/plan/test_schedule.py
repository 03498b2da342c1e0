import re
from dataclasses import replace
from pathlib import Path

import pytest

from roundpipe.plan.actions import Action
from roundpipe.plan.schedule import Phase, Visit


def test_a_visit_knows_what_it_runs_first_and_last() -> None:
    visit = Visit(3, 1, Phase.BACKWARD, range(2, 4), 0, (1, 2))
    assert list(map(str, visit.compute(1))) == ["R3.1", "B3.1"]
    assert (str(visit.first), str(visit.last)) == ("R3.1", "B3.2")
    assert visit.has_backward
    assert not replace(visit, phase=Phase.FORWARD).has_backward


def test_text_shows_each_action_with_its_waits(small_chain) -> None:
    lines = small_chain()[-1].text().splitlines()
    assert lines[-1] == "host: N2(O1#0) N1(O2#0) N0(O3#0) S0 S1 S2"
    assert lines[0].startswith("0.compute: F0.0(A0.0 U0#1) F0.1(A0.1) ")


def test_every_word_of_the_text_reads_back(small_chain) -> None:
    schedule = small_chain(staleness=1)[-1]
    words = [
        word
        for line in schedule.text().splitlines()
        for word in line.split(": ")[1].replace("(", " ").replace(")", " ").split()
    ]
    assert {Action.parse(word).of_this_step() for word in words} == set(schedule.order)


def test_what_leaves_a_device_is_known_once_routed(small_chain) -> None:
    schedule = small_chain()[-1]
    outs = [list(map(str, schedule.outs(visit, 1))) for visit in schedule.visits]
    assert outs == [["a0.1"], ["a1.1", "g1.1"], ["g2.1"], []]


def test_the_deal_goes_on_behind_the_last_visit(small_chain) -> None:
    assert small_chain(devices=3)[-1].next_start_device == 1
    assert small_chain(devices=2)[-1].next_start_device == 0


@pytest.mark.parametrize("name", ["schedule.md", "schedules.md"])
def test_a_design_page_shows_what_its_code_prints(capsys, name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / name).read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    exec(compile(code, name, "exec"), {})
    assert capsys.readouterr().out == shown
