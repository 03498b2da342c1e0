"""The notebook of the Trainer runs from its first cell to its last, here with a tiny model."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[3] / "examples" / "trainer.ipynb"

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def cells() -> list[str]:
    """The code of the cells, in order."""
    book: Any = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    book: Any = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert not any(cell.get("outputs") for cell in book["cells"])


def test_its_cells_run_in_order(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *rest = cells()
    names = {node.targets[0].id for node in ast.parse(first).body}  # type: ignore[attr-defined]
    assert names == {"MODEL", "STEPS"}
    scope: dict[str, Any] = {"MODEL": str(tiny_folder), "STEPS": 4}
    for number, code in enumerate(rest):
        exec(compile(code, f"cell {number}", "exec"), scope)
    assert scope["loss_after"] < scope["loss_before"]
    assert [step for step, _ in scope["losses"].seen] == [1, 2, 3, 4]
    assert scope["result"].global_step == 4
    assert "  after: " in capsys.readouterr().out
    files = {path.name for path in Path("out-notebook").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= files
