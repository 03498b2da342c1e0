"""Names and signatures that users write against: a change here is a change for them.

After an intended one: `pytest tests/test_public_api.py --update-golden`, and a line in
CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

import pytest

import roundpipe

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = """
AutoRoundPipe ConfigError DataError DeadlockError DeviceError DevicePool GradScaler HostMemoryError
ModelError ModelExecutePlan ModelTimer NoRoomError OptimizerCtx PlanError RaceError RoundPipe
RoundPipeError RoundPipePackedData RoundPipeRunConfig RoundPipeTrainer SavedCheckpoint StallError
StepError StepResult __version__ doing_recompute get_recompute_data optim plan save_for_recompute
sim wrap_model_to_roundpipe
"""


def written(function: object) -> str:
    """Parameters with their kinds and defaults; types are mypy's to hold."""
    assert callable(function)
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=Default(parameter.default)
            if is_config(parameter.default)
            else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def is_config(default: object) -> bool:
    return isinstance(default, roundpipe.RoundPipeRunConfig)


class Default:
    """A default that is an object: its repr would repeat every field."""

    def __init__(self, value: object) -> None:
        self.text = f"{type(value).__name__}()"

    def __repr__(self) -> str:
        return self.text


def public_members(owner: type) -> list[str]:
    """What our classes add for users; fields of a dataclass stand in ``__init__``."""
    fields = (
        {field.name for field in dataclasses.fields(owner)}
        if dataclasses.is_dataclass(owner)
        else set()
    )
    ours = [base for base in owner.__mro__ if base.__module__.startswith("roundpipe.")]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    added = sorted(names - fields)
    return added if owner is roundpipe.StepResult else ["__init__", *added]


def described(owner: type) -> str:
    lines = []
    for name in public_members(owner):
        member = inspect.getattr_static(owner, name)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        lines.append(f"  {name}{written(member) if inspect.isroutine(member) else ''}")
    return "\n".join([owner.__name__, *lines, ""])


def test_the_public_names_are_these() -> None:
    assert roundpipe.__all__ == sorted(roundpipe.__all__)
    assert roundpipe.__all__ == sorted(NAMES.split())


@pytest.mark.parametrize("name", roundpipe.__all__)
def test_a_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(roundpipe, name) is not None
    assert name in dir(roundpipe)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RoundPip'"):
        _ = roundpipe.RoundPip  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert roundpipe.__version__ == version("roundpipe-tune")


def test_signatures_are_these(golden: Callable[[str, str], None]) -> None:
    owners = (
        roundpipe.RoundPipe,
        roundpipe.RoundPipeTrainer,
        roundpipe.RoundPipeRunConfig,
        roundpipe.ModelExecutePlan,
        roundpipe.StepResult,
        roundpipe.DevicePool,
        roundpipe.optim.AdamW,
    )
    golden("public_api.txt", "\n".join(described(owner) for owner in owners))


def test_the_names_of_the_public_rooms_are_these(golden: Callable[[str, str], None]) -> None:
    rooms = (roundpipe.optim, roundpipe.plan, roundpipe.sim)
    golden(
        "public_names.txt",
        "\n".join(" ".join([f"{room.__name__}:", *sorted(room.__all__)]) for room in rooms) + "\n",
    )


@pytest.mark.parametrize("room", ["optim", "plan", "sim"])
def test_everything_in_a_public_room_says_what_it_is(room: str) -> None:
    module = getattr(roundpipe, room)
    for name in module.__all__:
        member = getattr(module, name)
        if inspect.isclass(member) or inspect.isroutine(member):
            assert inspect.getdoc(member), f"{room}.{name}"
