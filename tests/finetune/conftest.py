"""Fixtures of the application's tests: a tiny model and tiny data on disk, made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types import ModuleType

    from roundpipe.finetune.settings.config import TrainConfig


def _tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tiny_model", Path(__file__).with_name("tiny_model.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The functions of ``tiny_model.py``."""
    return _tiny()


@pytest.fixture(scope="session")
def tiny_folder(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder; not to be written to."""
    folder: Path = tiny.write_tiny_folder(tmp_path_factory.mktemp("tiny"))
    return folder


@pytest.fixture(scope="session")
def tiny_data(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve questions with answers."""
    path: Path = tiny.write_tiny_data(tmp_path_factory.mktemp("data") / "data.jsonl")
    return path


@pytest.fixture
def config_of(tiny_folder: Path, tiny_data: Path, tmp_path: Path) -> Any:
    """A config of a run of three steps in ``tmp_path``; keywords change it."""
    from roundpipe.finetune.settings.config import make_config

    def make(**changes: Any) -> TrainConfig:
        given = {
            "model_name_or_path": str(tiny_folder),
            "dataset": str(tiny_data),
            "output_dir": str(tmp_path / "out"),
            "devices": "cpu",
            "batch_size": 5,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "lora_r": 4,
        }
        return make_config({**given, **changes})[0]

    return make


@pytest.fixture(scope="session")
def _counted() -> dict[Any, Any]:
    return {}


@pytest.fixture(autouse=True)
def _count_once(_counted: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one model have it counted once: that takes half a second."""
    from roundpipe.finetune.forecast import forecast

    count = forecast.profile_of

    def profile_of(wish: Any, *, bits: int, **more: Any) -> Any:
        key = (wish.model, wish.method, wish.config.attn_implementation, bits)
        if key not in _counted:
            _counted[key] = count(wish, bits=bits, **more)
        return _counted[key]

    monkeypatch.setattr(forecast, "profile_of", profile_of)


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The functions of ``small_case.py``."""
    spec = importlib.util.spec_from_file_location(
        "small_case", Path(__file__).with_name("small_case.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
