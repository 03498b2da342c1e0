from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.derive import BATCH
from roundpipe.finetune.settings.translate import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLES: dict[str, Mapping[str, Any]] = {
    "aliases": keys.ALIASES,
    "derived": keys.DERIVED,
    "needless": keys.NEEDLESS,
    "later": keys.LATER,
    "refused": keys.REFUSED,
}


def test_every_key_stands_in_one_table_only() -> None:
    seen: dict[str, str] = {}
    for table, entries in TABLES.items():
        for key in entries:
            assert key not in FIELDS, f"{key} is ours and in {table}"
            assert key not in seen, f"{key} is in {seen[key]} and {table}"
            seen[key] = table


def test_every_alias_leads_to_a_key_that_is_known() -> None:
    targets = set(keys.ALIASES.values())
    assert targets <= FIELDS | set(keys.LATER) | set(keys.NEEDLESS)


def test_every_derived_key_sets_fields_of_ours() -> None:
    for key, fields in keys.DERIVED.items():
        assert set(fields) <= FIELDS, key
    assert set(keys.DERIVED) & BATCH == BATCH - {"micro_batch_size"}


def test_every_entry_has_a_sentence() -> None:
    ways_out = [way for _, way in keys.LATER.values()]
    sentences = [*keys.NEEDLESS.values(), *keys.REFUSED.values(), *ways_out]
    assert all(len(sentence.split()) >= 1 and sentence[-1] != "." for sentence in sentences)


def test_tables_are_in_order_so_that_a_key_is_found() -> None:
    for name in ("needless", "later", "refused"):
        assert list(TABLES[name]) == sorted(TABLES[name]), name
