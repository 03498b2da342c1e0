"""Each thing that cannot be run exactly is refused, with its place and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe.errors import ModelError
from roundpipe.models.refusals import refuse_unsupported


class Marked(nn.Parameter):
    pass


def with_own_class():
    module = nn.Linear(2, 2)
    module.weight = Marked(torch.ones(2, 2))
    return module


CASES = {
    "sparse gradients are not supported": lambda: nn.Embedding(4, 2, sparse=True),
    "a lazy module has no parameters yet": lambda: nn.LazyLinear(3),
    "on the meta device": lambda: nn.Linear(2, 2, device="meta"),
    "a parameter of a class of its own": with_own_class,
    "a scripted module": lambda: torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("reason", CASES)
def test_it_is_refused_with_its_place_and_a_hint(reason):
    with pytest.raises(ModelError, match=reason) as caught:
        refuse_unsupported(nn.Sequential(nn.Identity(), CASES[reason]()))
    assert "1" in str(caught.value)
    assert "\nhint: " in str(caught.value)


def test_parameters_on_a_device_are_refused_with_the_line_to_write():
    module = nn.Linear(2, 2, device="meta")

    class Elsewhere(torch.Tensor):
        is_meta = False
        device = torch.device("cuda:0")

    module._parameters["weight"] = module.weight.data.as_subclass(Elsewhere)
    with pytest.raises(ModelError, match=r"is on cuda:0\nhint: .*model\.cpu\(\)"):
        refuse_unsupported(module)


def test_norms_are_legal_with_and_without_running_statistics():
    refuse_unsupported(
        nn.Sequential(
            nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3)
        )
    )
