"""Steps of a plan played action by action: why they take so long, and pictures of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundpipe.durable import write_text
from roundpipe.errors import ConfigError
from roundpipe.plan.actions import Op
from roundpipe.plan.amounts import write_bytes
from roundpipe.plan.passes import Options, outline
from roundpipe.plan.timeline import Timeline
from roundpipe.report.forecast import Reasons
from roundpipe.report.forecast_text import number, seconds_text
from roundpipe.report.page import Table, page
from roundpipe.report.timeline_record import TimelineRecord, shortened
from roundpipe.report.trace import trace_text
from roundpipe.sim.memory import memory_over_time
from roundpipe.sim.score import computation
from roundpipe.sim.simulate import simulate_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from roundpipe.finetune.forecast.forecast import Found
    from roundpipe.finetune.forecast.speed import Speed
    from roundpipe.plan.timeline import Span
    from roundpipe.sim.simulate import Simulation

_STEPS = 3  # the first fills the pipeline
_MOST_SPANS = 20_000  # that a page moves smoothly


@dataclass(frozen=True)
class Played:
    """``record`` holds the steps; ``critical`` is what the end of the last one waited for."""

    found: Found
    record: TimelineRecord
    critical: tuple[Span, ...]


def played(found: Found) -> Played:
    """Play the steps of a plan. Takes a second or a few; the plan must fit the devices."""
    speed = found.speed
    assert speed is not None
    setting = speed.setting
    options = Options(costs=setting.costs, staleness=setting.staleness, eager=setting.eager)
    chain = outline(computation(setting, speed.plan.candidate), options, steps=_STEPS)
    simulation = simulate_machine(chain, setting.prices, setting.machine, hop_seconds=setting.hop)
    timeline = Timeline.of(
        chain,
        simulation.spans,
        devices=[card.name for card in speed.case.machine.cards],
        layers=[layer.name for layer in speed.case.profile.layers],
    )
    record = shortened(TimelineRecord(found.forecast.title, timeline), _MOST_SPANS)
    always = speed.host.total - speed.host.saved_inputs
    memory = memory_over_time(record.timeline.steps, setting.costs, host_bytes=always)
    record = replace(record, counters=memory)
    critical = tuple(simulation.critical_path(most=_MOST_SPANS))
    reasons = Reasons(
        ceiling=speed.case.batch_size * speed.case.job.length / setting.even_seconds,
        idle=_idle(simulation, speed),
        critical=_kinds(critical),
    )
    return Played(
        replace(found, forecast=replace(found.forecast, reasons=reasons)), record, critical
    )


def _idle(simulation: Simulation, speed: Speed) -> dict[str, float]:
    idle = simulation.idle
    seconds = {
        "transfers": idle.transfer,
        "the optimizer and sums on the host": idle.optimizer,
        "other stages": idle.dependency,
        "Python": idle.python,
    }
    total = sum(seconds.values())
    scale = (1 - speed.busy) / total if total else 0.0  # of a step in the middle of a chain
    return {name: share * scale for name, share in seconds.items()}


_KIND = {
    Op.FORWARD: "forward",
    Op.FUSED: "fused stage",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD: "backward",
    Op.UPDATE: "optimizer",
    Op.PUBLISH: "optimizer",
    Op.NORM: "optimizer",
    Op.MERGE: "sums of gradients",
}


def _kinds(path: Iterable[Span]) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in path:
        seconds[_KIND.get(span.action.op, "transfers")] += span.end - span.start
    whole = sum(seconds.values())
    return {name: each / whole for name, each in seconds.items()} if whole else {}


def write_files(
    steps: Played, *, trace: Path | None, html: Path | None, say: Callable[[str], None]
) -> None:
    """Write what was asked for and say so. Raises ConfigError where a file cannot be written."""
    if trace is not None:
        _write(trace, trace_text(steps.record), "--trace")
        say(f"wrote {trace}: open it at ui.perfetto.dev or chrome://tracing")
    if html is not None:
        _write(html, page_text(steps), "--html")
        say(f"wrote {html}: open it in a browser")


def page_text(steps: Played) -> str:
    """The page of a plan: what it needs, how fast it is, the steps, memory over time."""
    made, speed = steps.found.forecast, steps.found.speed
    assert speed is not None
    assert made.pace is not None
    needs = Table(
        "What it needs",
        ("place", "needs", "has", "fits", "largest part"),
        [
            (
                need.name,
                write_bytes(need.needs),
                "?" if need.has is None else write_bytes(need.has),
                "?" if need.has is None else "yes" if need.fits else "no",
                need.largest,
            )
            for need in made.needs
        ],
    )
    compared = [(made.pace.schedule, made.pace.step_seconds), *made.pace.alternatives]
    tokens = made.pace.tokens_per_second * made.pace.step_seconds
    schedules = Table(
        "Schedules compared",
        ("schedule", "seconds per step", "tokens per second"),
        [(n.replace("_", "-"), seconds_text(s), number(tokens / s)) for n, s in compared],
    )
    record = steps.record
    limits = {
        f"{device}.memory": float(card.memory_bytes)
        for device, card in enumerate(speed.case.machine.cards)
    }
    limits["host.memory"] = float(speed.case.machine.host.memory_bytes)
    shown = set(record.timeline.spans)
    return page(
        record,
        lines=[
            f"{number(made.pace.tokens_per_second)} tokens/s · "
            f"{seconds_text(made.pace.step_seconds)} per step · busy {made.pace.busy:.0%} · "
            f"bound by {made.pace.bound}",
            "calculated, not measured: the steps as the plan has them on this machine",
        ],
        tables=[needs, schedules],
        limits={name: size for name, size in limits.items() if name in record.counters},
        critical=[span for span in steps.critical if span in shown],
    )


def _write(path: Path, text: str, option: str) -> None:
    try:
        write_text(path, text)
    except (OSError, ValueError) as error:  # ValueError: a path that names no file
        reason = (getattr(error, "strerror", None) or "names no file").lower()
        raise ConfigError(f"cannot write: {path}: {reason}\nhint: {option} ANOTHER") from error
