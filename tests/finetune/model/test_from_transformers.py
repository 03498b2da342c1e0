import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.from_transformers import load_model, load_tokenizer
from roundpipe.finetune.model.source import locate_model


def test_a_folder_loads_in_the_dtype_that_is_asked_for(tiny_folder: Path) -> None:
    source = locate_model(str(tiny_folder))
    model = load_model(source, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not model.training


def test_the_tokenizer_brings_its_template(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(locate_model(str(tiny_folder)))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_weights_that_the_files_do_not_hold_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "cut"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"1 weights of LlamaForCausalLM.*layers\.1\.mlp\.up_proj"
    ):
        load_model(locate_model(str(folder)), dtype=torch.float32)


def test_a_file_of_weights_that_is_cut_short_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "short"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"(?s)cannot load the model.*hint: .*fetch it again"):
        load_model(locate_model(str(folder)), dtype=torch.float32)


def test_code_of_a_checkpoint_is_never_run(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "own"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(ConfigError, match="code of their own, which is never run"):
        load_model(locate_model(str(folder)), dtype=torch.float32)


def test_a_folder_without_a_tokenizer_says_what_is_missing(
    tiny: ModuleType, tmp_path: Path
) -> None:
    tiny.tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)tokenizer.*hint: .*tokenizer\.json"):
        load_tokenizer(locate_model(str(tmp_path)))


def test_a_model_without_a_causal_head_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "own"))
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5"]}))
    with pytest.raises(ConfigError, match="cannot load the model"):
        load_model(locate_model(str(folder)), dtype=torch.float32)


def test_an_id_that_cannot_be_reached_is_told_in_one_paragraph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoTokenizer

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub") from ConnectionError("refused")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        ConfigError, match=r"(?s)cannot load the tokenizer of a/b.*cannot be reached"
    ):
        load_tokenizer(locate_model("a/b"))


@pytest.mark.parametrize("size", [5, 24, 300])
def test_a_torn_gguf_file_is_told_in_one_paragraph(tmp_path: Path, size: int) -> None:
    header = b"GGUF" + (3).to_bytes(4, "little") + (2).to_bytes(8, "little") * 2
    (tmp_path / "m.gguf").write_bytes((header + b"\x05" * 300)[:size])
    with pytest.raises(ConfigError, match=r"(?s)cannot load the tokenizer of .*\nhint: .*fetch it"):
        load_tokenizer(locate_model(str(tmp_path / "m.gguf")))
