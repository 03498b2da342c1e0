"""Every exception the package raises on purpose.

RoundPipeError
+-- ConfigError       a value the user gave cannot be used (also a ValueError)
|   +-- ModelError    this model cannot be wrapped or split exactly
|   +-- DataError     a dataset or one line of it cannot be used
|   +-- DeviceError   a device that was asked for cannot be used
+-- PlanError         a schedule breaks a rule, or no plan fits
|   +-- DeadlockError no stream of a schedule can move
|   +-- NoRoomError   a device's memory holds no plan
+-- HostMemoryError   host memory does not suffice (also a MemoryError)
+-- RaceError         two accesses to one buffer are not ordered by an event
+-- StepError         an action failed while a step ran; ``__cause__`` is what it raised
    +-- StallError    nothing finished for the configured time

Messages are lower case, the value after a colon, then ``hint: `` and the way out.
"""

from __future__ import annotations


class RoundPipeError(Exception):
    """Base class: catch this to catch only us."""


class ConfigError(RoundPipeError, ValueError):
    """A value the user gave cannot be used."""


class ModelError(ConfigError):
    """This model cannot be wrapped or split exactly."""


class DataError(ConfigError):
    """A dataset, or one line of it, cannot be used."""


class DeviceError(ConfigError):
    """A device that was asked for cannot be used."""


class PlanError(RoundPipeError):
    """A schedule breaks at least one rule, or no plan fits the machine."""


class DeadlockError(PlanError):
    """No stream of the schedule can move."""


class NoRoomError(PlanError):
    """A device's memory holds no plan of this model and microbatch."""


class HostMemoryError(RoundPipeError, MemoryError):
    """Host memory does not suffice."""


class RaceError(RoundPipeError):
    """Two accesses to one buffer are not ordered by an event."""


class StepError(RoundPipeError, RuntimeError):
    """An action failed while a step ran; ``__cause__`` is what it raised."""


class StallError(StepError):
    """Nothing finished for the configured time."""
