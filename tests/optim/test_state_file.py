import errno
import re

import pytest
import safetensors
import torch

from roundpipe.errors import RoundPipeError
from roundpipe.optim import state_file
from roundpipe.optim.state_file import (
    Content,
    DamagedError,
    check_state,
    checksum_of,
    read_state,
    write_state,
)

TENSORS = {
    "w.step": torch.tensor(3.0),
    "w.m": torch.arange(6, dtype=torch.int8).view(2, 3),
    "w.v": torch.linspace(0, 1, 35).view(5, 7).t(),
    "b.m": torch.arange(5).bfloat16(),
    "b.n": torch.arange(3, dtype=torch.int64),
    "e.m": torch.empty(0, 4),
    "e.on": torch.tensor([True, False]),
}
CONTENT = Content(TENSORS, {"w.mode": "chunks", "b.buffer": None, "b.rate": 0.1})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.safetensors"
    write_state(path, CONTENT)
    return path


def assert_is_content(content):
    assert content.plain == CONTENT.plain
    assert content.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert content.tensors[name].dtype is tensor.dtype
        assert torch.equal(content.tensors[name], tensor)


def test_what_was_written_is_read(path):
    assert_is_content(read_state(path))
    assert check_state(path) == checksum_of(path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_it_is_a_safetensors_file(path):
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_nothing_at_all_is_a_file_too(path):
    write_state(path, Content())
    content = read_state(path)
    assert not content.tensors
    assert not content.plain


def test_a_name_may_look_like_a_checksum(path):
    write_state(path, Content({"00000000": torch.ones(2), "ffffffff": torch.ones(1)}))
    assert set(read_state(path).tensors) == {"00000000", "ffffffff"}


@pytest.mark.parametrize("read", [read_state, check_state])
def test_a_change_of_a_byte_anywhere_is_noticed(path, read):
    whole = path.read_bytes()
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedError, match=re.escape(str(path))):
            read(path)


@pytest.mark.parametrize("read", [read_state, check_state])
def test_a_file_cut_anywhere_or_grown_is_noticed(path, read):
    whole = path.read_bytes()
    for kept in range(0, len(whole), 17):
        path.write_bytes(whole[:kept])
        with pytest.raises(DamagedError):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DamagedError):
        read(path)


@pytest.mark.parametrize("read", [read_state, check_state])
def test_blocks_that_never_reached_the_disk_are_noticed(path, read):
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedError):
        read(path)


def test_a_damaged_file_is_an_error_of_ours():
    assert issubclass(DamagedError, RoundPipeError)


def test_a_write_that_fails_leaves_the_file_as_it_was(path, monkeypatch):
    def full(_tensor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_file, "_bytes_of", full)
    with pytest.raises(OSError, match="No space"):
        write_state(path, Content({"w.m": torch.ones(3)}))
    monkeypatch.undo()
    assert_is_content(read_state(path))
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_large_tensors_are_read_in_pieces(path, monkeypatch):
    monkeypatch.setattr(state_file, "_PIECE", 64)
    tensors = {"a.m": torch.randn(1000), "a.n": torch.randn(7).double()}
    write_state(path, Content(tensors))
    monkeypatch.undo()
    found = read_state(path).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
