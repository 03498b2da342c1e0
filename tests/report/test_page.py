"""The page, as text and in a real browser."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import matplotlib.image
import numpy as np
import pytest

from roundpipe.plan.timeline import Span, Timeline
from roundpipe.report.figures import stream_figures
from roundpipe.report.looks import LOOKS
from roundpipe.report.page import Table, page
from roundpipe.report.timeline_record import TimelineRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    RecordOf = Callable[..., TimelineRecord]

HOSTILE = (
    "a model</script><script>window.broken = 1</script><!-- <img src=x onerror=alert(1)>\u2028\"'&"
)
TABLES = [Table("What it needs <b>", ("", "needs"), [("gpu & host", "19.1 GB")])]


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each kind of element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def test_the_page_loads_nothing_and_runs_only_its_own_script(record_of: RecordOf) -> None:
    text = page(record_of(title=HOSTILE), lines=[HOSTILE], tables=TABLES)
    elements = Elements(text)
    names = [name for name, _ in elements.tags]
    assert names.count("script") == 2
    assert names.count("style") == 1
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(names)
    for name, attributes in elements.tags:
        assert not {"src", "href", "style"} & set(attributes), name
        assert not [key for key in attributes if key.startswith("on")], name
    assert not re.search(r"url\(|@import|https?://", text)
    policy = next(
        attributes["content"]
        for name, attributes in elements.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_a_name_with_a_tag_stays_a_name(record_of: RecordOf) -> None:
    record = record_of(title=HOSTILE)
    named = Timeline(record.timeline.steps, devices=(HOSTILE,) * 2, layers=(HOSTILE,) * 6)
    tables = [Table(HOSTILE, (HOSTILE,), [(HOSTILE,)])]
    text = page(TimelineRecord(HOSTILE, named, record.counters), tables=tables)
    elements = Elements(text)
    assert elements.texts["h1"] == elements.texts["title"] == [HOSTILE]
    assert HOSTILE in elements.texts["td"]
    assert [name for name, _ in elements.tags].count("script") == 2
    data = json.loads(elements.texts["script"][0])
    assert data["places"][0]["name"] == f"device 0 ({HOSTILE})"


def test_words_come_before_the_picture_and_say_the_same(record_of: RecordOf) -> None:
    record = record_of()
    text = page(record, tables=TABLES, limits={"0.memory": 24e9})
    assert text.index("What it needs") < text.index('id="stages"') < text.index("<canvas")
    elements = Elements(text)
    cells = elements.texts["td"]
    assert "device 0 (a card)" in cells
    assert "layers 2–4 (block 2 to block 4)" in cells
    assert "24.0 GB" in cells
    canvas = next(attributes for name, attributes in elements.tags if name == "canvas")
    assert canvas["role"] == "img"
    assert f"{len(record.timeline.spans):,} actions" in (canvas["aria-label"] or "")
    for name, attributes in elements.tags:
        if name == "svg":
            assert attributes["aria-label"]


def test_a_page_without_a_timeline_has_its_tables_and_no_picture() -> None:
    text = page(TimelineRecord("nothing ran", Timeline(())), tables=TABLES)
    assert "<canvas" not in text
    assert "What it needs &lt;b&gt;" in text


# ---- in a browser

CANVAS = "document.getElementById('timeline')"


def written(record: TimelineRecord, folder: Path, **more: Any) -> Path:
    path = folder / "page.html"
    path.write_text(page(record, **more), encoding="utf-8")
    return path


def dataset(browser: Any) -> dict[str, float]:
    found = browser.evaluate(f"JSON.stringify({CANVAS}.dataset)")
    return {name: float(value) for name, value in json.loads(found).items()}


def box(browser: Any) -> tuple[float, float, float, float]:
    """Left, top, width and height of the picture, brought into the window."""
    browser.evaluate(f"{CANVAS}.scrollIntoView()")
    browser.frame()
    found = browser.evaluate(
        f"(r => [r.left, r.top, r.width, r.height])({CANVAS}.getBoundingClientRect())"
    )
    return (found[0], found[1], found[2], found[3])


def pixels(browser: Any) -> np.ndarray[Any, Any]:
    """The picture as bytes, without names and legend: rows, columns, red green blue."""
    left, top, width, height = (round(value) for value in box(browser))
    image = matplotlib.image.imread(io.BytesIO(browser.picture()), format="png")
    names = 96 if width < 600 else 150
    shown = image[max(top, 0) : top + height, left + 1 + names : left + width - 1, :3]
    return np.asarray(np.round(shown * 255), dtype=np.uint8)


def count_of(colour: str, shown: np.ndarray[Any, Any]) -> int:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return int((shown == [red, green, blue]).all(axis=-1).sum())


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_timeline_is_drawn(
    browser: Any, record_of: RecordOf, tmp_path: Path, dark: bool
) -> None:
    record = record_of(title=HOSTILE, steps=1)
    browser.open(written(record, tmp_path, tables=TABLES, lines=[HOSTILE]), dark=dark)
    drawn = dataset(browser)
    assert drawn["drawn"] == len(record.timeline.spans)
    assert drawn["lanes"] == len({span.stream for span in record.timeline.spans})
    assert drawn["seconds"] == pytest.approx(record.end - record.begin)
    assert browser.evaluate("window.broken === undefined && document.scripts.length === 2")
    assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE
    shown = pixels(browser)
    for op in {span.action.op for span in record.timeline.spans}:
        look = LOOKS[op]
        assert count_of(look.dark if dark else look.light, shown) > 20, look.words
    assert browser.complaints == []


@pytest.mark.slow
def test_wheel_and_mouse_zoom_pan_and_show_what_is_under_them(
    browser: Any, record_of: RecordOf, tmp_path: Path
) -> None:
    record = record_of(steps=2)
    browser.open(written(record, tmp_path))
    whole = dataset(browser)["seconds"]
    left, top, width, _ = box(browser)
    first = next(s for s in record.timeline.spans if s.stream == "0.compute")
    visit = record.timeline.steps[0].visits[first.action.index]
    share = ((first.start + first.end) / 2 - record.begin) / (record.end - record.begin)
    x, y = left + 151 + (width - 152) * share, top + 40 + 21 + 10  # in the first compute lane
    browser.mouse("mouseMoved", x, y)
    tip = browser.evaluate("document.getElementById('tip').textContent").split("\n")
    assert not browser.evaluate("document.getElementById('tip').hidden")
    assert tip[0].startswith(f"{first.action} · ")
    assert tip[1].startswith(f"stage {visit.stage} · {visit.phase.value} · layer")
    assert tip[2] == "step 4 · microbatch 0"
    assert tip[3] == "device 0 (a card) · compute"
    assert tip[4].startswith("20 ms from ")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-60, modifiers=2)
    near = dataset(browser)
    assert near["seconds"] < 0.7 * whole
    assert near["drawn"] < len(record.timeline.spans)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=60, modifiers=2)
    assert dataset(browser)["seconds"] == pytest.approx(whole)
    assert stops_the_page(browser, ctrlKey=True)  # else the browser would zoom the whole page
    assert not stops_the_page(browser, ctrlKey=False)  # the page scrolls
    browser.evaluate("document.getElementById('closer').click()")
    browser.frame()
    middle = dataset(browser)
    browser.mouse("mousePressed", x + 300, y, button="left", buttons=1)
    browser.mouse("mouseMoved", x + 900, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 900, y, button="left")
    moved = dataset(browser)
    assert moved["seconds"] == pytest.approx(middle["seconds"])
    assert moved["drawn"] != middle["drawn"]
    browser.evaluate(f"{CANVAS}.focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="0", text="0")
    browser.frame()
    assert dataset(browser)["seconds"] == pytest.approx(whole)
    assert browser.complaints == []


def stops_the_page(browser: Any, **keys: bool) -> Any:
    """Whether the picture takes a turn of the wheel for itself."""
    event = f"new WheelEvent('wheel', {json.dumps({'deltaY': 1, 'cancelable': True, **keys})})"
    return browser.evaluate(f"(e => ({CANVAS}.dispatchEvent(e), e.defaultPrevented))({event})")


@pytest.mark.slow
def test_the_critical_path_is_brought_out(
    browser: Any, record_of: RecordOf, tmp_path: Path
) -> None:
    record = record_of(steps=1)
    path = [s for s in record.timeline.spans if str(s.action) == "X2.0"]
    browser.open(written(record, tmp_path, critical=path))
    colour = LOOKS[path[0].action.op].light
    before = count_of(colour, pixels(browser))
    browser.evaluate("document.getElementById('critical').click()")
    browser.frame()
    assert 0 < count_of(colour, pixels(browser)) < before / 2  # one microbatch of three
    assert browser.complaints == []


def repeated(record: TimelineRecord, times: int) -> TimelineRecord:
    """The same steps again and again, one after the other."""
    length = record.end - record.begin
    steps = tuple(
        replace(step, spans=tuple(later(span, length * again) for span in step.spans))
        for again in range(times)
        for step in record.timeline.steps
    )
    return TimelineRecord("long", replace(record.timeline, steps=steps))


def later(span: Span, seconds: float) -> Span:
    return Span(span.stream, span.action, span.start + seconds, span.end + seconds)


@pytest.mark.slow
def test_twenty_thousand_spans_are_drawn_on_a_small_window(
    browser: Any, record_of: RecordOf, tmp_path: Path
) -> None:
    record = repeated(record_of(devices=4, microbatches=16, steps=2), 30)
    assert len(record.timeline.spans) > 20_000
    browser.open(written(record, tmp_path), width=390, height=800)
    assert dataset(browser)["drawn"] == len(record.timeline.spans)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    lane = pixels(browser)[40 + 21 + 13]  # a step is five pixels wide, most actions less than one
    covered = (lane != (0xEC, 0xEF, 0xF3)).any(axis=-1).mean()
    busy = stream_figures(record.timeline)[0].share
    assert busy <= covered < 1
    for key in ("+", "+", "ArrowRight", "-"):
        browser.evaluate(f"{CANVAS}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        browser.frame()
    assert dataset(browser)["drawn"] < len(record.timeline.spans)
    assert browser.complaints == []


@pytest.mark.slow
def test_a_browser_tells_what_a_page_does_wrong(browser: Any, tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    good = page(TimelineRecord("broken", Timeline(())))
    broken = tmp_path / "broken.html"
    broken.write_text(good.replace("<main>", "<main><script>window.ran = 1</script>"))
    browser.open(broken)
    assert browser.evaluate("window.ran === undefined")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)
    browser.evaluate("setTimeout(() => { throw Error('late') }); undefined")
    browser.frame()
    assert any("late" in complaint for complaint in browser.complaints)
