"""Every code block in the docs runs, every example loads, the quickstart's data is as claimed."""

from __future__ import annotations

import importlib.util
import json
import operator
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAPERS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
QUICKSTART = ROOT / "examples" / "quickstart.jsonl"
STEP = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")
RESULT_OF = {"+": operator.add, "-": operator.sub, "x": operator.mul, "/": operator.floordiv}


def blocks(language: str) -> list[object]:
    """Every fenced block of one language in the docs, as parameters named by file and line."""
    found: list[object] = []
    for path in PAPERS:
        text = path.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            found.append(pytest.param(match[1], id=f"{path.relative_to(ROOT)}:{line}"))
    return found


def quickstart_samples() -> list[dict[str, str]]:
    return [json.loads(line) for line in QUICKSTART.read_text().splitlines()]


@pytest.mark.parametrize("code", blocks("python"))
def test_a_python_block_in_the_docs_runs(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def test_the_readme_has_a_library_example_of_about_twelve_lines() -> None:
    first, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert 10 <= first.count("\n") <= 14


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_an_example_is_a_valid_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe.finetune.config import load_config

    monkeypatch.chdir(ROOT)
    config, notes = load_config([str(path)])
    assert notes == []
    for entry in config.dataset:
        assert Path(entry.path).is_file()


def test_quickstart_answers_are_right_and_in_one_style() -> None:
    for sample in quickstart_samples():
        working, _, answer = sample["answer"].partition(". Answer: ")
        steps = [STEP.fullmatch(step) for step in working.split(", ")]
        for step in steps:
            assert step is not None, sample
            left, sign, right, result = step.groups()
            assert RESULT_OF[sign](int(left), int(right)) == int(result), sample
            assert sign != "/" or int(left) % int(right) == 0, sample
        assert steps[-1] is not None
        assert steps[-1][4] == answer, sample


def test_quickstart_questions_differ() -> None:
    questions = [sample["question"] for sample in quickstart_samples()]
    assert len(set(questions)) == len(questions) == 184


@pytest.mark.slow
def test_quickstart_has_at_most_12000_tokens_with_the_chat_template() -> None:
    from transformers import AutoTokenizer

    from roundpipe.finetune.config import load_config

    config, _ = load_config([str(ROOT / "examples" / "quickstart.yaml")])
    package, _, file = config.model_name_or_path.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)  # not imported: it wants what we do not install
    assert found is not None
    assert found.submodule_search_locations is not None
    tokenizer = AutoTokenizer.from_pretrained(found.submodule_search_locations[0], gguf_file=file)
    tokens = 0
    for sample in quickstart_samples():
        chat = [
            {"role": "user", "content": sample["question"]},
            {"role": "assistant", "content": sample["answer"]},
        ]
        tokens += len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
    assert tokens <= 12_000
