from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.schedule import Phase, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline
from roundpipe.report.figures import bytes_words, seconds_words, stage_figures, stream_figures
from roundpipe.report.looks import LOOKS, layer_words, place_words, stream_order, stream_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from roundpipe.report.timeline_record import TimelineRecord


def test_a_stage_takes_the_median_of_each_kind_of_work() -> None:
    visits = (
        Visit(0, 0, Phase.FORWARD, range(3), 0, (0, 1, 2)),
        Visit(1, 1, Phase.BACKWARD, range(1, 3), 1, (0, 1)),
        Visit(2, 1, Phase.BACKWARD, range(1, 3), 0, (2,)),
    )
    at = [("0", "F0.0", 1.0), ("0", "F0.1", 2.0), ("0", "F0.2", 9.0)]
    at += [("1", "R1.0", 1.0), ("1", "B1.0", 4.0), ("0", "R2.2", 1.0), ("0", "B2.2", 6.0)]
    spans = tuple(
        Span(f"{device}.compute", Action.parse(text), 1.0, 1.0 + seconds)
        for device, text, seconds in at
    )
    spans += (Span("0.weights", Action.parse("U0#0"), 0.0, 100.0),)
    old = StepSpans(0, (Visit(0, 0, Phase.FUSED, range(3), 0, (0,)),), spans[:1])
    timeline = Timeline((old, StepSpans(1, visits, spans)))
    forward, backward = stage_figures(timeline)  # what was cut in another way is left out
    assert (forward.name, forward.layers, forward.devices) == ("0 · forward", "layers 0–2", "0")
    assert forward.seconds == {Op.FORWARD: pytest.approx(2.0)}
    assert (backward.name, backward.devices) == ("1 · backward", "0, 1")
    assert backward.seconds == {Op.RECOMPUTE: pytest.approx(1.0), Op.BACKWARD: pytest.approx(5.0)}
    assert backward.total == pytest.approx(6.0)


def test_a_streams_share_is_of_the_whole_time(record_of: Callable[..., TimelineRecord]) -> None:
    timeline = record_of(devices=2).timeline
    figures = stream_figures(timeline)
    assert [figure.stream for figure in figures[:5]] == [
        "compute",
        "activations up",
        "activations down",
        "weights up",
        "gradients down",
    ]
    assert figures[-1].place == "host"
    assert sum(figure.actions for figure in figures) == len(timeline.spans)
    length = max(s.end for s in timeline.spans) - min(s.start for s in timeline.spans)
    for figure in figures:
        assert figure.share == pytest.approx(figure.seconds / length)
    assert stream_figures(Timeline(())) == []


def test_every_kind_of_action_has_a_look_of_its_own() -> None:
    assert set(LOOKS) == set(Op)
    assert len({look.words for look in LOOKS.values()}) == len(Op)
    assert len({look.light for look in LOOKS.values()}) == len(Op)
    assert len({look.dark for look in LOOKS.values()}) == len(Op)


def test_streams_are_shown_by_device_compute_first_and_the_host_last() -> None:
    names = ["host", "10.compute", "2.weights", "2.compute", "sums", "2.memory", "2.new_one"]
    assert sorted(names, key=stream_order) == [
        *("2.compute", "2.weights", "2.memory", "2.new_one", "10.compute", "sums", "host")
    ]
    assert stream_words("2.new_one") == "new one"


def test_places_and_layers_are_named_as_far_as_names_are_known() -> None:
    timeline = Timeline((), devices=("cuda:0",), layers=("a", "b"))
    assert place_words("0", timeline) == "device 0 (cuda:0)"
    assert place_words("7", timeline) == "device 7"
    assert layer_words(range(2), timeline) == "layers 0–1 (a to b)"
    assert layer_words(range(1, 2), timeline) == "layer 1 (b)"
    assert layer_words(range(1, 9), timeline) == "layers 1–8"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0.00 µs"), (2.5e-5, "25.0 µs"), (0.0381, "38.1 ms"), (1.25, "1.25 s"), (3600, "3,600 s")],
)
def test_seconds_have_three_digits_and_a_unit(seconds: float, words: str) -> None:
    assert seconds_words(seconds) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (698_400, "698 kB"), (19.1e9, "19.1 GB"), (1.4e12, "1.4 TB")],
)
def test_sizes_have_decimal_units(size: float, words: str) -> None:
    assert bytes_words(size) == words
