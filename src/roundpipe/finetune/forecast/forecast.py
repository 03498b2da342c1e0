"""`roundpipe plan`: from a wish and a machine to a `Forecast`, before anything is loaded.

wish → machine → profile of the model → what fits → plan → data → hints

The same answers whether a run may begin: `check_host` refuses one that host memory would not hold,
before a weight is read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, PlanError
from roundpipe.finetune.forecast.duration import data_notes, duration
from roundpipe.finetune.forecast.hints import fitting_hints, speed_hints
from roundpipe.finetune.forecast.machines import load_machine
from roundpipe.finetune.forecast.memory import Case
from roundpipe.finetune.forecast.profile import profile_of
from roundpipe.finetune.forecast.speed import best_speed, likely_sizes
from roundpipe.finetune.forecast.wish import dtype_of, limit_bytes
from roundpipe.models.estimate.costs import Job
from roundpipe.plan.amounts import write_bytes
from roundpipe.report.forecast import Forecast, Hint, Need, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from roundpipe.finetune.forecast.memory import DeviceNeed
    from roundpipe.finetune.forecast.speed import Speed
    from roundpipe.finetune.forecast.wish import Wish
    from roundpipe.models.estimate.profile import Profile
    from roundpipe.plan.host_bytes import HostBytes
    from roundpipe.plan.machine import Machine

    Waiting = Callable[[str], AbstractContextManager[None]]

_WORTH_SAYING = 0.05  # of host memory's need
_MOST_SEQUENCES = 1 << 14  # of a step: each microbatch is counted one by one


@dataclass(frozen=True)
class Found:
    """A forecast and what it was made of; ``speed`` is None where no stage fits a device."""

    forecast: Forecast
    case: Case
    speed: Speed | None


@contextlib.contextmanager
def _quietly(what: str) -> Iterator[None]:
    yield


def planned_machine(
    value: str | int | Mapping[str, Any] | None,
    devices: Any = "auto",
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Machine:
    """The machine to plan for: the one described, or this one, with the devices asked for.

    Of a described machine ``devices`` may be a number or cards by their place. Raises ConfigError.
    """
    value = str(value) if isinstance(value, int) else value  # 4090
    machine = load_machine(value, devices=devices, environment=environment, folder=folder)
    if value is None or devices in (None, "auto"):
        return machine
    places = _places(devices, machine.num_devices)
    if places is None:
        what = machine.text or "the machine file"
        raise ConfigError(
            f"devices: {devices} are not among those of machine: {what}"
            f"\nhint: devices={machine.num_devices} at most, or another machine"
        )
    cards = tuple(machine.cards[place] for place in places)
    return replace(machine, cards=cards, links=tuple(machine.links[place] for place in places))


def _places(devices: Any, count: int) -> list[int] | None:
    """Places of the devices that a setting names among so many; None where it names others."""
    if isinstance(devices, int):
        return list(range(devices)) if 1 <= devices <= count else None
    names = devices if isinstance(devices, list | tuple) else str(devices).split(",")
    places = []
    for name in names:
        text = str(name).strip().removeprefix("cuda:")
        if text in ("cuda", "auto") and len(names) == 1:
            return list(range(count))
        if not text.isdecimal() or int(text) >= count:
            return None
        places.append(int(text))
    return places


def limited(machine: Machine, wish: Wish) -> Machine:
    """``machine`` with no more memory than the config's limits allow."""
    limit = wish.config.device_memory_limit
    cards = machine.cards
    if limit is not None:
        cards = tuple(replace(c, memory_bytes=min(c.memory_bytes, limit)) for c in cards)
    host = machine.host
    most = limit_bytes(wish.config.host_memory_limit, machine)
    if most is not None:
        host = replace(host, memory_bytes=min(host.memory_bytes, most))
    return replace(machine, cards=cards, host=host)


def job_of(wish: Wish, machine: Machine) -> Job:
    """How the wish trains on ``machine``."""
    return Job(
        dtype=dtype_of(wish.config, machine),
        fp16_accumulation=wish.fp16_accumulation,
        length=wish.config.max_length,
        staleness=wish.config.staleness,
    ).with_moments(wish.config.optim_state_dtype)


def forecast(
    wish: Wish,
    machine: Machine,
    *,
    environment: Mapping[str, str],
    waiting: Waiting = _quietly,
) -> Found:
    """What the wish comes to on ``machine``. Takes seconds; ``waiting`` is told for what.

    Raises ConfigError for a model, method or dataset that cannot be used.
    """
    _require_countable(wish)
    machine = limited(machine, wish)
    job = job_of(wish, machine)
    with waiting("counting the model"):
        profile = profile_of(wish, bits=job.bits, environment=environment)
    case = Case(profile, machine, job, wish.config.batch_size)
    sizes = _sizes(wish, case)
    speed, problem = None, ""
    if case.least_device(size=sizes[0]).total <= case.device_limit:
        with waiting("choosing a plan"):
            try:
                speed = best_speed(case, wish.schedule, sizes=sizes)
            except PlanError as refusal:
                problem = f"schedule {wish.schedule}: {str(refusal).partition(chr(10))[0]}"
    device = case.least_device(size=sizes[0]) if speed is None else speed.device
    host = case.least_host(size=sizes[0]) if speed is None else speed.host
    needs = _needs(wish, case, device, host)
    made = Forecast(
        title=_title(wish, case),
        needs=needs,
        bytes={
            "device": device.total,
            "pinned_host": host.pinned,
            "pageable_host": case.host_total(host, device) - host.pinned,
            "disk": needs[-1].needs,
        },
        longest=case.longest(),
        longest_known=profile.longest,
        pace=None if speed is None else pace_of(speed),
        notes=(
            *wish.notes,
            *machine.notes,
            *profile.notes,
            *_length_notes(wish, profile),
            *data_notes(wish),
        ),
        problem=problem,
    )
    if speed is not None:
        with waiting("reading the data"):
            made = replace(made, duration=duration(wish, speed))
    return Found(replace(made, hints=_hints(wish, made, case, speed, environment)), case, speed)


def check_host(wish: Wish, machine: Machine, *, environment: Mapping[str, str]) -> Case:
    """Raise PlanError if host memory would not hold the run, with what would; reads no weight.

    Returns what was counted.
    """
    _require_countable(wish)
    machine = limited(machine, wish)
    job = job_of(wish, machine)
    profile = profile_of(wish, bits=job.bits, environment=environment)
    case = Case(profile, machine, job, wish.config.batch_size)
    needs = min(
        case.host_total(case.least_host(size=size), case.least_device(size=size))
        for size in _sizes(wish, case)
    )
    has = machine.host.memory_bytes
    if needs <= has:
        return case
    hints = fitting_hints(wish, case, ("host memory",), environment)
    way_out = ", or ".join(map(str, hints)) or f"a machine with {write_bytes(needs)} of memory"
    raise PlanError(
        f"does not fit into host memory: {write_bytes(needs)} of {write_bytes(has)}"
        f"\nhint: {way_out}"
    )


def _require_countable(wish: Wish) -> None:
    """Refuse batches that would take this machine's memory only to be counted."""
    if wish.config.batch_size > _MOST_SEQUENCES:
        raise ConfigError(
            f"batch_size: {wish.config.batch_size:,} is more than a step can have: "
            f"{_MOST_SEQUENCES:,}\nhint: batch_size={_MOST_SEQUENCES}"
        )


def _sizes(wish: Wish, case: Case) -> list[int]:
    """Sizes of microbatches to choose from: what was asked for, or what fits; never none."""
    config = wish.config
    if config.micro_batch_size is not None:
        return [min(config.micro_batch_size, config.batch_size)]
    if config.num_microbatch is not None:
        return [-(-config.batch_size // config.num_microbatch)]
    return likely_sizes(case) or [1]


def pace_of(speed: Speed) -> Pace:
    """The chosen plan as it is shown."""
    plan, partition = speed.plan, speed.plan.partition
    name = plan.candidate.name(speed.setting.devices)
    replicas = plan.replicas
    return Pace(
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.seconds,
        busy=speed.busy,
        bound=speed.bound,
        schedule=name,
        micro_batch_size=speed.size,
        microbatches=speed.setting.microbatches,
        rounds=plan.candidate.rounds,
        stages_forward=partition.forward,
        stages_fused=partition.fused,
        stages_backward=partition.backward,
        replicas=(replicas.forward, replicas.fused, replicas.backward),
        alternatives=tuple((other, s) for other, s in plan.alternatives if other != name),
    )


def _title(wish: Wish, case: Case) -> str:
    return " · ".join(
        (
            case.profile.name,
            method_words(wish),
            case.job.dtype,
            f"{case.batch_size:,} × {case.job.length:,} tokens per step on "
            f"{machine_words(case.machine)}",
        )
    )


def method_words(wish: Wish) -> str:
    """The method as people write it."""
    name = wish.method.name
    rank = f" r={wish.method.lora.r}"
    return {
        "full": "full fine-tuning",
        "lora": f"LoRA{rank}",
        "qlora": f"QLoRA{rank}",
        "freeze": "part of the weights",
    }[name]


def machine_words(machine: Machine) -> str:
    """The devices: ``8 × RTX 4090``."""
    counts = Counter(card.name for card in machine.cards)
    return " + ".join(f"{count} × {name}" for name, count in counts.items())


def _needs(wish: Wish, case: Case, device: DeviceNeed, host: HostBytes) -> tuple[Need, ...]:
    machine = case.machine
    is_cpu = all(card.in_host for card in machine.cards)
    total, disk = case.disk(wish.kept, only_model=wish.config.save_only_model)
    fetched = f"download {write_bytes(disk.download)}, "
    if Path(wish.model).expanduser().exists() or wish.model.startswith("package:"):
        total, fetched = total - disk.download, ""
    kept = ""
    if wish.kept is not None:
        kept = f"{wish.kept} + 1 checkpoints of {write_bytes(disk.checkpoint)}, "
    return (
        Need(
            "cpu" if is_cpu else "gpu",
            "device memory",
            device.total,
            case.device_limit,
            f"largest: {_stage_words(case.profile, device.layers)}, "
            f"{write_bytes(device.weights)} weights{_and_sums(wish)} + "
            f"{write_bytes(device.microbatch)} one microbatch",
        ),
        Need(
            "host",
            "host memory",
            case.host_total(host, device),
            machine.host.memory_bytes,
            _host_words(wish, case, host, device),
        ),
        Need(
            "disk",
            "disk",
            total,
            machine.host.disk_bytes,
            f"{fetched}{kept}result {write_bytes(disk.result)}",
        ),
    )


def _and_sums(wish: Wish) -> str:
    return " and gradients" if wish.method.name in ("full", "freeze") else ""


def _stage_words(profile: Profile, layers: range) -> str:
    """Layers by their number in the chain; its ends by name."""
    last = len(profile.layers) - 1
    if len(layers) == 1:
        return {0: "embedding", last: "head"}.get(layers[0], f"layer {layers[0]}")
    ends = {0: "embedding", last: "head"}
    return f"layers {ends.get(layers[0], layers[0])} to {ends.get(layers[-1], layers[-1])}"


def _host_words(wish: Wish, case: Case, host: HostBytes, device: DeviceNeed) -> str:
    total = case.host_total(host, device)
    parts = {
        "partial gradients": host.partial_sums,
        "saved inputs": host.saved_inputs,
        "what text does not reach": case.profile.unread_bytes,
        "CPU devices": total - host.total - case.profile.unread_bytes,
    }
    kept = host.weights + host.state
    if wish.method.name == "full":
        first = f"{kept / case.profile.trained_parameters:.3g} B per parameter"
    else:
        first = (
            f"weights and adapter {write_bytes(kept)}"
            if wish.method.has_adapter
            else (f"weights and state {write_bytes(kept)}")
        )
    more = [
        f"{name} {write_bytes(size)}"
        for name, size in sorted(parts.items(), key=lambda part: -part[1])
        if size > _WORTH_SAYING * total
    ]
    return " + ".join((first, *more))


def _length_notes(wish: Wish, profile: Profile) -> list[str]:
    length = wish.config.max_length
    if profile.longest is not None and length > profile.longest:
        return [f"max_length {length:,} is beyond what the model was made for: {profile.longest:,}"]
    return []


def _hints(
    wish: Wish, made: Forecast, case: Case, speed: Speed | None, environment: Mapping[str, str]
) -> tuple[Any, ...]:
    lacking = tuple(need.name for need in made.needs if not need.fits)
    if lacking:
        return fitting_hints(wish, case, lacking, environment)
    if made.problem:
        return (Hint("schedule=auto"),) if wish.schedule != "auto" else ()
    return () if speed is None else speed_hints(wish, speed)
