"""What RUN names, and what is wrong with it, said before a weight is read."""

from __future__ import annotations

import functools
import io
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models.fake_hub import FakeHub, fake_hub

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.finetune.model.fingerprint import fingerprint
from roundpipe.finetune.model.source import locate_model
from roundpipe.finetune.output.run_folder import config_text
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.settings.config import make_config
from roundpipe.finetune.use.opened import load_subject, open_subject, open_tokenizer
from roundpipe.finetune.use.subject import Subject, find_subject, of_run
from roundpipe.models.loading.hub import Hub
from roundpipe.optim import SGD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


class Runs:
    """Folders as runs leave them, without a step of training."""

    def __init__(self, tiny: ModuleType, base: Path, place: Path) -> None:
        self.tiny, self.base, self.place = tiny, base, place

    def config(self, **more: Any) -> Any:
        given = {"model": str(self.base), "dataset": "data.jsonl", "devices": "cpu", **more}
        return make_config(given)[0]

    def adapter(self, folder: Path, **more: Any) -> Path:
        """An adapter of stock peft."""
        settings = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **more}
        wrapped = get_peft_model(self.tiny.tiny_model(), LoraConfig(**settings))
        wrapped.peft_config["default"].base_model_name_or_path = str(self.base)
        wrapped.save_pretrained(folder)
        return folder

    def finished(self, name: str = "out", **state: Any) -> Path:
        """A run that has ended."""
        folder = self.adapter(self.place / name)
        self.tiny.tiny_tokenizer().save_pretrained(folder)
        (folder / "config.yaml").write_text(config_text(self.config()))
        told = {"global_step": 9, "base": fingerprint(locate_model(str(self.base))), **state}
        (folder / "trainer_state.json").write_text(json.dumps(told))
        return folder

    def unfinished(self, *steps: int) -> Path:
        """A run with checkpoints alone."""
        folder = self.place / "out"
        folder.mkdir()
        (folder / "config.yaml").write_text(config_text(self.config()))

        def beside(place: Path) -> None:
            (place / "config.yaml").write_text(config_text(self.config()))
            (place / "trainer_state.json").write_text('{"max_steps": 40}')

        wrapped = get_peft_model(self.tiny.tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
        with RoundPipe(wrapped, devices="cpu") as model:
            optimizer = SGD(model.optim_parameters(), lr=0.1)
            for step in steps:
                model.save_checkpoint(
                    folder / f"checkpoint-{step}",
                    optimizer,
                    beside=beside,
                    about={"step": step, "base": fingerprint(locate_model(str(self.base)))},
                )
        return folder


@pytest.fixture
def runs(tiny: ModuleType, tiny_folder: Path, tmp_path: Path) -> Runs:
    return Runs(tiny, tiny_folder, tmp_path)


def found(given: Any, base: str | None = None) -> tuple[Subject, str]:
    stream = io.StringIO()
    subject = find_subject(str(given), Terminal(stream), base=base)
    return subject, stream.getvalue()


def test_a_model_is_a_folder_or_a_file(tiny_folder: Path) -> None:
    subject, said = found(tiny_folder)
    assert (subject.adapter, subject.run, subject.config, said) == (None, None, None, "")
    assert (subject.folder, subject.name) == (tiny_folder, tiny_folder.name)


def test_an_adapter_brings_the_base_it_names(runs: Runs, tmp_path: Path) -> None:
    folder = runs.adapter(tmp_path / "adapter")
    subject, _ = found(folder)
    assert (subject.adapter, subject.source.given) == (folder, str(runs.base))
    shutil.copy(runs.base / "config.json", folder)  # some trainers leave it there
    assert found(folder)[0].adapter == folder


def test_a_finished_run_is_its_result_with_its_settings(runs: Runs) -> None:
    folder = runs.finished()
    subject, said = found(folder)
    assert (subject.adapter, subject.run, said) == (folder, folder, "")
    assert subject.config == runs.config(output_dir="out")
    assert subject.base_mark == fingerprint(subject.source)


def test_an_unfinished_run_is_its_newest_whole_checkpoint_and_that_is_said(runs: Runs) -> None:
    folder = runs.unfinished(10, 20)
    subject, said = found(folder)
    assert subject.folder == folder / "checkpoint-20"
    assert "out is not finished: its newest checkpoint is taken: checkpoint-20" in said
    assert "(step 20 of 40)" in said
    weights = folder / "checkpoint-20" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    subject, said = found(folder)
    assert subject.folder == folder / "checkpoint-10"
    assert "left out: " in said
    with pytest.raises(ConfigError, match=r"not what was written.*adapter_model.safetensors\nhint"):
        found(folder / "checkpoint-20")
    (folder / "checkpoint-20" / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no manifest.json: its writing was cut off"):
        found(folder / "checkpoint-20")
    subject, _ = found(folder / "checkpoint-10")
    assert (subject.run, subject.folder) == (folder, folder / "checkpoint-10")
    (folder / "checkpoint-10" / "optimizer-00000.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"optimizer-00000.safetensors has 0 bytes"):
        found(folder / "checkpoint-10")


def test_a_checkpoint_that_a_run_does_not_have_is_not_sought_on_the_hub(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs.unfinished(10)
    monkeypatch.chdir(folder.parent)
    missing, there = f"{folder.name}/checkpoint-11", f"{folder.name}/checkpoint-10"
    with pytest.raises(ConfigError, match=f"^no such folder: {missing}\nhint: {there}$"):
        found(missing)


def test_a_run_that_has_saved_nothing_yet_says_how_it_can(runs: Runs) -> None:
    folder = runs.unfinished()
    with pytest.raises(ConfigError, match=r"neither a result nor a checkpoint.*\nhint: .*save-now"):
        found(folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere", r"no such folder: nowhere; as a hub id: .*: nowhere\nhint: "),
        ("./nowhere", r"nothing is called like that"),
        ("a.gguf", r"no such file: a.gguf"),
        ("empty", r"no config.json in: .*empty\nhint: a model folder"),
        ("pickled", r"only pickled weights \(pytorch_model.bin\) in: .*pickled"),
        ("code", r"a model of its own code, which is never run.*own/modeling"),
        ("pickled_adapter", r"no adapter_model.safetensors in: .*\nhint: a pickle"),
        ("nameless", r"does not say which model it is of: .*\nhint: model_name_or_path="),
        ("orphan", r"the base of .*orphan cannot be opened: .*/gone/base.*\nhint: model_name"),
        ("package:no_such_thing/a.gguf", r"package no_such_thing is not installed"),
    ],
)
def test_what_cannot_be_opened_is_said_by_name(
    runs: Runs, tmp_path: Path, given: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "pickled", "code", "pickled_adapter", "nameless", "orphan"):
        (tmp_path / name).mkdir()
    config = {"model_type": "llama"}
    (tmp_path / "pickled" / "config.json").write_text(json.dumps(config))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    own = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own/modeling--x.Y"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(own))
    (tmp_path / "code" / "model.safetensors").write_bytes(b"")
    for name, base in (("pickled_adapter", str(runs.base)), ("nameless", None)):
        told = {"peft_type": "LORA", "base_model_name_or_path": base}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(told))
    (tmp_path / "pickled_adapter" / "adapter_model.bin").write_bytes(b"")
    for name in ("nameless", "orphan"):
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"")
    told = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base"}
    (tmp_path / "orphan" / "adapter_config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=rf"(?s)^(?!model_name).*{words}"):
        found(given)


def test_a_base_that_is_said_wins_and_needs_an_adapter(runs: Runs, tmp_path: Path) -> None:
    told = {"peft_type": "LORA", "base_model_name_or_path": "/gone/base"}
    folder = runs.adapter(tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(json.dumps(told))
    assert found(folder, base=str(runs.base))[0].source.location == str(runs.base)
    with pytest.raises(ConfigError, match=r"no such folder: /gone/other"):
        found(folder, base="/gone/other")
    with pytest.raises(ConfigError, match=r"a whole model.*\nhint: leave out model_name_or_path"):
        found(runs.base, base=str(runs.base))


def opened(subject: Subject, **settings: Any) -> Any:
    values = {"model": subject.source.given, "dataset": "-", "devices": "cpu", **settings}
    config = make_config(values)[0]
    return load_subject(subject, config, Terminal(io.StringIO()), dtype=torch.float32)


def test_another_base_than_it_was_trained_on_is_an_error(
    runs: Runs, tmp_path: Path, tiny: ModuleType
) -> None:
    subject, _ = found(runs.finished(base="0" * 64))
    with pytest.raises(ConfigError, match=r"base is another than .*\nhint: .*model_name_or_path="):
        opened(subject)
    wide = tiny.write_tiny_folder(tmp_path / "wide", hidden_size=64)
    subject, _ = found(subject.folder, base=str(wide))
    with pytest.raises(ConfigError, match=r"^[^:]*out does not fit .*wide: .*\nhint: model_name"):
        opened(subject)


def test_an_opened_subject_computes_what_stock_peft_does_and_trains_nothing(runs: Runs) -> None:
    folder = runs.finished()
    subject, _ = found(folder)
    settings, terminal = runs.config(), Terminal(io.StringIO())
    with open_subject(subject, settings, terminal, environment={}) as live:
        assert not live.model.training
        assert not any(p.requires_grad for p in live.model.parameters())
        assert live.model.optim_parameters() == []
        ids = torch.arange(9)[None]
        with torch.no_grad():
            logits = live.model(input_ids=ids).logits
        assert live.tokenizer.chat_template
        assert (live.dtype, live.is_packed) == (torch.float32, False)
    loaded = load_subject(subject, settings, terminal, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(logits, loaded.model(input_ids=ids).logits, rtol=0, atol=0)


def test_the_tokenizer_is_the_result_s_and_else_the_base_s(runs: Runs, tmp_path: Path) -> None:
    bare = found(runs.adapter(tmp_path / "bare"))[0]
    own = found(runs.finished())[0]
    template = own.folder / "chat_template.jinja" if own.folder else tmp_path
    template.write_text("{{ messages[0]['content'] }}!")
    terminal = Terminal(io.StringIO())
    assert open_tokenizer(own, runs.config(), terminal).chat_template.endswith("!")
    assert "im_start" in open_tokenizer(bare, runs.config(), terminal).chat_template
    said = open_tokenizer(bare, runs.config(chat_template="chatml"), terminal).chat_template
    assert said.startswith("{% for message in messages %}")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, runs: Runs, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with fake_hub() as server:
        adapter = runs.adapter(tmp_path / "uploaded")
        told = json.loads((adapter / "adapter_config.json").read_text())
        told["base_model_name_or_path"] = "own/tiny"
        (adapter / "adapter_config.json").write_text(json.dumps(told))
        runs.tiny.tiny_tokenizer().save_pretrained(adapter)
        server.repos.update({"own/tiny": runs.base, "own/adapter": adapter})
        here = functools.partial(Hub, server.endpoint, tmp_path / "cache", token=False)
        monkeypatch.setattr("roundpipe.models.loading.hub.Hub", here)
        yield server


def test_ids_of_the_hub_name_models_and_adapters(server: FakeHub) -> None:
    model, _ = found("own/tiny")
    assert (model.adapter, model.source.hub_id) == (None, "own/tiny")
    subject, _ = found("own/adapter")
    assert (subject.source.hub_id, subject.given) == ("own/tiny", "own/adapter")
    assert subject.adapter is not None
    assert (subject.adapter / "chat_template.jinja").is_file()
    loaded = opened(subject)
    assert loaded.model.peft_config["default"].base_model_name_or_path == "own/tiny"
    with pytest.raises(ConfigError, match=r"own/nothing"):
        found("own/nothing")


def test_a_checkpoint_that_went_meanwhile_is_told_as_that(tmp_path: Path) -> None:
    gone = tmp_path / "checkpoint-5"
    problem = ConfigError("HF_HUB_OFFLINE is set, and its cache does not have all of it: out")
    with pytest.raises(ConfigError, match="gone meanwhile: ") as caught, of_run("out", folder=gone):
        raise problem
    assert f"{gone}; a run under way drops its older checkpoints" in str(caught.value)
