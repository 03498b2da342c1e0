"""What runs, in which order: schedules as data, and the costs and machines that they are made for.

A generator (`round_robin`, `replicated`, `gpipe`, …) says what devices compute; `lower` adds
transfers and updates, `check` holds the rules, `render` draws. Pure Python, no torch, no threads.
"""

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.baselines import (
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    with_waiting_recompute,
)
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import (
    Replicas,
    computation,
    forward_only,
    replicated,
    round_robin,
)
from roundpipe.plan.machine import Card, Host, Link, Machine
from roundpipe.plan.machine_file import machine_mapping, machine_of
from roundpipe.plan.machine_text import parse_machine
from roundpipe.plan.partition import Partition, front, partition_for
from roundpipe.plan.passes import Options, lower, lower_chain
from roundpipe.plan.render import render, render_svg
from roundpipe.plan.schedule import Phase, Schedule, Visit
from roundpipe.plan.timeline import Span, StepSpans, Timeline, busy_share
from roundpipe.plan.uneven import UnevenDevices, partition_for_speeds, tapered, uneven_front

__all__ = [
    "Action",
    "Card",
    "Costs",
    "Host",
    "LayerCost",
    "Link",
    "Machine",
    "Op",
    "Options",
    "Partition",
    "Phase",
    "Replicas",
    "Schedule",
    "Span",
    "StepSpans",
    "Timeline",
    "UnevenDevices",
    "Visit",
    "busy_share",
    "check",
    "computation",
    "forward_only",
    "front",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "lower",
    "lower_chain",
    "machine_mapping",
    "machine_of",
    "one_f_one_b",
    "parse_machine",
    "partition_for",
    "partition_for_speeds",
    "render",
    "render_svg",
    "replicated",
    "round_robin",
    "tapered",
    "uneven_front",
    "with_waiting_recompute",
]
