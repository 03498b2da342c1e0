"""What runs, in which order: schedules as data. Pure Python, no torch, no threads."""

from roundpipe.plan.actions import Action, Op
from roundpipe.plan.check import check
from roundpipe.plan.costs import Costs, LayerCost
from roundpipe.plan.generators import Replicas, forward_only, round_robin
from roundpipe.plan.partition import Partition, front, partition_for
from roundpipe.plan.passes import Options, lower, lower_chain
from roundpipe.plan.render import render, render_svg
from roundpipe.plan.schedule import Phase, Schedule, Visit
from roundpipe.plan.timeline import Span, busy_share

__all__ = [
    "Action",
    "Costs",
    "LayerCost",
    "Op",
    "Options",
    "Partition",
    "Phase",
    "Replicas",
    "Schedule",
    "Span",
    "Visit",
    "busy_share",
    "check",
    "forward_only",
    "front",
    "lower",
    "lower_chain",
    "partition_for",
    "render",
    "render_svg",
    "round_robin",
]
