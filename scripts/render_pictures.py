"""Write the pictures of docs/images from schedules. A test holds that they are up to date."""

from __future__ import annotations

from pathlib import Path

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import round_robin
from roundpipe.plan.partition import Partition
from roundpipe.plan.passes import Options, lower_chain
from roundpipe.plan.render import render_svg
from roundpipe.sim.simulate import compute_seconds, simulate

IMAGES = Path(__file__).parent.parent / "docs" / "images"
ACTIVATIONS = (Op.ACTIVATION_IN, Op.ACTIVATION_OUT, Op.GRADIENT_IN, Op.GRADIENT_OUT)
ACTIVATION_SECONDS = 0.2
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


def pictures() -> dict[str, str]:
    """Every picture by its file's name."""
    return {"round_robin.svg": round_robin_picture()}


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        (IMAGES / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
