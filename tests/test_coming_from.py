"""Tables of the docs are true: what other trainers' keys become, which programs take an adapter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("from_trl", "from_llamafactory", "from_axolotl", "from_unsloth")


def rows() -> list[Any]:
    """Each row below "What becomes of what", as (theirs, ours) in parameters."""
    found = []
    for page in PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        table = text.partition("## What becomes of what")[2].partition("\n## ")[0]
        for line in table.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 2 and cells[0].startswith("`"):
                theirs, ours = (cell.replace("\\|", "|") for cell in cells)
                found.append(pytest.param(theirs, ours, id=f"{page}: {theirs[:60]}"))
    return found


def values_in(cell: str) -> dict[str, Any]:
    """The keys in backticks of a cell."""
    spans = [span for span in re.findall(r"`([^`]+)`", cell) if re.match(r"\w+: ", span)]
    return dict(item for span in spans for item in yaml.safe_load(span).items())


@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_a_key_of_another_trainer_becomes_what_the_page_says(
    theirs: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.errors import ConfigError
    from roundpipe.finetune.settings.config import read_layers

    monkeypatch.chdir(tmp_path)
    given = values_in(theirs)
    assert given
    usual = {} if "dataset_name" in given else {"dataset": "d.jsonl"}
    usual |= {} if "model_name" in given else {"model_name_or_path": "m"}
    if ours.startswith("refused"):
        with pytest.raises(ConfigError):
            read_layers({**usual, **given}, {}, lambda _: 1)
        return
    reading = read_layers({**usual, **given}, {}, lambda _: 1)
    made = reading.config.model_dump(mode="json")
    if ours == "not needed":
        assert made == read_layers(usual, {}, lambda _: 1).config.model_dump(mode="json")
    for key, value in values_in(ours).items():
        if key == "dataset":
            (entry,) = made["dataset"]
            assert value == [{name: entry[name] for name in value[0]}]
        else:
            assert made[key] == value, key


def test_whatever_keeps_a_program_from_an_adapter_stands_in_the_docs() -> None:
    from roundpipe.finetune.output.limits import LIMITS

    text = (DOCS / "using.md").read_text(encoding="utf-8")
    names = {name for limit in LIMITS for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", limit.why)}
    assert len(names) > 8
    assert not {name for name in names if name not in text} - {"lora_alpha", "lora_r"}
