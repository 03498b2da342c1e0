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


@pytest.mark.parametrize("numel", [0, 1, CHUNK, 3 * CHUNK + 5])
def test_every_element_is_updated_once(numel, monkeypatch):
    parts, real = [], chunks._Work.do

    def do(work, o, numbers, part):
        parts.append(part)
        real(work, o, numbers, part)

    monkeypatch.setattr(chunks._Work, "do", do)
    o = operands(numel)
    update_in_chunks_(o, AdamWConfig(lr=1.0, weight_decay=0).numbers(1))
    assert torch.allclose(o.param, torch.tensor(-1.0))
    assert [i for part in parts for i in (part.start, part.stop)] == sorted(
        [0, *(2 * list(range(CHUNK, numel, CHUNK))), numel] if numel else []
    )


def test_the_number_of_threads_changes_no_bit(threads):
    found = []
    for count in (1, 2, 3):
        threads(count)
        torch.manual_seed(0)
        o = operands(2 * CHUNK + 77)
        o.param.normal_()
        o.grad.normal_()
        for step in (1, 2, 3):
            update_in_chunks_(o, AdamWConfig(lr=1e-2).numbers(step))
        found.append(o.param)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
