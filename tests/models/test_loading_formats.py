"""Weights in fewer bits are read as transformers unpacks them, or refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.loading_cases import edit_config, edit_files, same_state, save, unpacked
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from transformers.utils import logging as transformers_logging

from roundpipe.errors import ConfigError
from roundpipe.models.loading.formats import as_weights
from roundpipe.models.loading.load import open_causal_lm
from roundpipe.models.loading.shards import open_shards


@pytest.fixture(autouse=True)
def _no_bars():
    """Bars run a thread that outlives a test."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def to_fp8(tensors, *, scale_dtype=torch.float32, scales=True):
    torch.manual_seed(1)
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor
        if tensor.dim() == 2 and "proj" in name:
            made[name] = tensor.to(torch.float8_e4m3fn)
            blocks = [-(-size // 16) for size in tensor.shape]
            if scales:
                made[f"{name}_scale_inv"] = (torch.rand(blocks) + 0.01).to(scale_dtype)
            made[name.replace(".weight", ".activation_scale")] = torch.ones(())
    return made


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_is_unpacked_as_transformers_does(tmp_path, kind, scale_dtype):
    save(tmp_path, kind)
    edit_files(tmp_path, lambda tensors: to_fp8(tensors, scale_dtype=scale_dtype))
    edit_config(tmp_path, quantization_config=FP8)
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked)
    loaded = open_causal_lm(tmp_path).load().model
    assert same_state(expected, loaded)
    assert not hasattr(loaded.config, "quantization_config")


def test_fp8_in_blocks_that_reach_beyond_the_matrix_is_unpacked_by_its_formula(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(40, 70).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 5) + 0.1
    save_file({"a.weight": weight, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    config = {**FP8, "weight_block_size": [16, 16]}
    stored = as_weights(config, open_shards(tmp_path).tensors)
    assert list(stored) == ["a.weight"]
    read = torch.empty(40, 70)
    stored["a.weight"].fill(read)
    wide = scale.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :70]
    assert torch.equal(read, weight.float() * wide)


def test_fp8_with_one_scale_is_unpacked_by_its_formula(tmp_path):
    weight = torch.randn(6, 10).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = as_weights({"quant_method": "fp8"}, open_shards(tmp_path).tensors)
    read = torch.empty(6, 10)
    stored["a.weight"].fill(read)
    assert torch.equal(read, weight.float() * 0.5)


@pytest.mark.parametrize("scale", [None, torch.ones(3, 3), torch.ones(7), torch.ones(0, 2)])
def test_fp8_without_scales_that_fit_is_refused(tmp_path, scale):
    tensors = {"a.weight": torch.randn(64, 64).to(torch.float8_e4m3fn)}
    if scale is not None:
        tensors["a.weight_scale_inv"] = scale
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"scales.*a\.weight.*\nhint: .*16 bits"):
        as_weights(FP8, open_shards(tmp_path).tensors)


def to_mxfp4(tensors):
    torch.manual_seed(1)
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = tensor.shape
            sizes = (experts, columns, rows // 32)
            made[f"{name}_blocks"] = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8)
            made[f"{name}_scales"] = torch.randint(110, 135, sizes, dtype=torch.uint8)
        else:
            made[name] = tensor
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mxfp4_is_unpacked_as_transformers_does(tmp_path, dtype):
    save(tmp_path, "gpt_oss")
    edit_files(tmp_path, to_mxfp4)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)
    )
    loaded = open_causal_lm(tmp_path, dtype=dtype).load().model
    assert same_state(expected, loaded)


def test_mxfp4_can_be_packed_anew_while_it_is_loaded(tmp_path):
    save(tmp_path, "gpt_oss")
    edit_files(tmp_path, to_mxfp4)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    bases = open_causal_lm(tmp_path, quantization="nf4").load().bases
    assert "model.layers.0.mlp.experts.gate_up_proj" in bases[1].packed


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((2, 4, 2, 16), None), ((2, 4, 2, 16), (2, 4, 3)), ((4, 2, 16), (4, 2)), ((), ())],
)
def test_mxfp4_without_scales_that_fit_is_refused(tmp_path, blocks, scales):
    tensors = {"a_blocks": torch.zeros(blocks, dtype=torch.uint8)}
    if scales is not None:
        tensors["a_scales"] = torch.zeros(scales, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"4 bits without their scales: a_blocks"):
        as_weights({"quant_method": "mxfp4"}, open_shards(tmp_path).tensors)


@pytest.fixture(scope="module", params=[True, False], ids=["double", "single"])
def four_bit(request, tmp_path_factory):
    """A folder that bitsandbytes wrote, and the model that it was written from."""
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("four_bit")
    save(plain, "llama")
    asked = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=request.param,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=asked)
    model.save_pretrained(folder)
    return folder, model


def test_a_4_bit_checkpoint_of_bitsandbytes_is_taken_as_it_is(four_bit):
    folder, model = four_bit
    loaded = open_causal_lm(folder).load()
    values = unpacked(loaded)
    entries = {entry: base for base in loaded.bases for entry in base.segment.layout.names}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if state is None:
            assert torch.equal(values[name], parameter), name
            continue
        base = entries[name]
        assert torch.equal(base.segment.views[name], parameter.data.view(-1)), name
        assert torch.equal(base.segment.views[f"{name}.scales"], state.absmax), name
        if state.nested:
            scales = base.segment.views[f"{name}.scales_of_scales"]
            assert torch.equal(scales, state.state2.absmax), name
            assert base.segment.views[f"{name}.offset"].item() == state.offset.item(), name
        assert base.packed[name].shape == tuple(state.shape)
    assert not hasattr(loaded.model.config, "quantization_config")


def test_a_4_bit_checkpoint_unpacks_to_the_weights_that_bitsandbytes_makes(four_bit):
    from bitsandbytes import functional

    folder, model = four_bit
    values = unpacked(open_causal_lm(folder).load())
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if state is None or state.shape[-1] % 64:  # else its own rows are wrong on the CPU
            continue
        exact = functional.dequantize_4bit(parameter.data, state)
        assert torch.equal(values[name], exact), name


def test_a_4_bit_checkpoint_can_be_mapped(four_bit, tmp_path):
    folder, _ = four_bit
    expected = unpacked(open_causal_lm(folder).load())
    loaded = open_causal_lm(folder).load_mapped(cache_folder=tmp_path)
    found = unpacked(loaded)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def change_state(four_bit, tmp_path):
    """Copy the 4-bit folder with one tensor changed; returns the stored weights' maker."""
    folder, _ = four_bit
    name = "model.layers.0.mlp.up_proj.weight"

    def change(part, make):
        tensors = load_file(folder / "model.safetensors")
        key = name + part
        if key not in tensors:
            pytest.skip("only with double quantisation")
        made = make(tensors.pop(key))
        if made is not None:
            tensors[key] = made
        save_file(tensors, tmp_path / "model.safetensors")
        return lambda: as_weights(
            {"quant_method": "bitsandbytes", "load_in_4bit": True}, open_shards(tmp_path).tensors
        )

    return change


STATE = ".quant_state.bitsandbytes__nf4"


def told(**changes):
    """What makes another state of one: its JSON with fields changed."""

    def make(tensor):
        fields = {**json.loads(bytes(tensor.tolist())), **changes}
        return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    return make


@pytest.mark.parametrize(
    ("part", "make"),
    [
        (".absmax", lambda _: None),
        (".absmax", lambda t: t[:-1].clone()),
        (".nested_absmax", lambda _: None),
        (".quant_map", lambda _: None),
        (".quant_map", lambda t: t + 1),
        (".nested_quant_map", lambda t: t + 1),
        ("", lambda t: t[:-1].clone()),
        (STATE, told(shape=[1 << 40, 1 << 40])),
        (STATE, told(shape=[-1, 5])),
        (STATE, told(blocksize=63)),
        (STATE, told(blocksize="x")),
        (STATE, told(dtype="float8")),
        (STATE, told(nested_blocksize=100, nested_dtype="float32", nested_offset=0)),
        (STATE, lambda t: t[:7].clone()),
    ],
)
def test_a_4_bit_state_that_makes_no_sense_is_refused(change_state, part, make):
    read = change_state(part, make)
    with pytest.raises(ConfigError, match=r"weights in 4 bits .*up_proj.*\nhint: "):
        read()


def test_4_bits_in_rows_where_the_model_has_columns_are_refused(tmp_path):
    save(tmp_path / "plain", "gpt2")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=BitsAndBytesConfig(load_in_4bit=True)
    )
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(ConfigError, match=r"rows where the model has columns|model's shape"):
        open_causal_lm(tmp_path / "packed")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits of bitsandbytes"),
        ({"quant_method": None}, "None"),
    ],
)
def test_other_forms_are_refused_by_name(config, named):
    with pytest.raises(ConfigError, match=rf"not read: {named}\nhint: .*quantization=nf4"):
        as_weights(config, {})


def test_4_bits_that_the_config_does_not_tell_of_are_refused(four_bit, tmp_path):
    folder, _ = four_bit
    with pytest.raises(ConfigError, match="without a quantization_config"):
        as_weights(None, open_shards(folder).tensors)


def test_a_quantized_model_that_is_not_read_is_refused_from_its_folder(tmp_path):
    save(tmp_path, "llama")
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="gptq"):
        open_causal_lm(tmp_path)
