"""Write the pictures of docs/images from schedules. A test holds that they are up to date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.plan.actions import COMPUTE, Action, Op
from roundpipe.plan.baselines import gpipe, one_f_one_b
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition, front
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.render import render_svg
from roundpipe.plan.uneven import UnevenDevices, uneven_front
from roundpipe.sim.simulate import bubble, compute_seconds, makespan, simulate

if TYPE_CHECKING:
    from roundpipe.plan.schedule import Schedule
    from roundpipe.plan.timeline import Span

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ACTIVATIONS = (Op.ACTIVATION_IN, Op.ACTIVATION_OUT, Op.GRADIENT_IN, Op.GRADIENT_OUT)
ACTIVATION_SECONDS = 0.2
UPDATE_SECONDS = 2.0  # of one layer, on the host
LAYER_SECONDS = 0.6  # one layer's weights up or gradients down


def round_robin_picture() -> str:
    """Two devices, unequal cuts forward and backward, a fused stage, two steps."""
    layer = LayerCost(forward_seconds=1, backward_seconds=2, gradient_bytes=1)
    costs = Costs((layer,) * 4, frozenset(range(4)))
    partition = Partition((range(3),), range(3, 4), (range(2, 3), range(1, 2), range(1)))
    computation = round_robin(partition, costs, devices=2, microbatches=3, start_device=1)
    chain = lower_chain(computation, Options(costs=costs, staleness=1), steps=2)
    compute = compute_seconds(computation, costs)

    def seconds(action: Action) -> float:
        if action.op in (Op.UPLOAD, Op.DOWNLOAD):
            num_layers = len(computation.visits[action.index].layers)
            return LAYER_SECONDS * num_layers
        return ACTIVATION_SECONDS if action.op in ACTIVATIONS else compute(action)

    caption = "4 layers in 5 stages · 3 microbatches, numbered · two steps, no flush (staleness 1)"
    return render_svg(simulate(chain, seconds), visits=computation.visits, caption=caption)


def _decoder(layers: int) -> Costs:
    """So many equal layers."""
    layer = LayerCost(forward_seconds=1, backward_seconds=2, gradient_bytes=1)
    return Costs((layer,) * layers, frozenset(range(layers)))


def schedule_pictures() -> dict[str, str]:
    """One step of eight layers on four devices, four microbatches, by three schedules; one scale.

    Round-robin with the partition that is quickest; the two others can cut in one way only.
    """
    costs, sizes = _decoder(8), {"devices": 4, "microbatches": 4}
    quarters = tuple(range(layer, layer + 2) for layer in range(0, 8, 2))
    dealt = [round_robin(partition, costs, **sizes) for partition in front(costs)]
    steps = {
        "gpipe": ("GPipe", gpipe(quarters, costs, **sizes)),
        "one_f_one_b": ("1F1B", one_f_one_b(quarters, costs, **sizes)),
        "dealt": ("round-robin", min(dealt, key=lambda step: makespan(_played(step, costs)))),
    }
    spans = {name: _played(step, costs) for name, (_, step) in steps.items()}
    longest = max(makespan(each) for each in spans.values())
    drawn = {}
    for name, (title, step) in steps.items():
        idle = 100 * bubble(spans[name])
        caption = f"{title} · 8 layers, 4 microbatches, 4 devices · {idle:.0f} % of the time idle"
        drawn[f"{name}.svg"] = render_svg(
            spans[name], visits=step.visits, until=longest, caption=caption
        )
    return drawn


def _played(step: Schedule, costs: Costs) -> list[Span]:
    """What is computed when, if nothing has to be moved."""
    return simulate(step, compute_seconds(step, costs))


def uneven_picture() -> str:
    """A device twice as fast as the other gets stages twice as long; what is moved is left out."""
    costs, speeds = _decoder(12), (2.0, 1.0)

    def at_speed(step: Schedule) -> list[Span]:
        seconds = compute_seconds(step, costs)
        return simulate(
            step, lambda action: seconds(action) / speeds[step.visits[action.index].device]
        )

    steps = [
        round_robin(partition, costs, devices=2, microbatches=4, speeds=speeds)
        for partition in uneven_front(UnevenDevices(costs, speeds))
    ]
    step = min(steps, key=lambda each: makespan(at_speed(each)))
    spans = at_speed(step)
    caption = (
        "12 layers, 4 microbatches · device 0 is twice as fast as device 1 · "
        f"{100 * bubble(spans):.0f} % of the time idle"
    )
    return render_svg(spans, visits=step.visits, caption=caption)


def staleness_pictures() -> dict[str, str]:
    """Two steps, with updates: exact, and with weights of one step before; one scale."""
    costs = _decoder(4)
    partition = Partition((range(3),), range(3, 4), (range(2, 3), range(1, 2), range(1)))
    drawn, spans = {}, {}
    step = round_robin(partition, costs, devices=2, microbatches=3, start_device=1)
    compute = compute_seconds(step, costs)

    def seconds(action: Action) -> float:
        if action.op is Op.UPDATE:
            return UPDATE_SECONDS
        return LAYER_SECONDS if action.op in (Op.UPLOAD, Op.DOWNLOAD) else compute(action)

    for staleness in (0, 1):
        options = Options(costs=costs, staleness=staleness)
        spans[staleness] = simulate(lower_chain(step, options, steps=2), seconds)
    end = max(makespan([s for s in each if s.action.op in COMPUTE]) for each in spans.values())
    words = {0: "the next step waits for each layer's update", 1: "the next step does not wait"}
    for staleness, each in spans.items():
        drawn[f"staleness_{staleness}.svg"] = render_svg(
            each,
            visits=step.visits,
            until=end,
            caption=f"staleness {staleness}: {words[staleness]} · updates on the host take time",
        )
    return drawn


def pictures() -> dict[str, str]:
    """Every picture by its file's name."""
    return {
        "round_robin.svg": round_robin_picture(),
        **schedule_pictures(),
        "uneven.svg": uneven_picture(),
        **staleness_pictures(),
    }


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
