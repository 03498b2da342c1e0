"""The checks of ``gpu_check``. Each runs in a process of its own and returns rows of a table."""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from _gpu_models import (
    EXACT,
    LARGE,
    TINY,
    Size,
    batch,
    build,
    flops,
    free,
    matrix_rate,
    plain_step,
    resident,
    seconds_of,
    wait,
    with_lora,
)
from _miniature import Miniature, run

import roundpipe
from roundpipe.plan.actions import Op
from roundpipe.plan.schedule_memory import schedule_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

CAP_BYTES = 24e9


@dataclass(frozen=True)
class Row:
    """One figure. ``aim``: what it should be; ``met``: whether it is, None without an aim."""

    what: str
    value: float | str
    unit: str = ""
    aim: str = ""
    met: bool | None = None


@dataclass
class Rig:
    """On what, and how large. ``tiny``: as small as can be, to see that everything runs."""

    device: torch.device
    tiny: bool
    rows: list[Row] = field(default_factory=list)

    @property
    def size(self) -> Size:
        return TINY if self.tiny else LARGE

    @property
    def small(self) -> Size:
        """What numbers are compared on."""
        return TINY if self.tiny else EXACT

    def workers(self, count: int) -> list[str]:
        """So many workers, all on the one device."""
        return [str(self.device)] * count

    def say(
        self,
        what: str,
        value: float | str,
        unit: str = "",
        *,
        aim: str = "",
        met: bool | None = None,
    ) -> None:
        self.rows.append(Row(what, value, unit, aim, met))

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


def exactness(rig: Rig, steps: int = 4) -> None:
    """Training steps against plain PyTorch on the same device, with one worker and with two."""
    data = [batch(rig.small, seed) for seed in range(steps)]
    model = build(rig.small, on="cpu", attention="eager").to(rig.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    plain = []
    for each in data:
        plain.append(plain_step(model, each, rig.small.microbatches, rig.device))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    states = []
    for workers in (1, 2):
        losses, state = _trained(rig, workers, data)
        states.append(state)
        loss = max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True))
        weight = max(
            ((state[n] - w).abs().max() / w.abs().max()).item() for n, w in expected.items()
        )
        rig.say(f"{workers} worker(s): loss off plain", loss, aim="< 1e-5", met=loss < 1e-5)
        rig.say(f"{workers} worker(s): weights off plain", weight, aim="< 1e-4", met=weight < 1e-4)
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rig.say("1 and 2 workers", "same bits" if same else "differ", aim="same bits", met=same)


def _trained(
    rig: Rig, workers: int, data: list[dict[str, torch.Tensor]]
) -> tuple[list[float], Any]:
    model = build(rig.small, on="cpu", attention="eager")
    with roundpipe.RoundPipe(model, devices=rig.workers(workers)) as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-3)
        losses = []
        for each in data:
            losses.append(float(_call(ours, each, rig.small.microbatches)))
            ours.step(optimizer, max_grad_norm=1.0)
        return losses, {name: value.clone() for name, value in ours.state_dict().items()}


def _call(ours: Any, data: dict[str, torch.Tensor], microbatches: int) -> torch.Tensor:
    config = roundpipe.RoundPipeRunConfig(num_microbatch=microbatches)
    loss: torch.Tensor = ours.forward_backward(input_kwargs=data, run_config=config)
    return loss


def sanitizer(rig: Rig) -> None:
    """Steps on two workers of one card while torch watches accesses from different streams."""
    watched = os.environ.get("TORCH_CUDA_SANITIZER") == "1"
    losses, _ = _trained(rig, 2, [batch(rig.small, seed) for seed in range(3)])
    found = "nothing found" if watched and rig.device.type == "cuda" else "not watched: no card"
    rig.say("CUDA sanitizer, 3 steps, 2 workers", found, met=watched or None)
    rig.say("losses are finite", str(all(map(math.isfinite, losses))))


def train_full(rig: Rig) -> None:
    """A full training step against the same layers resident on the card."""
    _train(rig, full=True)


def train_lora(rig: Rig) -> None:
    """A LoRA step against the same layers resident on the card."""
    _train(rig, full=False)


def _train(rig: Rig, *, full: bool) -> None:
    size, name = rig.size, "full" if full else "lora"
    model = build(size, on=str(rig.device))
    if not full:
        model = with_lora(model)
    data = batch(size)
    plain = _resident_seconds(rig, model, data)
    model.cpu()
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_disable()
    free(rig.device)
    with roundpipe.RoundPipe(model, devices=[str(rig.device)]) as ours:
        optimizer = roundpipe.optim.AdamW(ours.optim_parameters(), lr=1e-5)

        def step() -> None:
            _call(ours, data, size.microbatches)
            ours.step(optimizer, max_grad_norm=1.0)

        steps = 3
        for _ in range(3):  # plans are made anew after the second
            step()
        ours.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        ours.synchronize()
        seconds = (time.perf_counter() - begin) / steps
        aim = 0.90 if full else 0.95
        rig.say(f"{name}: tokens a second", size.tokens / seconds, "tokens/s")
        rig.say(f"{name}: seconds a step, with update", seconds, "s")
        if plain is not None:
            rig.say(f"{name}: resident, without update", plain, "s")
            speed = plain / seconds
            rig.say(f"{name}: of the resident speed", speed, aim=f">= {aim}", met=speed >= aim)
        rate = matrix_rate(rig.device, size.dtype, 256 if rig.tiny else 8192)
        share = flops(size, full=full) / seconds / rate
        rig.say(f"{name}: of the matrix rate ({rate / 1e12:.0f} TFLOP/s)", share)
        _say_timeline(rig, ours, name)
        _say_memory(rig, ours, name)


def _resident_seconds(
    rig: Rig, model: torch.nn.Module, data: dict[str, torch.Tensor]
) -> float | None:
    """Forward and backward alone, resident; None where the card has no room for it."""
    try:
        on_card = resident(model, rig.device)

        def step() -> None:
            plain_step(on_card, data, rig.size.microbatches, rig.device)
            on_card.zero_grad(set_to_none=True)

        return seconds_of(step, rig.device, steps=2, warm=1)
    except torch.OutOfMemoryError:
        rig.say("resident", "does not fit the card")
        return None


def _say_timeline(rig: Rig, ours: Any, name: str) -> None:
    """How much of a step transfers and updates kept the device from computing, and link rates."""
    steps = ours.timeline.steps[-3:-1]
    spans = [span for step in steps for span in step.spans]
    compute = [span for span in spans if span.stream.endswith(".compute")]
    if not compute:
        return
    first = min(span.start for span in compute)
    last = max(span.end for span in compute)
    busy = sum(span.end - span.start for span in compute)
    rig.say(f"{name}: exposed (the device did not compute)", 100 * (1 - busy / (last - first)), "%")
    uploads = [span for span in spans if span.action.op is Op.UPLOAD]
    moved = sum(
        sum(ours.planner.costs.layers[layer].weight_bytes for layer in visit.layers)
        for step in steps
        for visit in step.visits
    )
    seconds = sum(span.end - span.start for span in uploads)
    if seconds > 0:
        rig.say(f"{name}: weights came up at", moved / seconds / 1e9, "GB/s")


def _say_memory(rig: Rig, ours: Any, name: str) -> None:
    plan, costs = ours.plan, ours.planner.costs
    visits = plan.computation(costs, devices=1, microbatches=rig.size.microbatches).visits
    counted = schedule_bytes(costs, visits, devices=1)
    rig.say(f"{name}: device memory by the plan", counted / 1e9, "GB")
    if rig.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(rig.device)
        rig.say(
            f"{name}: device memory at most", peak / 1e9, "GB", aim="<= plan", met=peak <= counted
        )


def link(rig: Rig) -> None:
    """What a plain pinned copy reaches, to compare what weights came up at with."""
    num_bytes = (1 << 20) if rig.tiny else (1 << 28)
    pinned = rig.device.type == "cuda"
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    card = torch.empty(num_bytes, dtype=torch.uint8, device=rig.device)
    for what, copy in (
        ("up", lambda: card.copy_(host, non_blocking=True)),
        ("down", lambda: host.copy_(card, non_blocking=True)),
    ):
        times = [seconds_of(copy, rig.device, steps=4, warm=1) for _ in range(3)]
        rig.say(f"pinned copy {what}", num_bytes / statistics.median(times) / 1e9, "GB/s")


def longest(rig: Rig) -> None:
    """The longest sequence whose LoRA step runs under a cap of 24 GB."""
    _cap(rig)
    found, length = 0, 64 if rig.tiny else 16_384
    limit, patience = (128 if rig.tiny else 1 << 18), time.perf_counter() + 50
    while length <= limit and time.perf_counter() < patience:
        if not _runs(rig, length):
            break
        found, length = length, 2 * length
    rig.say("longest LoRA sequence under 24 GB, to a factor of 2", found, "tokens")


def miniature(rig: Rig) -> None:
    """Three layers and the head of a published mixture of 235 billion parameters under 24 GB.

    31,744 tokens a microbatch, adapters of rank 32 on attention and on all experts. What the
    allocator held at most, before a microbatch was weighed and after, beside what is planned.
    """
    small = replace(Miniature(on_experts=True), limit_bytes=int(0.92 * CAP_BYTES))
    if rig.tiny:
        small = replace(small, experts=16).scaled(64)
    _cap(rig)
    held = run(small, str(rig.device), asks_config=not rig.tiny)
    for what, num_bytes, most, aim in (
        ("before weighing, device memory at most", held.first, held.limit, "<= limit"),
        ("then, device memory at most", held.peak, held.measured, "<= plan"),
        ("plan, as weighed", held.measured, held.limit, "<= limit"),
        ("plan, from the config alone", held.planned, None, ""),
        ("limit", held.limit, None, ""),
    ):
        if num_bytes is None:
            continue
        met = None if most is None else num_bytes <= most
        rig.say(f"3 of 94 layers: {what}", num_bytes / 1e9, "GB", aim=aim, met=met)
    rig.say("3 of 94 layers: plan", held.plan)


def _cap(rig: Rig) -> None:
    """Let this process have no more than 24 GB of a card."""
    if rig.device.type == "cuda":
        total = torch.cuda.get_device_properties(rig.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_BYTES / total), rig.device)


def _runs(rig: Rig, length: int) -> bool:
    size = Size(**{**asdict(rig.size), "length": length, "sequences": 1, "microbatches": 1})
    model = with_lora(build(size, on=str(rig.device)))
    free(rig.device)
    try:
        with roundpipe.RoundPipe(
            model, devices=[str(rig.device)], device_memory_limit=int(0.92 * CAP_BYTES)
        ) as ours:
            config = roundpipe.RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer")
            loss = ours.forward_backward(input_kwargs=batch(size), run_config=config)
            ours.synchronize()
            return math.isfinite(float(loss))
    except (roundpipe.RoundPipeError, torch.OutOfMemoryError) as error:
        rig.say(f"at {length} tokens", str(error).splitlines()[0][:120])
        return False


def graph(rig: Rig) -> None:
    """``forward``, a loss of one's own and ``backward`` with outputs on the card, two workers.

    The node's backward must not run in the thread that autograd keeps for the card. It is under the
    time limit of its process.
    """
    model = build(rig.small, on="cpu")
    with roundpipe.RoundPipe(model, devices=rig.workers(2)) as ours:
        data = batch(rig.small)
        config = roundpipe.RoundPipeRunConfig(output_device=rig.device)
        for _ in range(3):
            logits = ours(data["input_ids"], roundpipe_run_config=config).logits
            assert logits.device.type == rig.device.type, logits.device
            target = data["labels"].to(rig.device)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
            loss.backward()
            ours.zero_grad()
        rig.say("forward, own loss, backward; 2 workers", "done", aim="done", met=True)


def fsdp(rig: Rig) -> None:
    """The same full step under PyTorch's FSDP2 with CPU offload, on this one device."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

    size = rig.size
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29577")
    kind = rig.device.type
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    mesh = init_device_mesh(kind, (1,))
    model = build(size, on=str(rig.device))
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = CPUOffloadPolicy(pin_memory=kind == "cuda")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    data = batch(size)

    def step() -> None:
        plain_step(model, data, size.microbatches, rig.device)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = seconds_of(step, rig.device, steps=1, warm=1)
    wait(rig.device)
    rig.say("FSDP2 with CPU offload, full: seconds a step", seconds, "s")
    rig.say("FSDP2 with CPU offload, full: tokens a second", size.tokens / seconds, "tokens/s")
    torch.distributed.destroy_process_group()


SECTIONS: dict[str, Callable[[Rig], None]] = {
    each.__name__: each
    for each in (
        exactness,
        sanitizer,
        link,
        train_full,
        train_lora,
        longest,
        miniature,
        graph,
        fsdp,
    )
}
