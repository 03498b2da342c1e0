from pathlib import Path
from typing import Any

import pytest
import yaml

from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.model_card import Card, card_text, write_card
from roundpipe.finetune.output.usage import Result

HUB = ModelSource("a/b@v1", "a/b", revision="v1", hub_id="a/b")
LORA = {"r": 16, "target_modules": ["q_proj"]}


def card(source: ModelSource = HUB, *, kind: Any = "adapter", **fields: Any) -> Card:
    names = ("peft", "model_class")
    of_result = {name: fields.pop(name) for name in names if name in fields}
    if kind == "adapter":
        of_result.setdefault("peft", LORA)
    return Card(Result("out", source, **of_result), kind, **fields)


def head(text: str) -> dict[str, Any]:
    _, found, _ = text.split("---\n", maxsplit=2)
    values: dict[str, Any] = yaml.safe_load(found)
    return values


def test_the_head_says_what_the_hub_reads() -> None:
    told = card(datasets=["x/y", "x/y", "z/w"], tags=["lora"])
    assert head(card_text(told)) == {
        "base_model": "a/b",
        "base_model_relation": "adapter",
        "datasets": ["x/y", "z/w"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["roundpipe", "lora"],
    }


@pytest.mark.parametrize("kind", ["model", "merged"])
def test_a_whole_model_is_one_of_transformers(kind: str) -> None:
    values = head(card_text(card(kind=kind, model_class="Gemma3ForConditionalGeneration")))
    assert values["library_name"] == "transformers"
    assert values["base_model_relation"] == "finetune"
    assert values["pipeline_tag"] == "image-text-to-text"


def test_a_base_that_is_not_of_the_hub_is_not_in_the_head(tmp_path: Path) -> None:
    text = card_text(card(ModelSource("./base", "./base")))
    assert not {"base_model", "base_model_relation", "license"} & head(text).keys()


@pytest.mark.parametrize(
    ("text", "license_"),
    [
        ("---\nlicense: apache-2.0\nlanguage: en\n---\n# B\n", {"license": "apache-2.0"}),
        (
            "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "mine", "license_link": "LICENSE"},
        ),
        ("# B\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: [mit, x]\n---\n", {}),
        ("---\nlicense: {\n---\n", {}),
        ("---\n- license\n---\n", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_the_license_is_that_of_the_bases_own_card_if_it_has_one(
    text: str | None, license_: dict[str, str], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    values = head(card_text(card(base_folder=tmp_path)))
    assert {k: v for k, v in values.items() if k.startswith("license")} == license_


def test_it_tells_settings_data_losses_and_every_tool() -> None:
    text = card_text(
        card(
            summary="B · LoRA r=16",
            settings={"target_modules": ["q_proj", "v|proj"], "seed": 42},
            data=["10 samples"],
            losses=["training: 2 at step 1"],
            notes=["Trained over weights in 4 bits."],
        )
    )
    for line in (
        "# b, fine-tuned",
        "B · LoRA r=16",
        "- Trained over weights in 4 bits.",
        "| `target_modules` | q_proj, v\\|proj |",
        "| `seed` | 42 |",
        "- 10 samples",
        "- training: 2 at step 1",
        "roundpipe chat out",
        "### vLLM",
        "### llama.cpp",
        "Not as it is: its engine does not run adapters. `roundpipe merge` makes one model of it "
        "first.",
    ):
        assert line in text.splitlines(), line
    assert "transformers 5." in text


def test_a_readme_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# mine\n")
    assert not write_card(tmp_path, card())
    assert (tmp_path / "README.md").read_text() == "# mine\n"


def test_a_card_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    assert write_card(tmp_path, card(summary="first"))
    assert write_card(tmp_path, card(summary="second"))
    text = (tmp_path / "README.md").read_text()
    assert "second" in text
    assert "first" not in text.partition("## Use")[0]
