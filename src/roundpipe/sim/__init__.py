"""When it would run, by calculation. Pure Python, no torch, no threads."""

from roundpipe.sim.simulate import bubble, compute_seconds, makespan, simulate

__all__ = ["bubble", "compute_seconds", "makespan", "simulate"]
