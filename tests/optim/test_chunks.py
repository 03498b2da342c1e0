import threading

import pytest
import torch

from roundpipe.optim import chunks
from roundpipe.optim.adamw import AdamWConfig
from roundpipe.optim.chunks import CHUNK, update_in_chunks_
from roundpipe.optim.operands import Moment, Operands


def operands(numel):
    param, grad, m, v = (
        torch.zeros(numel),
        torch.ones(numel),
        torch.zeros(numel),
        torch.zeros(numel),
    )
    return Operands(param=param, grad=grad, first=Moment(m), second=Moment(v, is_signed=False))


def test_threads_share_the_pieces_and_end(monkeypatch):
    seen, real = set(), chunks._Work.do
    both = threading.Barrier(3, timeout=10)

    def do(work, o, numbers, part):
        if threading.get_ident() not in seen:
            seen.add(threading.get_ident())
            both.wait()
        real(work, o, numbers, part)

    monkeypatch.setattr(chunks._Work, "do", do)
    o = operands(20 * CHUNK + 5)
    update_in_chunks_(o, AdamWConfig(lr=1.0, weight_decay=0).numbers(1), threads=3)
    assert len(seen) == 3
    assert torch.allclose(o.param, torch.tensor(-1.0))


def test_no_more_threads_than_pieces(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    o = operands(CHUNK)
    update_in_chunks_(o, AdamWConfig(lr=1.0, weight_decay=0).numbers(1), threads=8)
    assert torch.allclose(o.param, torch.tensor(-1.0))


def test_an_error_in_any_thread_is_raised_and_ends_all(monkeypatch):
    real, done = chunks._Work.do, []

    def do(work, o, numbers, part):
        if part.start >= 5 * CHUNK:
            raise RuntimeError("no")
        done.append(part)
        real(work, o, numbers, part)

    monkeypatch.setattr(chunks._Work, "do", do)
    with pytest.raises(RuntimeError, match="no"):
        update_in_chunks_(operands(50 * CHUNK), AdamWConfig().numbers(1), threads=2)
    assert len(done) <= 5


def test_threads_work_alone_and_leave_the_default_as_it_was(monkeypatch, threads):
    seen, real, default = [], chunks._Work.do, torch.get_num_threads()

    def do(work, o, numbers, part):
        seen.append(torch.get_num_threads())
        real(work, o, numbers, part)

    monkeypatch.setattr(chunks._Work, "do", do)
    threads(default + 2)  # of this thread, and of those born later
    update_in_chunks_(operands(4 * CHUNK), AdamWConfig().numbers(1), threads=2)
    assert set(seen) == {1}
    born = []
    thread = threading.Thread(target=lambda: born.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert born == [torch.get_num_threads()] == [default + 2]
