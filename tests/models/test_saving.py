"""What was trained is saved as its checkpoint was: stock libraries load it with nothing missing."""

from __future__ import annotations

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models import multimodal_cases
from tests.models.loading_cases import save as save_text
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging as transformers_logging

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from roundpipe.models import saving
from roundpipe.models.loading import write_shards
from roundpipe.models.loading.shards import open_shards
from roundpipe.optim import AdamW

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

TEXT = ["mixtral"]
SEES = ["gemma3", "qwen2_vl", "llama4"]
SLOW = [
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "phi3",
    "mistral3",
    "gemma4",
    "qwen3_vl",
    "qwen3_vl_moe",
]


@pytest.fixture(autouse=True)
def _no_bars():
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


def saved(folder, kind, *, old_names=False):
    """Save a tiny model with transformers, if asked for with the names of older files."""
    if kind not in multimodal_cases.CONFIGS:
        return save_text(folder, kind, dtype=torch.float32)
    model = multimodal_cases.model(kind)
    if old_names:
        model._weight_conversions = get_model_conversion_mapping(model)
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def on_disk(folder):
    """Every tensor of the files of a folder."""
    return {name: each for path in folder.glob("*.safetensors") for name, each in _load(path)}


def _load(path):
    return load_file(path).items()


def stock(folder, like):
    """Load with transformers alone; nothing may be missing, unexpected or of another shape."""
    model, info = type(like).from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    if type(like).__name__.startswith("Llama4"):
        multimodal_cases.mend(model)
    return model.eval()


def trained(trainer):
    """Train one step so that every weight that text reaches moves; returns the logits after it."""
    optimizer = AdamW(trainer.optim_parameters(), lr=0.01)
    batch = multimodal_cases.batch()
    trainer.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2))
    trainer.step(optimizer)
    trainer.eval()
    with torch.no_grad():
        return trainer(input_ids=batch["input_ids"]).logits


def logits(model):
    with torch.no_grad():
        return model(input_ids=multimodal_cases.batch()["input_ids"], use_cache=False).logits


@pytest.mark.parametrize(
    "kind", [*TEXT, *SEES, *(pytest.param(kind, marks=pytest.mark.accept) for kind in SLOW)]
)
def test_a_checkpoint_that_was_trained_has_the_names_and_shapes_it_had(tmp_path, kind):
    source, result = tmp_path / "source", tmp_path / "result"
    model = saved(source, kind, old_names=kind == "gemma3")
    with RoundPipe.from_pretrained(source, devices="cpu") as trainer:
        assert type(trainer.model) is type(model)
        after = trained(trainer)
        trainer.save_pretrained(result)
    before, now = on_disk(source), on_disk(result)
    assert before.keys() == now.keys()
    assert all(before[name].shape == now[name].shape for name in now)
    assert any(not torch.equal(before[name], now[name]) for name in now)
    loaded = stock(result, model)
    assert torch.allclose(logits(loaded), after, atol=1e-5)
    assert not torch.allclose(logits(loaded), logits(model.eval()), atol=1e-3)
    config = json.loads((result / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert (result / "generation_config.json").is_file()


@pytest.mark.parametrize("kind", [pytest.param("gemma3", marks=pytest.mark.accept), "qwen3_vl_moe"])
def test_an_adapter_reloads_with_stock_peft_into_the_checkpoint_s_own_class(tmp_path, kind):
    source, result = tmp_path / "source", tmp_path / "result"
    model = saved(source, kind)
    lora = peft.LoraConfig(target_modules=["q_proj", "o_proj"], exclude_modules=".*vis.*", r=2)
    lora.init_lora_weights = "gaussian"
    with RoundPipe.from_pretrained(source, peft_config=lora, devices="cpu") as trainer:
        after = trained(trainer)
        trainer.save_pretrained(result)
    assert {path.name for path in result.glob("*.safetensors")} == {"adapter_model.safetensors"}
    loaded = peft.PeftModel.from_pretrained(stock(source, model), result)
    answer = loaded.load_adapter(result, "again")
    assert not answer.missing_keys
    assert not answer.unexpected_keys
    assert torch.allclose(logits(loaded.eval()), after, atol=1e-5)


class Asked(dict):
    """Weights that remember which of them were asked for."""

    def __init__(self, given):
        super().__init__(given)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers.:UserWarning")  # stock peft's
@pytest.mark.parametrize("rows", [0, 3])
def test_an_adapter_of_a_model_with_more_words_brings_their_embeddings(tmp_path, rows):
    model = save_text(tmp_path / "source", "llama")
    base = stock(tmp_path / "source", model)
    base.resize_token_embeddings(base.config.vocab_size + rows)
    lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, lora)
    weights = Asked(adapted.state_dict())
    saving.save_adapter(tmp_path / "ours", adapted, weights)
    adapted.save_pretrained(tmp_path / "stock")
    ours, theirs = (
        load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("ours", "stock")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert any("embed_tokens" in name for name in ours) == (rows > 0)
    assert len(weights.names) == len(ours)  # the rest is never made


def test_a_tied_weight_is_written_once_and_one_that_came_apart_twice(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    saving.save_model(tmp_path, model, model.state_dict())
    assert "lm_head.weight" not in on_disk(tmp_path)
    assert "model.embed_tokens.weight" in on_disk(tmp_path)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    saving.save_model(tmp_path, model, model.state_dict())
    files = on_disk(tmp_path)
    assert torch.equal(files["lm_head.weight"], files["model.embed_tokens.weight"] + 1)


def test_views_of_one_buffer_save_right_and_files_of_before_are_gone(tmp_path):
    model = save_text(tmp_path, "mixtral", dtype=torch.bfloat16, shard="20KB")
    assert len(list(tmp_path.glob("model-*"))) > 2
    state = model.state_dict()
    flat = torch.cat([tensor.flatten() for tensor in state.values()])
    parts = flat.split([tensor.numel() for tensor in state.values()])
    views = {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}
    saving.save_model(tmp_path, model, views)
    files = {path.name for path in tmp_path.glob("model*")}
    assert files == {"model.safetensors"}
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < size - sum(tensor.nbytes for tensor in on_disk(tmp_path).values()) < 20_000
    loaded = stock(tmp_path, model).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in state.items())


def test_several_files_hold_what_their_index_says(tmp_path):
    model = save_text(tmp_path / "source", "qwen3_moe", dtype=torch.bfloat16)
    saving.save_model(tmp_path / "out", model, model.state_dict(), shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert open_shards(tmp_path / "out").tensors.keys() == on_disk(tmp_path / "source").keys()
    stock(tmp_path / "out", model)
    with RoundPipe(model, devices="cpu") as trainer:
        trainer.save_pretrained(tmp_path / "asked", max_shard_size="30KB", safe_serialization=True)
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert sorted(path.name for path in (tmp_path / "asked").iterdir()) == names
        with pytest.raises(ConfigError, match=r"safe_serialization=False\nhint: torch\.save"):
            trainer.save_pretrained(tmp_path / "asked", safe_serialization=False)
        with pytest.raises(ConfigError, match=r"is no size: 'a lot'\nhint: '5GB'"):
            trainer.save_pretrained(tmp_path / "asked", max_shard_size="a lot")


def test_what_is_saved_is_the_newest_though_the_next_call_would_read_older_weights(tmp_path):
    model = save_text(tmp_path / "source", "llama", dtype=torch.bfloat16)
    with RoundPipe.from_pretrained(tmp_path / "source", devices="cpu") as trainer:
        optimizer = AdamW(trainer.optim_parameters(), lr=0.1)
        for _ in range(2):
            trainer.forward_backward(input_kwargs=multimodal_cases.batch())
            trainer.step(optimizer, is_async=True)
        trainer.save_pretrained(tmp_path / "out")
        newest = trainer.state_dict()
        stale = {n: tensor.clone() for n, tensor in trainer.model.state_dict().items()}
    assert any(not torch.equal(newest[name], stale[name]) for name in newest)
    loaded = stock(tmp_path / "out", model).state_dict()
    assert all(torch.equal(loaded[name], newest[name]) for name in newest)


def test_weights_in_4_bits_are_saved_in_16(tmp_path):
    source = tmp_path / "source"
    model = save_text(source, "llama", dtype=torch.bfloat16)
    settings = {"quantization": "nf4", "devices": "cpu"}
    with RoundPipe.from_pretrained(source, **settings) as trainer:
        trainer.save_pretrained(tmp_path / "out")
        newest = trainer.state_dict()
    loaded = stock(tmp_path / "out", model).state_dict()
    assert all(torch.equal(loaded[name], newest[name]) for name in newest)
    assert loaded["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16


def test_a_group_that_cannot_be_converted_alone_is_converted_with_all(monkeypatch):
    model = multimodal_cases.model("qwen3_vl")
    whole = saving._reverted

    def crossing(model, state):
        made = whole(model, state)
        return made if len(state) > 30 else dict(list(made.items())[1:])

    monkeypatch.setattr(saving, "_reverted", crossing)
    model = saving._with_mapping(model)
    assert len(saving._groups(model, saving._stripped(model))) == 1


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    like = {name: torch.empty(3, device="meta") for name in ("a", "b")}

    def breaks():
        yield {"a": torch.ones(3)}
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_shards.write_shard(tmp_path / "model.safetensors", like, breaks())
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_the_folder_as_it_was(tmp_path):
    model = save_text(tmp_path, "llama", dtype=torch.bfloat16)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(KeyError):
        saving.save_model(tmp_path, model, state)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_what_another_library_holds_in_few_bits_is_refused_with_the_way_out(tmp_path):
    model = multimodal_cases.model("qwen2_vl")
    model.hf_quantizer = object()
    with pytest.raises(ConfigError, match=r"in few bits: Qwen2VL.*\nhint: close\(\)"):
        saving.save_model(tmp_path, model, model.state_dict())


def test_a_module_that_is_not_of_transformers_is_refused_with_the_way_out(tmp_path):
    with (
        RoundPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), devices="cpu") as trainer,
        pytest.raises(ConfigError, match=r"Sequential\nhint: torch\.save\(model\.state_dict"),
    ):
        trainer.save_pretrained(tmp_path)


def test_a_model_that_was_never_loaded_gets_no_prefix_that_its_class_may_have_had(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    more = {"layer_types": ["full_attention"]}
    config = transformers.Qwen3_5TextConfig(**sizes, **heads, **more)
    model = transformers.Qwen3_5ForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    saving.save_model(tmp_path / "ours", model, model.state_dict())
    assert on_disk(tmp_path / "ours").keys() == on_disk(tmp_path / "theirs").keys()
