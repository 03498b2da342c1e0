"""What a call takes of its caller's tensors: copies, on the host."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from roundpipe.engine.graph import Given, own_copy
from roundpipe.engine.microbatch import RoundPipePackedData


def test_tensors_of_a_card_come_to_the_host_before_a_call_goes_on():
    """A device's streams do not wait for the caller's, and nothing goes from card to card."""
    with FakeTensorMode():
        x, packed = (
            torch.ones(3, device="cuda:0", requires_grad=True),
            torch.ones(2, device="cuda:1"),
        )
        given = Given.of((x,), {"more": [RoundPipePackedData([packed, packed])]})
        (copied,) = given.args
        assert copied.device.type == "cpu"
        assert not copied.requires_grad
        assert [each.device.type for each in given.kwargs["more"][0]] == ["cpu", "cpu"]
        assert given.leaves == (x,)


def test_copies_have_memory_of_their_own():
    x = torch.ones(3)
    copied, same = own_copy((x, "word"))
    x.fill_(2.0)
    assert copied.tolist() == [1.0, 1.0, 1.0]
    assert same == "word"
