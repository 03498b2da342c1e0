"""What a machine can train: well-known models by every method, from closed forms alone.

No plan is searched for a cell. Speed is the least time a step can take (work spread evenly, Python,
what passes through host memory), over a share that plans reach; memory is counted as for a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.finetune.forecast.forecast import job_of, machine_words
from roundpipe.finetune.forecast.memory import Case
from roundpipe.finetune.forecast.speed import bound_seconds
from roundpipe.finetune.forecast.wish import Wish, trains_today
from roundpipe.finetune.settings.config import make_config
from roundpipe.models.estimate import profile
from roundpipe.plan.amounts import write_bytes
from roundpipe.report.forecast import Cell, ModelTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roundpipe.plan.machine import Machine

MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B",
    "microsoft/phi-4",
    "openai/gpt-oss-20b",
    "google/gemma-3-27b-pt",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-235B-A22B",
)
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
_REACHED = 0.85  # of the closed form's speed, by plans of a dozen models and machines
_LENGTH = 2048
_LEAST_LENGTH = 128  # nobody trains on less
_SEQUENCES = 16  # of a step, and four a device at least


def model_table(machine: Machine, models: Sequence[str] = MODELS) -> ModelTable:
    """The table; a fraction of a second a model."""
    wish = Wish(config=make_config({"model": "-", "dataset": "-"})[0])
    job = job_of(wish, machine)
    rows = []
    for name in models:
        profiles = [profile(name, method, bits=job.bits) for method in METHODS]
        cells = tuple(cell(Case(each, machine, job, _batch(machine))) for each in profiles)
        rows.append((profiles[0].name, cells))
    heads = tuple(
        text if trains_today(finetuning_type=name) else f"{text} (not yet)"
        for name, text in METHODS.items()
    )
    return ModelTable(
        machine=f"{machine_words(machine)} · {_memory_words(machine)} · {job.dtype}",
        length=_LENGTH,
        methods=heads,
        rows=tuple(rows),
        notes=machine.notes,
    )


def cell(case: Case) -> Cell:
    """One model by one method."""
    missing = _missing(case)
    if missing:
        return Cell(missing=missing)
    longest = case.longest()
    length = min(longest, _LENGTH)
    sizes = [1]
    while 2 * sizes[-1] * case.machine.num_devices <= case.batch_size:
        if case.least_device(size=2 * sizes[-1], length=length).total > case.device_limit:
            break
        sizes.append(2 * sizes[-1])
    try:
        seconds = min(bound_seconds(case, size=size, length=length) for size in sizes)
    except ConfigError:  # a card that lacks the dtype
        return Cell(longest=longest)
    return Cell(longest, case.batch_size * length / seconds * _REACHED)


def _missing(case: Case) -> tuple[tuple[str, int], ...]:
    """Bytes that a short sequence lacks, by place."""
    machine = case.machine
    device = case.least_device(size=1, length=_LEAST_LENGTH)
    host = case.least_host(size=1, length=_LEAST_LENGTH, batch=machine.num_devices)
    on_device = device.total - case.device_limit
    on_host = case.host_total(host, device) - machine.host.memory_bytes
    if all(card.in_host for card in machine.cards):  # devices have half of the host's memory
        on_host, on_device = max(on_host, 2 * machine.num_devices * on_device), 0
    lacking = (("gpu", on_device), ("host", on_host))
    return tuple((name, size) for name, size in lacking if size > 0)


def _batch(machine: Machine) -> int:
    return max(_SEQUENCES, 4 * machine.num_devices)


def _memory_words(machine: Machine) -> str:
    cards = sorted({card.memory_bytes for card in machine.cards})
    each = " or ".join(write_bytes(size) for size in cards)
    return f"{each} each · {write_bytes(machine.host.memory_bytes)} of host memory"
