"""The pictures in the documentation are what their script renders."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_picture_is_up_to_date() -> None:
    path = ROOT / "scripts" / "render_pictures.py"
    spec = importlib.util.spec_from_file_location("render_pictures", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, picture in script.pictures().items():
        committed = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert committed == picture, f"run: python scripts/render_pictures.py ({name})"
