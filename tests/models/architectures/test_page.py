"""The page on architectures says what the catalogue and the last whole run say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[3]


def load_script():
    spec = importlib.util.spec_from_file_location(
        "architectures_page", ROOT / "scripts" / "architectures_page.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_is_what_the_script_writes():
    script = load_script()
    assert script.PAGE.read_text() == script.page(), "run scripts/architectures_page.py"


def test_every_row_of_the_catalogue_has_been_compared_and_no_other(tiny_models, found_before):
    _, rows = tiny_models.catalogue()
    assert found_before.keys() == rows.keys()


def test_each_model_type_of_the_lists_of_transformers_is_a_row_or_is_left_out_with_a_reason(
    tiny_models,
):
    from transformers.models.auto import modeling_auto

    catalogue, rows = tiny_models.catalogue()
    known = {row.model_type for row in rows.values()}
    left = {name for names in catalogue["left_out"].values() for name in names}
    assert known.isdisjoint(left)
    listed = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    assert listed == known | left


def test_seventy_architectures_and_more_are_equal_in_loss_logits_and_gradients(
    comparing, found_before
):
    equal = {
        entry["class"]
        for entry in found_before.values()
        if entry.get("compared", {}).get(comparing.TRAINING) in ("bits", "close")
    }
    assert len(equal) >= 150


def test_a_row_that_is_no_more_than_close_says_why(tiny_models, found_before):
    _, rows = tiny_models.catalogue()
    for name, entry in found_before.items():
        results = entry.get("compared", {}).values()
        assert ("close" in results) == bool(rows[name].close), name
