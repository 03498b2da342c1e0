"""Every field of the installed TrainingArguments and SFTConfig is in one list."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from roundpipe.finetune.trainer.argument_fields import FILLED, NEEDLESS, REFUSED, TRANSLATED

transformers = pytest.importorskip("transformers")

LISTS = (TRANSLATED, NEEDLESS, REFUSED)


def test_every_field_of_training_arguments_is_in_one_list() -> None:
    _check(transformers.TrainingArguments)


def test_every_field_of_sft_config_is_in_one_list() -> None:
    _check(pytest.importorskip("trl").SFTConfig)


def test_no_field_is_in_two_lists() -> None:
    assert not TRANSLATED.keys() & NEEDLESS.keys()
    assert not TRANSLATED.keys() & REFUSED.keys()
    assert not NEEDLESS.keys() & REFUSED.keys()
    assert NEEDLESS.keys() >= set(FILLED)


def test_what_nobody_set_is_not_said_to_be_needless() -> None:
    from roundpipe.finetune.trainer.arguments import read_arguments

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for args in (
            transformers.TrainingArguments("out"),
            pytest.importorskip("trl").SFTConfig("out", use_cpu=True),
        ):
            notes = read_arguments(args, "some/model", environment={}).notes
            assert not [note for note in notes if "not" in note], notes


def _check(kind: type) -> None:
    names = {each.name for each in dataclasses.fields(kind)}
    unknown = [name for name in sorted(names) if not any(name in listed for listed in LISTS)]
    assert not unknown, f"fields in no list of argument_fields.py: {unknown}"
