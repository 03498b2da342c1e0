"""What doctor says of all that is no part: libraries, the shell's variables, disks.

None of it is a matter of tokens/s but of runs that do not start, or wait before they start. Where a
price needs a size it is that of an 8B model: 16 GB to fetch, 14 bytes a parameter of a checkpoint
in full fine-tuning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roundpipe.plan.amounts import write_bytes, write_rate
from roundpipe.report.finding import Case, Finding, Level
from roundpipe.report.forecast_text import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.report.readings import DiskReadings, PackageReadings

_DOWNLOAD = 16e9
_CHECKPOINT = 8e9 * 14
_LORA = 3 * 0.6e9  # what a LoRA run of it saves at most
_SLOW_DISK = 0.5e9  # bytes per second
_QUICK_DISK = 2e9  # what an ordinary NVMe disk keeps up
_TOOL_SECONDS = 1.0
# What does not work without a library. Those not named here: nothing starts.
_WITHOUT = {
    "bitsandbytes": "finetuning_type=qlora does not start",
    "datasets": "datasets of the hub, .parquet and .arrow files are not read",
    "gguf": "models in a GGUF file do not open, that of examples/quickstart.yaml among them",
    "matplotlib": "training_loss.png is not drawn",
    "peft": "finetuning_type=lora, the default, does not start",
    "tensorboard": "report_to=tensorboard does not start",
}
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def software_findings(case: Case) -> Iterator[Finding]:
    """All rules, one after another."""
    for package in case.readings.software.packages:
        yield from _package(package)
    for rule in (_launched, _blocking, _few_threads, _hidden_cards, _no_card, _driver_sleeps, _hub):
        yield from rule(case)
    for disk in case.readings.disks:
        yield from _disk(disk)


def _package(package: PackageReadings) -> Iterator[Finding]:
    name, needs = package.name, package.needs
    version = "" if needs is None else f">={needs.split(',')[0]}"
    cost = _WITHOUT.get(name, "roundpipe does not start")
    if package.version is None:
        level = Level.NOTE if package.is_optional else Level.MISSING
        yield Finding(level, f"{name} is not installed", cost, f"pip install '{name}{version}'")
    elif not package.is_enough:
        yield Finding(
            Level.MISSING,
            f"{name} {package.version} is too old: roundpipe is made for {needs} and later",
            f"nobody has tried it: at the worst {cost}",
            f"pip install --upgrade '{name}{version}'",
        )


def _launched(case: Case) -> Iterator[Finding]:
    for name in _LAUNCHERS:
        value = case.readings.software.variables.get(name, "")
        if value.isdecimal() and int(value) > 1:
            yield Finding(
                Level.MISSING,
                f"{name}={value} is set, as launchers of several processes do",
                "roundpipe train refuses to start: one process drives all devices",
                f"unset {name}, or start without torchrun, accelerate or mpirun",
            )


def _blocking(case: Case) -> Iterator[Finding]:
    if case.on_cpu or case.readings.software.variables.get("CUDA_LAUNCH_BLOCKING", "0") == "0":
        return
    yield Finding(
        Level.SLOW,
        "CUDA_LAUNCH_BLOCKING is set: every operation waits until the card has done it",
        "copies do not run beside compute, devices not beside each other; a step takes as long as "
        "all its work in a row",
        "unset CUDA_LAUNCH_BLOCKING",
    )


def _few_threads(case: Case) -> Iterator[Finding]:
    host = case.readings.host
    value = case.readings.software.variables.get("OMP_NUM_THREADS")
    if case.on_cpu and value is not None and host.cores is not None and host.threads < host.cores:
        better = case.with_cores(host.cores / host.threads)
        yield Finding(
            Level.SLOW,
            f"OMP_NUM_THREADS={value}: CPU devices compute on {host.threads} of {host.cores} cores",
            case.price(better, "at most with all"),
            "unset OMP_NUM_THREADS",
        )


def _hidden_cards(case: Case) -> Iterator[Finding]:
    software = case.readings.software
    cards = [device for device in case.readings.devices if not device.is_cpu]
    names = [name for name in _HIDING if name in software.variables]
    there = software.num_cards or 0
    if not names or not cards or there <= len(cards):
        return
    more = there - len(cards)
    machine = case.machine
    cap = machine.link_cap
    better = replace(
        machine,
        cards=machine.cards + machine.cards[:1] * more,
        links=machine.links + machine.links[:1] * more,
        link_cap=None if cap is None else cap * there / len(cards),
    )
    yield Finding(
        Level.NOTE,
        f"{names[0]}={software.variables[names[0]]} leaves {len(cards)} of {there} cards",
        case.price(better, f"with {there} like the first"),
        f"unset {names[0]}",
    )


def _no_card(case: Case) -> Iterator[Finding]:
    if not case.on_cpu:
        return
    unused = case.readings.software.unused_cards
    if unused:
        text = f"there is a card, {unused}, but the CPU was asked for"
        yield Finding(Level.NOTE, text, case.speed_now(), "devices=auto")
    else:
        yield Finding(Level.NOTE, "there is no card: training runs on the CPU", case.speed_now())


def _driver_sleeps(case: Case) -> Iterator[Finding]:
    seconds = case.readings.software.tool_seconds
    sleeps = [device for device in case.readings.devices if device.is_kept_ready is False]
    if sleeps and seconds is not None and seconds > _TOOL_SECONDS:
        yield Finding(
            Level.NOTE,
            "the driver goes to sleep when no program uses a card (persistence mode is off)",
            f"{seconds:.1f} s before the first card answers, at each start; nothing afterwards",
            "nvidia-smi -pm 1 (as root)",
        )


def _hub(case: Case) -> Iterator[Finding]:
    software = case.readings.software
    offline = software.variables.get("HF_HUB_OFFLINE", "").upper()
    if offline in ("1", "ON", "YES", "TRUE"):
        yield Finding(
            Level.NOTE,
            f"HF_HUB_OFFLINE={software.variables['HF_HUB_OFFLINE']} is set",
            "nothing is fetched of the hub: models and datasets that are not in its cache do not "
            "load",
            "unset HF_HUB_OFFLINE",
        )
    elif software.has_hub_token is False:
        yield Finding(
            Level.NOTE,
            "there is no token for the hub",
            "models whose terms must be accepted (Llama, Gemma) are not fetched; all others are",
            "hf auth login, or HF_TOKEN",
        )


def _disk(disk: DiskReadings) -> Iterator[Finding]:
    where = f"the disk of {disk.used_for} ({disk.folder})"
    needs = _DOWNLOAD * ("hub" in disk.used_for) + _LORA * ("runs" in disk.used_for)
    if disk.free_bytes is not None and disk.free_bytes < needs:
        yield Finding(
            Level.MISSING,
            f"{write_bytes(disk.free_bytes)} are free on {where}",
            f"LoRA of an 8B model puts {write_bytes(needs)} there: it ends before its first step",
            "output_dir=FOLDER on another disk; HF_HOME=FOLDER for what is fetched",
        )
    if disk.write is not None and disk.write < _SLOW_DISK and "runs" in disk.used_for:
        yield Finding(
            Level.SLOW,
            f"{where} is written at {write_rate(disk.write)}",
            f"a checkpoint of an 8B model in full fine-tuning ({write_bytes(_CHECKPOINT)}) takes "
            f"{duration_text(_CHECKPOINT / disk.write)}, {duration_text(_CHECKPOINT / _QUICK_DISK)}"
            f" at {write_rate(_QUICK_DISK)}; one of LoRA is less than a hundredth",
            "output_dir=FOLDER on a faster disk, or save_minutes=120",
        )
    if disk.read is not None and disk.read < _SLOW_DISK and "hub" in disk.used_for:
        yield Finding(
            Level.SLOW,
            f"{where} is read at {write_rate(disk.read)}",
            f"to load an 8B model ({write_bytes(_DOWNLOAD)}) takes "
            f"{duration_text(_DOWNLOAD / disk.read)}, {duration_text(_DOWNLOAD / _QUICK_DISK)} at "
            f"{write_rate(_QUICK_DISK)}",
            "HF_HOME=FOLDER on a faster disk",
        )
