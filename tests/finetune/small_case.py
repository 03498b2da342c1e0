"""A model of six layers for plans that take no time: SmolLM2's own, most blocks left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.forecast.memory import Case
from roundpipe.models.estimate import Job, Profile, profile
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from roundpipe.models.estimate.method import Method

MODEL = "HuggingFaceTB/SmolLM2-135M"


def small_profile(method: Method | str = "full", *, bits: int = 16) -> Profile:
    whole = profile(MODEL, method, bits=bits)
    layers = (*whole.layers[:5], whole.layers[-1])
    return replace(whole, name="small", layers=layers)


def small_case(
    machine: str = "2x3090,64GB,disk=1TB", *, method: str = "full", batch: int = 8, **job: Any
) -> Case:
    asked = Job(**{"length": 1024, **job})
    return Case(small_profile(method, bits=asked.bits), parse_machine(machine), asked, batch)
