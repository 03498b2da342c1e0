"""What the planner chooses for the published models, as a share of the zero-bubble ceiling.

Conditions: published layer times, 8 devices of 24 GB, 25 GB/s a link (13 each way when both run),
150 GB/s of host memory shared by uploads, downloads, sums of partial gradients and an optimizer
that moves 28 bytes a parameter. A chain of 20 steps, measured between the ends of steps 5 and 15.
The ceiling recomputes every decoder layer. ``python benchmarks/planner_choice.py [--quick]``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.sim.score import Setting, play
from roundpipe.sim.search import choose

PUBLISHED = Path(__file__).parents[1] / "tests" / "reference" / "published.json"
SAMPLES, LORA_RANK = 4, 32  # sequences of a microbatch
STEPS, FROM, TO = 20, 5, 15
SPEEDS = (0.98, 1.02, 1.0, 0.99, 1.01, 0.98, 1.02, 1.0)
BARS = {  # row -> % of the ceiling, in the order of the models
    "staleness 1, 16 microbatches, eager": (99.5,) * 5,
    "exact, published batch, clipping": (99, 98.5, 79, 98.5, 98),
    "exact, published batch, eager": (99, 98.5, 95, 98.5, 98.5),
    "exact, 16 microbatches, eager": (97.5, 96.5, 88, 98, 98.5),
    "exact, 16 microbatches, clipping": (92.5, 83.5, 60, 87, 98),
}


def published() -> dict:
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def costs_of(name: str, *, embedding: bool = False, partials: int = 32) -> tuple[Costs, float]:
    """Costs of decoder layers and head by their published times, and the seconds of a hop."""
    data = published()
    model, times = data["models"][name], data["layer_times_ms_one_4090"][name]
    tokens, hidden = SAMPLES * data["setup"]["sequence_length"], model["hidden"]
    query, key = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    attention = 2 * hidden * query + 2 * hidden * key
    router = model["experts"] * hidden if model["experts"] > 1 else 0
    block = attention + 3 * hidden * model["intermediate"] * model["experts"] + router
    is_lora = data["setup"]["method"][name] != "full"
    adapters = LORA_RANK * (2 * (hidden + query) + 2 * (hidden + key))

    def layer(kind: str, parameters: int, trained: int, kept: int) -> LayerCost:
        prefix = "" if kind == "block" else "head_"
        seconds = 0.0 if kind == "embedding" else 1e-3
        return LayerCost(
            forward_seconds=times[f"{prefix}forward"] * seconds,
            backward_seconds=times[f"{prefix}backward"] * seconds,
            weight_bytes=2 * parameters,
            gradient_bytes=partials // 8 * trained,
            download_bytes=2 * trained,
            update_bytes=28 * trained,
            publish_bytes=6 * trained,
            boundary_bytes=2 * tokens * hidden,
            activation_bytes=kept,
        )

    # Kept in 16 bits by fused kernels: both norms' input and result; query, key, value and
    # attention's result; gate, its activation, up and their product.
    wide = 4 * model["intermediate"] * model["experts_per_token"]
    kept = 2 * tokens * (4 * hidden + 2 * query + 2 * key + wide)
    head = model["vocab"] * hidden
    head_adapters = LORA_RANK * (hidden + model["vocab"])
    logits = 6 * tokens * model["vocab"]  # once in 16 bits and once in fp32
    layers = [layer("block", block, adapters if is_lora else block, kept)] * model["layers"]
    layers.append(layer("head", head, head_adapters if is_lora else head, logits))
    if embedding:
        layers.insert(0, layer("embedding", head, 0 if is_lora else head, 0))
    trained = frozenset(at for at, cost in enumerate(layers) if cost.gradient_bytes)
    return Costs(tuple(layers), trained), times["hop"] / 1e3


def machine_of(devices: int = 8, *, host_gb: float = 150) -> Machine:
    """The machine of the conditions."""
    card = Card(name="24 GB", memory_bytes=24 * 10**9, flops={}, bandwidth=1e12)
    link = Link(up=25e9, down=25e9, duplex=13 / 25)
    host = Host(memory_bytes=800 * 10**9, bandwidth=host_gb * 1e9)
    return Machine(cards=(card,) * devices, links=(link,) * devices, host=host)


def setting_of(  # noqa: PLR0913 - the conditions of one figure
    name: str,
    microbatches: int,
    *,
    devices: int = 8,
    host_gb: float = 150,
    staleness: int = 0,
    eager: bool = False,
    drops_recompute: bool = False,
    embedding: bool = False,
    partials: int = 32,
    speeds: tuple[float, ...] | None = None,
) -> Setting:
    costs, hop = costs_of(name, embedding=embedding, partials=partials)
    return Setting(
        costs=costs,
        devices=devices,
        microbatches=microbatches,
        machine=machine_of(devices, host_gb=host_gb),
        staleness=staleness,
        eager=eager,
        speeds=speeds,
        hop_seconds=hop,
        action_seconds=0.0,
        norm_traffic=0.0,  # the 28 bytes of the conditions are all that the optimizer moves
        most_fused=None if drops_recompute else 1,
    )


def share(setting: Setting, schedule: str = "hybrid") -> tuple[float, str, float]:
    """% of the ceiling, what was chosen, and seconds of processor time of the search."""
    begin = time.process_time()
    plan = choose(setting, schedule)
    searched = time.process_time() - begin
    seconds = play(setting, plan.candidate, steps=STEPS).step_seconds(FROM, TO)
    r, p = plan.replicas, plan.partition
    rounds = f" {plan.candidate.rounds} rounds" if plan.candidate.rounds > 1 else ""
    what = (
        f"{r.forward}/{r.fused}/{r.backward}{rounds}, {p.num_stages} stages, {len(p.fused)} fused"
    )
    return 100 * setting.even_seconds / seconds, what, searched


def clipping_bound(setting: Setting) -> float:
    """% of the ceiling at most: the update, and the first uploads, less what forward can hide."""
    layers, machine = setting.costs.layers, setting.machine
    assert machine is not None
    update = sum(layer.update_bytes for layer in layers)
    upload = sum(layer.weight_bytes for layer in layers)
    forward = sum(layer.forward_seconds for layer in layers) * setting.microbatches
    exposed = (update + upload) / machine.host.bandwidth - forward / setting.devices
    return 100 * setting.even_seconds / (setting.even_seconds + max(exposed, 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the five rows with bars only")
    parser.add_argument(
        "--partials",
        type=int,
        choices=(16, 32),
        default=32,
        help="bits of partial gradients that replicas bring down; the engine sends 32",
    )
    parser.add_argument("--embedding", action="store_true", help="with an embedding of its own")
    given = parser.parse_args()
    data = published()
    names = list(data["models"])
    batch = {name: data["setup"]["global_batch_sequences"][name] // SAMPLES for name in names}
    sixteen = dict.fromkeys(names, 16)
    rows = {
        "staleness 1, 16 microbatches, eager": (sixteen, {"staleness": 1, "eager": True}),
        "exact, published batch, clipping": (batch, {}),
        "exact, published batch, eager": (batch, {"eager": True}),
        "exact, 16 microbatches, eager": (sixteen, {"eager": True}),
        "exact, 16 microbatches, clipping": (sixteen, {}),
    }
    if not given.quick:
        rows |= {
            "recompute dropped where it fits": (batch, {"drops_recompute": True}),
            "clipping, 60 GB/s of host memory": (batch, {"host_gb": 60}),
            "clipping, 300 GB/s": (batch, {"host_gb": 300}),
            "clipping, 4 devices": (batch, {"devices": 4}),
            "clipping, 8 microbatches": (dict.fromkeys(names, 8), {}),
            "clipping, speeds within 2 %": (batch, {"speeds": SPEEDS}),
            "clipping, four devices half as fast": (batch, {"speeds": (1.0,) * 4 + (0.5,) * 4}),
        }
    missed = 0
    for row, (microbatches, options) in rows.items():
        print(f"\n{row}", flush=True)
        bars = BARS.get(row, (math.nan,) * len(names))
        if row.startswith("recompute"):
            bars = (117, 102, math.nan, math.nan, math.nan)
        for name, bar in zip(names, bars, strict=True):
            setting = setting_of(
                name,
                microbatches[name],
                embedding=given.embedding,
                partials=given.partials,
                **options,
            )
            found, what, searched = share(setting)
            says = "" if math.isnan(bar) else f" (bar {bar}{'' if found >= bar else ' MISSED'})"
            missed += found < bar
            if row == "exact, 16 microbatches, clipping":
                says += f", bound {clipping_bound(setting):.1f}"
            print(f"  {name:16} {found:6.2f} %{says} · {what} · {searched:.1f} s", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
