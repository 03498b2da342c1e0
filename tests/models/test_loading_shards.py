"""Weight files from anywhere: what is sound is read, what is not is refused by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from roundpipe.errors import ConfigError
from roundpipe.models.loading import shards
from roundpipe.models.loading.shards import open_shards, read_header

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_raw(path, header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_sharded(folder, weight_map=None, **files):
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    names = {t: f"{name}.safetensors" for name, tensors in files.items() for t in tensors}
    text = json.dumps({"weight_map": names if weight_map is None else weight_map})
    (folder / INDEX).write_text(text)


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
OUTSIDE = ["../a.safetensors", "/etc/passwd.safetensors", "x/a.safetensors", "..", "", "a.bin", 7]
OUTSIDE += ["..\\a.safetensors", "a\0.safetensors", "C:a.safetensors"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_read_bit_for_bit(tmp_path, dtype):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randint(0, 2, (7, 5)).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.ones((0, 4), dtype=dtype),
    }
    save_file(tensors, tmp_path / FILE)
    found = open_shards(tmp_path).tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = torch.full(tensor.shape, 3).to(dtype)
        found[name].fill(read)
        assert found[name].shape == tuple(tensor.shape)
        assert torch.equal(read.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_a_cast_on_the_way_is_made_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE", 64)
    weight = torch.randn(11, 13)
    save_file({"w": weight}, tmp_path / FILE)
    target = torch.empty(11, 13, dtype=torch.bfloat16)
    stored = open_shards(tmp_path).tensors["w"]
    stored.fill(target)
    assert torch.equal(target, weight.bfloat16())
    pieces = list(stored.pieces(torch.float32))
    assert max(piece.numel() for piece in pieces) == 16
    assert torch.equal(torch.cat(pieces), weight.view(-1))


def test_pieces_do_not_share_memory_that_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_PIECE", 64)
    save_file({"w": torch.arange(64.0)}, tmp_path / FILE)
    pieces = list(open_shards(tmp_path).tensors["w"].pieces(torch.float32))
    assert torch.equal(torch.cat(pieces), torch.arange(64.0))


def test_several_files_are_one_model(tmp_path):
    write_sharded(tmp_path, a={"x": torch.ones(3)}, b={"y": torch.zeros(4)})
    found = open_shards(tmp_path)
    assert [path.name for path in found.files] == ["a.safetensors", "b.safetensors"]
    assert found.num_bytes == 28


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b"not json", "not JSON"),
        ([], "no object"),
        ({"a": 3}, "not one of a tensor"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "not one of a tensor"),
        ({"a": entry(shape=(3,))}, "not those of its shape"),
        ({"a": entry(shape=(2.0,))}, "make no sense"),
        ({"a": entry(shape=(-2, -1))}, "make no sense"),
        ({"a": entry(shape=(True, 2))}, "make no sense"),
        ({"a": entry(offsets=(8, 0))}, "make no sense"),
        ({"a": entry(offsets=(-8, 0))}, "make no sense"),
        ({"a": entry(shape=(1 << 40, 1 << 40), offsets=(0, 1 << 61))}, "not those of its shape"),
        ({"a": entry(offsets=(4, 12))}, "does not begin where another ended"),
        ({"a": entry(), "b": entry()}, "does not begin where another ended"),
        ({"a": entry(shape=(1,), offsets=(0, 4))}, "tells of"),
        ({"a": entry(shape=(9,), offsets=(0, 36))}, "tells of"),
        ({"a": entry(dtype="F4")}, "dtype that is not read"),
        ({"a": entry(dtype=["F32"])}, "dtype that is not read"),
        (b'{"a": {}, "a": {}}', "a key twice: a"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path, header, word):
    write_raw(tmp_path / FILE, header)
    with pytest.raises(ConfigError, match=word) as raised:
        open_shards(tmp_path)
    assert FILE in str(raised.value)
    assert "\nhint: " in str(raised.value)


@pytest.mark.parametrize("kept", [0, 5, 9, 60, -1])
def test_a_file_that_was_cut_short_is_refused(tmp_path, kept):
    save_file({"w": torch.ones(100)}, tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:kept])
    with pytest.raises(ConfigError, match="not a sound safetensors file"):
        open_shards(tmp_path)


def test_a_header_length_beyond_all_sense_allocates_nothing(tmp_path):
    (tmp_path / FILE).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="does not fit"):
        read_header(tmp_path / FILE)


def test_a_file_that_ends_while_it_is_read_is_an_error(tmp_path):
    save_file({"w": torch.ones(100)}, tmp_path / FILE)
    stored = open_shards(tmp_path).tensors["w"]
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-8])
    with pytest.raises(ConfigError, match="the file ended before its tensor"):
        stored.fill(torch.empty(100))


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, name):
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "inner").mkdir()
    write_sharded(tmp_path / "inner", {"x": name})
    with pytest.raises(ConfigError, match=r"a file that is not opened: .*: x: "):
        open_shards(tmp_path / "inner")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/x.safetensors"])
def test_a_config_that_leads_elsewhere_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="outside the model's folder"):
        open_shards(tmp_path, name)


def test_missing_files_are_named(tmp_path):
    write_sharded(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(ConfigError, match=r"2 weight files are missing in: .*: a.safetensors, b"):
        open_shards(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write_sharded(tmp_path, a={"x": torch.ones(1)}, b={"x": torch.ones(1), "y": torch.ones(1)})
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"in two files: .*: x: a.safetensors and b.safetensors"):
        open_shards(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path):
    write_sharded(tmp_path, {"x": "a.safetensors", "z": "a.safetensors"}, a={"x": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"a.safetensors: it lacks what its index names: z"):
        open_shards(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=r"not an index of weights|not JSON"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "only pickled weights.*\nhint: .*save_pretrained"),
        ("adapter_config.json", "an adapter, not a model"),
        ("other.safetensors", "have no index"),
        ("config.json", "no weights"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(tmp_path, file, words):
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=words):
        open_shards(tmp_path)


def test_no_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        open_shards(tmp_path / "none")
