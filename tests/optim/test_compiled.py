import ctypes
import threading

import pytest
import torch

from roundpipe.optim import compiled
from roundpipe.optim.adamw import AdamWConfig
from roundpipe.optim.build import kernel
from roundpipe.optim.compiled import Kernel, KernelError
from roundpipe.optim.operands import Moment, Operands


@pytest.fixture
def loaded():
    found = kernel()
    if not isinstance(found, Kernel):
        pytest.skip(f"no compiled update on this machine: {found}")
    return found


def operands(numel=1000, dtype=torch.float32, **given):
    state = [torch.zeros(numel, dtype=dtype) for _ in range(4)]
    parts = {"param": state[0], "grad": state[1] + 1, "first": Moment(state[2]),
             "second": Moment(state[3], is_signed=False)}  # fmt: skip
    return Operands(**(parts | given))


def test_what_it_cannot_run_is_left_to_others(loaded):
    assert loaded.can_run(operands())
    half = torch.zeros(1000, dtype=torch.bfloat16)
    assert loaded.can_run(operands(param=half, remainder=torch.zeros(1000, dtype=torch.int16)))
    assert loaded.can_run(operands(grad=half.half(), out=half))
    assert not loaded.can_run(operands(dtype=torch.float64))
    assert not loaded.can_run(operands(param=half))
    assert not loaded.can_run(operands(out=half.double()))
    assert not loaded.can_run(operands(first=Moment(half)))
    meta = torch.zeros(1000, device="meta")
    assert not loaded.can_run(operands(grad=meta))


def test_tensors_of_another_size_never_reach_it(loaded):
    numbers = AdamWConfig().numbers(1)
    with pytest.raises(AssertionError):
        loaded.update_(operands(grad=torch.zeros(999)), numbers, threads=1)
    with pytest.raises(AssertionError):
        loaded.update_(operands(grad=torch.zeros(2000)[::2]), numbers, threads=1)
    codes = Moment(torch.zeros(1000, dtype=torch.uint8), torch.zeros(3))
    with pytest.raises(AssertionError):
        loaded.update_(operands(first=codes, second=codes), numbers, threads=1)


def test_any_number_of_threads_will_do(loaded):
    for threads in (-1, 0, 1, 3, 1000):
        o = operands(200_000)
        loaded.update_(o, AdamWConfig(lr=1.0, weight_decay=0).numbers(1), threads=threads)
        assert torch.allclose(o.param, torch.tensor(-1.0))


def test_other_python_threads_run_meanwhile(loaded):
    ticks, done = [0], threading.Event()

    def tick():
        while not done.is_set():
            ticks[0] += 1

    o = operands(30_000_000)
    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    loaded.update_(o, AdamWConfig().numbers(1), threads=1)
    during = ticks[0] - before
    done.set()
    thread.join()
    assert during > 1000


def test_a_library_of_another_version_or_none_is_refused(loaded, monkeypatch, tmp_path):
    with pytest.raises(KernelError, match="it cannot be loaded"):
        Kernel(tmp_path / "nothing.so")
    if not loaded.path.exists():
        pytest.skip("it was built in a temporary folder")

    class Larger(ctypes.Structure):
        _fields_ = (*compiled._Update._fields_, ("more", ctypes.c_int64))

    monkeypatch.setattr(compiled, "_Update", Larger)
    with pytest.raises(KernelError, match="it is of another version"):
        Kernel(loaded.path)
