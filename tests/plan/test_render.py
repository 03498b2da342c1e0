import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.render import render, render_svg
from roundpipe.plan.timeline import Span

THREE = Partition((range(2),), range(2, 3), (range(1, 2), range(1)))


@pytest.fixture
def staircase(costs_of):
    return round_robin(THREE, costs_of(3), devices=2, microbatches=3)


def test_a_schedule_is_a_staircase(staircase) -> None:
    assert render(staircase) == (
        "0.compute  F0.0 F0.1 F0.2 R2.0 B2.0 R2.1 B2.1 R2.2 B2.2\n"
        "1.compute       X1.0 X1.1 X1.2 R3.0 B3.0 R3.1 B3.1 R3.2 B3.2\n"
    )


def test_lengths_are_to_scale_and_what_is_too_long_goes_on_below(staircase) -> None:
    def seconds(action: Action) -> float:
        return {Op.FUSED: 3.0, Op.BACKWARD: 2.0}.get(action.op, 1.0)

    assert render(staircase, seconds=seconds, width=52) == (
        "0.compute  F0.0 F0.1 F0.2 R2.0 B2.0----- R2.1 B2.1--\n"
        "1.compute       X1.0---------- X1.1---------- X1.2--\n"
        "\n"
        "0.compute  --- R2.2 B2.2-----\n"
        "1.compute  -------- R3.0 B3.0----- R3.1 B3.1----- R3\n"
        "\n"
        "0.compute\n"
        "1.compute  .2 B3.2-----\n"
    )


def test_an_arrow_shows_where(staircase) -> None:
    assert render(staircase, arrow=Action.parse("X1.2")) == (
        "0.compute  F0.0 F0.1 F0.2 R2.0 B2.0 R2.1 B2.1 R2.2 B2.2\n"
        "1.compute       X1.0 X1.1 X1.2 R3.0 B3.0 R3.1 B3.1 R3.2 B3.2\n"
        "                          ^ X1.2\n"
    )


def test_an_arrow_at_a_transfer_adds_its_stream(small_chain) -> None:
    text = render(small_chain()[-1], arrow=Action.parse("U3#0"))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["0.compute", "1.compute", "1.weights", "^"]
    assert lines[-1].endswith("^ U3#0")


def test_only_the_lines_around_the_arrow_are_drawn(staircase) -> None:
    whole = render(staircase, width=40)
    part = render(staircase, width=40, arrow=Action.parse("B3.2"))
    assert whole.count("0.compute") > 1
    assert part.count("0.compute") == 1
    assert "B3.2" in part


def test_what_a_deadlock_stops_is_left_out(staircase) -> None:
    circle = {**staircase.waits, Action.parse("X1.1"): (Action.parse("B2.2"),)}
    text = render(replace(staircase, waits=circle))
    assert "X1.0" in text
    assert "X1.1" not in text


def test_nothing_is_drawn_of_nothing(staircase) -> None:
    assert render(replace(staircase, streams={"0.compute": ()})) == ""


def blocks(svg: str, kind: str) -> list[dict[str, str]]:
    found = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    return [rect.attrib for rect in found if kind in rect.attrib.get("class", "").split()]


def spans(*words: str) -> list[Span]:
    """``0.compute F0.0 0 2``: stream, action, start, end."""
    found = []
    for word in words:
        stream, action, start, end = word.split()
        found.append(Span(stream, Action.parse(action), float(start), float(end)))
    return found


def test_a_picture_has_a_block_for_each_span_to_scale() -> None:
    svg = render_svg(spans("0.compute F0.0 0 2", "1.compute X1.0 2 4", "0.weights U0#0 0 1"))
    one, two = blocks(svg, "work")
    (move,) = blocks(svg, "move")
    assert float(two["x"]) - float(one["x"]) == pytest.approx(float(one["width"]) + 1, abs=0.2)
    assert float(move["width"]) == pytest.approx(float(one["width"]) / 2, abs=1)
    assert one["fill"] != two["fill"]


def test_a_later_step_is_paler() -> None:
    svg = render_svg(spans("0.compute F0.0 0 1", "0.compute F0.0 2 3"))
    assert ["later" in block["class"] for block in blocks(svg, "work")] == [False, True]


def test_visits_are_named_by_their_layers(staircase) -> None:
    svg = render_svg(spans("0.compute F0.0 0 9", "1.compute X1.0 9 18"), visits=staircase.visits)
    assert ">layers 0–1<" in svg
    assert ">layer 2<" in svg


def test_a_picture_may_end_early() -> None:
    svg = render_svg(spans("0.compute F0.0 0 2", "0.compute F0.1 2 4"), until=1)
    assert len(blocks(svg, "work")) == 1


def test_a_picture_of_nothing_is_still_a_picture() -> None:
    assert ET.fromstring(render_svg([])).tag.endswith("svg")


def test_host_work_is_not_in_the_picture() -> None:
    svg = render_svg(spans("0.compute F0.0 0 2", "host S0 2 4"))
    assert len(blocks(svg, "work") + blocks(svg, "move")) == 1


def test_pictures_are_readable_on_dark_ground() -> None:
    assert "prefers-color-scheme: dark" in render_svg(spans("0.compute F0.0 0 2"))
