"""What the system's tool prints, and what it prints in place of numbers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from roundpipe.device.nvidia_smi import (
    CardState,
    Process,
    Slowed,
    card_states,
    processes,
    run_tool,
    what_slows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def printing(text: str | None):
    """A tool that knows the fields of every driver and no other."""

    def run(command: Sequence[str]) -> str | None:
        assert command[0] == "nvidia-smi"
        is_old = any("power.limit" in word or "compute-apps" in word for word in command)
        return text if is_old else None

    return run


def answering(**answers: str):
    """A tool that answers questions in which a word stands, and refuses all others."""

    def run(command: Sequence[str]) -> str | None:
        asked = command[1].replace(".", "_")
        return next((text for word, text in answers.items() if word in asked), None)

    return run


def test_power_limits_come_by_place_on_the_bus() -> None:
    text = "00000000:01:00.0, 250.00, 450.00\n00000001:C1:00.0, 450.00, 450.00\n"
    assert card_states(printing(text)) == {
        "0000:01:00.0": CardState(250.0, 450.0),
        "0001:c1:00.0": CardState(450.0, 450.0),
    }


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]"])
def test_words_in_place_of_numbers_are_not_known(word: str) -> None:
    states = card_states(printing(f"00000000:01:00.0, {word}, {word}\n"))
    assert states == {"0000:01:00.0": CardState(None, None)}
    found = processes(printing(f"00000000:01:00.0, 7, C:\\tools\\x.exe, {word}\n"))
    assert found == {"0000:01:00.0": [Process(7, "x.exe", None)]}


def test_what_newer_fields_say_is_asked_apart() -> None:
    power = "00000000:01:00.0, 450.00, 450.00\n00000000:02:00.0, 450.00, 450.00\n"
    more = "00000000:01:00.0, Disabled, 3\n00000000:02:00.0, Enabled, [N/A]\n"
    assert card_states(answering(power_limit=power, persistence_mode=more)) == {
        "0000:01:00.0": CardState(450, 450, is_kept_ready=False, lost_words=3),
        "0000:02:00.0": CardState(450, 450, is_kept_ready=True),
    }


@pytest.mark.parametrize("name", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_what_slows_a_card_is_asked_in_the_words_of_old_and_new_drivers(name: str) -> None:
    told = (
        "00000000:01:00.0, 87, Active, Active, Not Active\n"
        "00000000:02:00.0, 61, Not Active, Not Active, Not Active\n"
        "00000000:03:00.0, [N/A], Not Active, Not Active, Active\n"
    )
    assert what_slows(answering(**{name: told})) == {
        "0000:01:00.0": Slowed(("its heat",), 87.0),
        "0000:02:00.0": Slowed((), 61.0),
        "0000:03:00.0": Slowed(("the power supply's alarm",), None),
    }
    assert what_slows(answering()) == {}


def test_processes_come_with_name_and_bytes() -> None:
    text = "00000000:01:00.0, 42, /usr/bin/python3, 1024\n00000000:01:00.0, 43, x, 1\n"
    assert processes(printing(text)) == {
        "0000:01:00.0": [Process(42, "python3", 2**30), Process(43, "x", 2**20)]
    }


def test_nobody_is_not_the_same_as_not_known() -> None:
    assert processes(printing("")) == {}
    assert processes(printing(None)) is None
    assert card_states(printing(None)) is None


def test_lines_of_another_shape_are_left_out() -> None:
    text = "No devices were found\n00000000:01:00.0, 1, 2, 3\n"
    assert card_states(printing(text)) == {}
    assert processes(printing("No running processes found\n")) == {}


def test_a_tool_that_is_missing_or_fails_gives_none() -> None:
    assert run_tool(["there-is-no-such-tool"]) is None
    assert run_tool([sys.executable, "-c", "raise SystemExit(9)"]) is None
    assert run_tool([sys.executable, "-c", "print(1)"]) == "1\n"
