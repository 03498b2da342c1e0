"""The lists of foreign keys: each key in one of them, and none of the trainers' keys in none."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.batch import BATCH
from roundpipe.finetune.settings.derive import RULES
from roundpipe.finetune.settings.foreign import axolotl, llamafactory, transformers, trl, unsloth
from roundpipe.finetune.settings.translate import FIELDS, KNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAINERS = (transformers, trl, llamafactory, axolotl, unsloth)
TABLES: dict[str, Mapping[str, Any]] = {
    "aliases": keys.ALIASES,
    "derived": keys.DERIVED,
    "needless": keys.NEEDLESS,
    "refused": keys.REFUSED,
    "unfolded": keys.UNFOLDED,
}
# Of a package's own class: what a config file cannot set.
INTERNAL = {"_n_gpu", "_VALID_DICT_FIELDS"}


def test_every_key_stands_in_one_table_only() -> None:
    seen: dict[str, str] = {}
    for table, entries in TABLES.items():
        for key in entries:
            assert key not in FIELDS, f"{key} is ours and in {table}"
            assert key not in seen, f"{key} is in {seen[key]} and {table}"
            seen[key] = table


def test_a_key_of_several_trainers_stands_once() -> None:
    names = [
        key
        for trainer in TRAINERS
        for table in (trainer.NEEDLESS, trainer.REFUSED)
        for listed in table.values()
        for key in listed.split()
    ]
    assert [key for key, count in Counter(names).items() if count > 1] == []


def test_every_alias_leads_to_a_key_that_is_known() -> None:
    assert set(keys.ALIASES.values()) <= FIELDS | set(keys.NEEDLESS)


def test_every_derived_key_has_a_rule_and_sets_fields_of_ours() -> None:
    for key, fields in keys.DERIVED.items():
        assert set(fields) <= FIELDS, key
    assert set(keys.DERIVED) & BATCH == BATCH - {"micro_batch_size"}
    assert set(RULES) == set(keys.DERIVED) - BATCH
    assert set(keys.TO_PEFT) <= set(keys.DERIVED)


def test_neutral_values_are_of_refused_keys() -> None:
    assert set(keys.NEUTRAL) <= set(keys.REFUSED)


def test_every_entry_has_a_sentence_and_keys_in_order() -> None:
    for trainer in TRAINERS:
        for table in (trainer.NEEDLESS, trainer.REFUSED):
            for sentence, listed in table.items():
                assert sentence, listed
                assert sentence[-1] != "."
                assert listed.split(), sentence


@pytest.mark.parametrize("trainer", ["llamafactory", "axolotl", "unsloth"])
def test_every_key_of_a_trainer_is_in_a_list(trainer: str) -> None:
    text = (Path(__file__).parent / "known_keys" / f"{trainer}.txt").read_text()
    names = [word for line in text.splitlines() if line[:1] != "#" for word in line.split()]
    assert len(names) > 90
    assert [name for name in names if name not in KNOWN] == []


@pytest.mark.parametrize(
    ("package", "file", "classes"),
    [
        ("transformers", "training_args.py", {"TrainingArguments"}),
        ("transformers", "training_args_seq2seq.py", {"Seq2SeqTrainingArguments"}),
        ("trl", "trainer/base_config.py", None),
        ("trl", "trainer/sft_config.py", {"SFTConfig"}),
        ("trl", "trainer/model_config.py", {"ModelConfig"}),
        ("trl", "trainer/dpo_config.py", None),
        ("trl", "trainer/grpo_config.py", None),
        ("trl", "trainer/kto_config.py", None),
        ("trl", "trainer/reward_config.py", None),
        ("trl", "trainer/rloo_config.py", None),
        ("trl", "scripts/utils.py", {"ScriptArguments", "DatasetMixtureConfig"}),
    ],
)
def test_every_field_of_an_installed_trainer_is_in_a_list(
    package: str, file: str, classes: set[str] | None
) -> None:
    """Read, not imported: an import takes seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    names = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert names, file
    assert sorted(names - KNOWN - INTERNAL) == []


def test_the_page_of_keys_is_current() -> None:
    script = Path(__file__).parents[3] / "scripts" / "config_docs.py"
    spec = importlib.util.spec_from_file_location("config_docs", script)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), (
        "run: python scripts/config_docs.py"
    )
