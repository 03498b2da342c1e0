"""Loading into segments gives transformers' own model, bit for bit, and leaves no second copy."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.models.loading_cases import edit_config, edit_files, same_state, save, unpacked
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.loading import cache
from roundpipe.models.loading.load import open_causal_lm
from roundpipe.models.loading.recipes import Placed
from roundpipe.store.build import build_store
from roundpipe.store.frozen import packed_in

KINDS = ["llama", "qwen3", "gemma3", "gpt2", "phi3", "qwen3_moe", "mixtral", "gpt_oss"]
KINDS += ["deepseek_v3"]


@pytest.fixture(autouse=True)
def _no_bars():
    """Bars run a thread that outlives a test."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of a kind and its folder, made once: not to be written to."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = (folder, save(folder, kind))
        return made[kind]

    return get


def plain(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto"} | settings)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_is_the_one_that_transformers_loads(saved, kind):
    folder, _ = saved(kind)
    assert len(list(folder.glob("*.safetensors"))) > 1
    expected = plain(folder)
    loaded = open_causal_lm(folder).load().model
    assert same_state(expected, loaded)
    assert loaded.config.to_dict() == expected.config.to_dict()
    assert loaded.generation_config == expected.generation_config
    assert not any(module.training for module in loaded.modules())
    ids = torch.arange(6)[None] + 3
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, "float16"])
def test_weights_are_cast_on_the_way(saved, kind, dtype):
    folder, _ = saved(kind)
    loaded = open_causal_lm(folder, dtype=dtype).load().model
    assert same_state(plain(folder, dtype=dtype), loaded)


def test_modules_that_stay_in_fp32_do(tmp_path, monkeypatch):
    save(tmp_path, "llama", dtype=torch.float32)
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    loaded = open_causal_lm(tmp_path, dtype=torch.bfloat16).load().model
    assert loaded.model.layers[0].input_layernorm.weight.dtype == torch.float32
    assert same_state(plain(tmp_path, dtype=torch.bfloat16), loaded)


def test_the_dtype_comes_from_the_files_where_the_config_has_none(tmp_path):
    save(tmp_path, "llama")
    edit_config(tmp_path, dtype=None)
    assert open_causal_lm(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["gemma3", "gpt2"])
def test_what_is_tied_is_one_parameter_in_one_segment(saved, kind):
    folder, _ = saved(kind)
    loaded = open_causal_lm(folder).load()
    model = loaded.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    names = [name for base in loaded.bases for name in base.segment.layout.names]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


def test_a_tied_weight_that_is_in_the_files_twice_is_tied_if_both_are_equal(tmp_path):
    model = save(tmp_path, "gemma3")
    head = model.model.embed_tokens.weight.detach().clone()
    edit_files(tmp_path, lambda t: {**t, "lm_head.weight": head} if "model.norm.weight" in t else t)
    loaded = open_causal_lm(tmp_path).load().model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same_state(plain(tmp_path), loaded)


def test_a_tied_weight_that_is_in_the_files_twice_stays_apart_if_they_differ(tmp_path, caplog):
    model = save(tmp_path, "gemma3")
    head = model.model.embed_tokens.weight.detach() + 1
    edit_files(tmp_path, lambda t: {**t, "lm_head.weight": head} if "model.norm.weight" in t else t)
    loaded = open_causal_lm(tmp_path).load().model
    assert "tied weights differ" in caplog.text
    assert torch.equal(loaded.lm_head.weight, head)
    assert same_state(plain(tmp_path), loaded)


def test_a_tied_weight_may_be_in_the_files_under_its_other_name(tmp_path):
    save(tmp_path, "gemma3")
    rename = {"model.embed_tokens.weight": "lm_head.weight"}
    edit_files(tmp_path, lambda t: {rename.get(name, name): v for name, v in t.items()})
    loaded = open_causal_lm(tmp_path).load().model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert same_state(plain(tmp_path), loaded)


def test_files_of_the_base_model_alone_lack_a_head_that_is_not_tied(tmp_path):
    model = save(tmp_path / "whole", "qwen3")
    model.model.save_pretrained(tmp_path / "base")
    edit_config(tmp_path / "base", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ConfigError, match=r"1 weights of Qwen3ForCausalLM .*: lm_head.weight"):
        open_causal_lm(tmp_path / "base")


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "llama"])
def test_what_is_only_stacked_or_renamed_is_read_straight_into_its_place(saved, kind):
    folder, _ = saved(kind)
    opened = open_causal_lm(folder)
    assert {type(recipe) for recipe in opened._recipes()} == {Placed}


def test_saving_a_loaded_model_writes_the_names_that_it_was_loaded_from(tmp_path):
    save(tmp_path / "one", "mixtral", shard="1GB")
    loaded = open_causal_lm(tmp_path / "one").load().model
    loaded.save_pretrained(tmp_path / "two")
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "qwen3_moe"])
def test_each_layer_has_one_segment_that_the_store_takes_as_it_is(saved, kind):
    folder, _ = saved(kind)
    loaded = open_causal_lm(folder).load()
    spec = causal_lm_spec(loaded.model)
    assert len(loaded.bases) == len(spec.layers)
    segments = [base.segment for base in loaded.bases]
    layers = build_store(
        [layer.tensors for layer in spec.layers], trainable=set(), bases=loaded.bases
    )
    assert not loaded.bases
    held = [layer.held.base.segment for layer in layers if layer.held is not None]
    assert held == segments
    for layer in layers:
        for name, view in layer.slot_layout.view(uploaded(layer)).items():
            assert torch.equal(view, dict(spec.layers[layer.index].tensors)[name]), name


def uploaded(layer):
    slot = torch.zeros(layer.slot_layout.num_bytes, dtype=torch.uint8)
    for piece in layer.upload_pieces():
        slot[piece.offset : piece.offset + piece.num_bytes] = piece.source[: piece.num_bytes]
    return slot


def test_progress_counts_every_byte_of_the_files_once(saved):
    folder, _ = saved("qwen3_moe")
    opened, told = open_causal_lm(folder), []
    opened.load(progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (opened.num_file_bytes, opened.num_file_bytes)
    assert opened.num_file_bytes == sum(
        t.nbytes for path in folder.glob("*.safetensors") for t in load_file(path).values()
    )


def test_a_model_that_cannot_be_split_without_values_is_loaded_all_the_same(saved, monkeypatch):
    from roundpipe.errors import ModelError
    from roundpipe.models.loading import skeleton

    def refuse(*_):
        raise ModelError("depends on values")

    folder, _ = saved("llama")
    monkeypatch.setattr(skeleton, "record", refuse)
    loaded = open_causal_lm(folder).load()
    assert same_state(plain(folder), loaded.model)
    assert len(loaded.bases) == 2  # of the blocks; what is outside is ordinary memory


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"hidden_size": 128}, "not of the model's shape"),
        ({"num_hidden_layers": 3}, "not in the files"),
        ({"model_type": "no such model"}, "does not know this type of model: no such model"),
        (
            {"vocab_size": 97},
            r"not of the model's shape: lm_head.weight: \[96, 64\] in the files, \[97",
        ),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, fields, word):
    save(tmp_path, "llama")
    edit_config(tmp_path, **fields)
    with pytest.raises(ConfigError, match=word) as raised:
        open_causal_lm(tmp_path)
    assert "\nhint: " in str(raised.value)


def test_an_expert_that_is_missing_is_refused_before_anything_is_read(tmp_path):
    save(tmp_path, "qwen3_moe")
    gone = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit_files(tmp_path, lambda t: {name: v for name, v in t.items() if name != gone})
    with pytest.raises(ConfigError, match=r"cannot be converted: model\.layers\.1"):
        open_causal_lm(tmp_path)


def test_weights_that_the_model_does_not_know_are_left_out_with_a_warning(tmp_path, caplog):
    save(tmp_path, "llama", shard="1GB")
    edit_files(tmp_path, lambda t: {**t, "visual.weight": torch.ones(3)})
    open_causal_lm(tmp_path).load()
    assert "1 weights of the files are not used: visual.weight" in caplog.text


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.1.attn.bias"),
        ("deepseek_v3", "model.layers.61.mlp.gate.weight"),  # its class says so
    ],
)
def test_what_older_files_hold_and_models_compute_is_left_out_silently(
    tmp_path, caplog, kind, name
):
    save(tmp_path, kind, shard="1GB")
    edit_files(tmp_path, lambda t: {**t, name: torch.ones(1)})
    open_causal_lm(tmp_path).load()
    assert "not used" not in caplog.text


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_few_bits_that_the_config_does_not_tell_of_are_refused(tmp_path, kind, dtype):
    save(tmp_path, kind, shard="1GB")  # they would be taken for weights, nearly all of them zero

    def cast(tensors):
        return {n: t.to(dtype) if n.endswith("gate_proj.weight") else t for n, t in tensors.items()}

    edit_files(tmp_path, cast)
    with pytest.raises(ConfigError, match=r"config does not say how: .*gate_proj\.weight"):
        open_causal_lm(tmp_path)


def test_weights_that_are_not_finite_are_named_when_the_model_is_wrapped(tmp_path):
    model = save(tmp_path, "llama")
    bad = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(bad)[0, 0] = torch.nan
    with pytest.raises(ModelError, match=f"1 of its weights are not finite: {bad}"):
        causal_lm_spec(model)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_adapters_that_begin_with_values_of_4_bit_weights_are_refused_with_the_reason(saved):
    folder, _ = saved("llama")
    loaded = open_causal_lm(folder, quantization="nf4").load()
    model = peft.get_peft_model(
        loaded.model, peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    )
    with pytest.raises(ModelError, match=r"lora_magnitude_vector.*\nhint: adapters that begin"):
        causal_lm_spec(model, packed_in(loaded.bases))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size"),  # announced in one line, told in the next
        ({"hidden_size": 66}, "66"),
        ({"dtype": "float8_e4m3fn"}, r"float8_e4m3fn"),
    ],
)
def test_a_config_that_is_refused_is_so_in_two_lines_that_say_why(tmp_path, fields, words):
    save(tmp_path, "llama")
    edit_config(tmp_path, **fields)
    with pytest.raises(ConfigError, match=words) as raised:
        open_causal_lm(tmp_path)
    told, hint = str(raised.value).split("\n")
    assert not told.endswith(":")
    assert hint.startswith("hint: ")


def test_no_folder_and_no_id_is_refused():
    with pytest.raises(ConfigError, match="not an id of the model hub"):
        open_causal_lm("/no/such/folder/anywhere")


def test_a_dtype_that_is_none_is_refused(saved):
    folder, _ = saved("llama")
    with pytest.raises(ConfigError, match="dtype: not one"):
        open_causal_lm(folder, dtype="int8")


# ---- packed while it is loaded


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt2", "gpt_oss"])
def test_matrices_of_blocks_are_packed_and_nothing_else(saved, kind):
    folder, model = saved(kind)
    opened = open_causal_lm(folder, quantization="nf4")
    loaded = opened.load()
    packed = {name for base in loaded.bases for name in base.packed}
    assert packed
    assert not any(
        word in n for n in packed for word in ("embed", "lm_head", "wte", "norm", "rout")
    )
    assert not any(n.endswith((".gate.weight", "bias")) for n in packed)
    assert opened.num_bytes == sum(base.segment.layout.num_bytes for base in loaded.bases)
    for name, value in unpacked(loaded).items():
        exact = model.get_parameter(name)
        assert value.dtype == exact.dtype
        if name in packed:
            error = (value.float() - exact.float()).norm() / exact.float().norm()
            assert 0.03 < error < 0.15, name
        else:
            assert torch.equal(value, exact), name
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_stand_ins_of_packed_weights_take_no_memory(saved):
    folder, _ = saved("llama")
    model = open_causal_lm(folder, quantization="nf4").load().model
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.shape == (96, 64)
    assert weight.untyped_storage().nbytes() == weight.element_size()


# ---- mapped from segment files


def files_of(folder):
    return sorted(folder.glob("*/*.segment"))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_moe"])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_mapped_weights_are_those_that_are_loaded_into_memory(saved, tmp_path, kind, quantization):
    folder, _ = saved(kind)
    opened = [open_causal_lm(folder, quantization=quantization) for _ in range(3)]
    expected = unpacked(opened[0].load())
    for each in opened[1:]:  # written, then found
        loaded = each.load_mapped(cache_folder=tmp_path / "cache")
        found = unpacked(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
        for base in loaded.bases:
            base.let_go(0, base.segment.layout.num_bytes)
        again = unpacked(loaded)
        assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_segment_files_are_written_once(saved, tmp_path, monkeypatch):
    from roundpipe.models.loading import load

    folder, _ = saved("llama")
    open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    monkeypatch.setattr(load, "fill_layer", None)
    told = []
    open_causal_lm(folder).load_mapped(
        cache_folder=tmp_path / "cache", progress=lambda *each: told.append(each)
    )
    assert told[-1][0] == told[-1][1]


def test_a_repack_that_broke_off_goes_on_where_it_ended(saved, tmp_path, monkeypatch):
    from roundpipe.models.loading import load

    folder, _ = saved("llama")
    expected = unpacked(open_causal_lm(folder).load())
    real, filled = load.fill_layer, []

    def fill(layer, count):
        if len(filled) == 2:
            raise KeyboardInterrupt
        filled.append(layer[0].name)
        return real(layer, count)

    monkeypatch.setattr(load, "fill_layer", fill)
    with pytest.raises(KeyboardInterrupt):
        open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert len(files_of(tmp_path / "cache")) == 2
    (tmp_path / "cache" / "left.part").touch()
    monkeypatch.setattr(load, "fill_layer", lambda *each: (filled.append(1), real(*each))[1])
    loaded = open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert len(filled) == len(files_of(tmp_path / "cache")) == 4
    found = unpacked(loaded)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_torn_segment_file_is_made_anew(saved, tmp_path, caplog):
    folder, _ = saved("llama")
    first = open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    expected = {name: value.clone() for name, value in unpacked(first).items()}
    del first
    one, other, *_ = files_of(tmp_path / "cache")
    content = bytearray(one.read_bytes())
    content[100] ^= 255
    one.write_bytes(content)
    shutil.copyfile(one, other)  # of another layer
    loaded = open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert caplog.text.count("not used and made anew") == 2
    found = unpacked(loaded)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("what", ["weights", "config", "dtype", "quantization"])
def test_other_files_or_settings_have_segment_files_of_their_own(tmp_path, what):
    save(tmp_path / "model", "llama", shard="1GB")
    settings = {}
    open_causal_lm(tmp_path / "model").load_mapped(cache_folder=tmp_path / "cache")
    if what == "weights":
        edit_files(tmp_path / "model", lambda t: {name: v * 2 for name, v in t.items()})
    elif what == "config":
        edit_config(tmp_path / "model", rms_norm_eps=1e-3)
    else:
        settings = {"dtype": "float32"} if what == "dtype" else {"quantization": "nf4"}
    loaded = open_causal_lm(tmp_path / "model", **settings)
    expected = unpacked(loaded.load())
    found = open_causal_lm(tmp_path / "model", **settings)
    found = unpacked(found.load_mapped(cache_folder=tmp_path / "cache"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_full_disk_is_found_before_anything_is_written(saved, tmp_path, monkeypatch):
    folder, _ = saved("llama")

    class Usage:
        free = 1000

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(ConfigError, match=r"do not fit the disk.*\nhint: cache_folder=FOLDER"):
        open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert not files_of(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_refused(saved, tmp_path):
    folder, _ = saved("llama")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be kept here.*\nhint: cache_folder=FOLDER"):
        open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "file")


def test_a_complete_cache_needs_no_room_on_the_disk(saved, tmp_path, monkeypatch):
    folder, _ = saved("llama")
    open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")

    class Usage:
        free = 0

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: Usage)
    loaded = open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert same_state(plain(folder), loaded.model)


def test_a_complete_cache_may_be_on_a_disk_that_can_only_be_read(saved, tmp_path, monkeypatch):
    folder, _ = saved("llama")
    open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    may_open = Path.open

    def read_only(path, mode="r", *args, **kwargs):
        if tmp_path in path.parents and set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return may_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", read_only)
    loaded = open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    assert same_state(plain(folder), loaded.model)
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    files_of(tmp_path / "cache")[0].unlink()
    with pytest.raises(ConfigError, match=r"\nhint: cache_folder=FOLDER"):
        open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")


def test_a_cache_folder_says_what_it_holds(saved, tmp_path, caplog):
    caplog.set_level("INFO", logger="roundpipe")
    folder, _ = saved("llama")
    open_causal_lm(folder).load_mapped(cache_folder=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name.startswith("llama")
    told = json.loads((kept / "manifest.json").read_text())
    assert [each["file"] for each in told["layers"]] == [
        path.name for path in files_of(tmp_path / "cache")
    ]
    assert "GB of segment files, once" in caplog.text


@pytest.mark.parametrize("name", ["../../up", "a/b", "", "..", "x\0y", "n" * 500])
def test_a_model_s_name_makes_one_plain_folder(name):
    folder = cache.cache_folder(Path("/cache"), name, "0" * 64)
    assert folder.parent == Path("/cache")
    assert "\0" not in str(folder)
    assert len(folder.name) < 120


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_with_adapters_frozen_weights_stay_where_they_were_mapped(saved, tmp_path, quantization):
    import peft

    folder, _ = saved("qwen3_moe")
    opened = open_causal_lm(folder, quantization=quantization, dtype=torch.float32)
    loaded = opened.load_mapped(cache_folder=tmp_path)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(loaded.model, lora)
    spec = causal_lm_spec(model, packed_in(loaded.bases))
    layers = build_store([layer.tensors for layer in spec.layers], bases=loaded.bases)
    own = sum(layer.weights.layout.num_bytes for layer in layers)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert trained <= own < 2 * trained
    assert all(piece.let_go for layer in layers for piece in layer.upload_pieces()[-1:])


def test_an_id_that_is_not_at_hand_says_what_to_do():
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set.*: no-such/model\nhint: "):
        open_causal_lm("no-such/model")


def test_progress_and_fit_are_known_before_anything_is_loaded(saved):
    folder, model = saved("llama")
    opened = open_causal_lm(folder)
    assert opened.num_bytes >= sum(p.nbytes for p in model.parameters())
    assert opened.fits_memory
    assert all(parameter.is_meta for parameter in opened.model.parameters())
