import pytest
import torch
from torch import nn

from roundpipe.optim import SGD, Adam, AdamW
from roundpipe.optim.by_parameter import ByParameter
from roundpipe.optim.layered import as_layered


def made(kind):
    return kind([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD])
def test_ours_are_layered_themselves(kind):
    optimizer = made(kind)
    assert as_layered(optimizer) is optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_torchs_are_stepped_parameter_by_parameter(kind):
    assert isinstance(as_layered(made(kind)), ByParameter)


def test_others_say_why_they_step_as_a_whole():
    assert as_layered(made(torch.optim.LBFGS)) == "LBFGS may mix parameters"


def test_a_subclass_that_changes_only_step_steps_as_a_whole():
    class Changed(AdamW):
        def step(self, closure=None):
            return super().step(closure)

    class Both(Changed):
        def update_(self, *arguments, **options):
            return super().update_(*arguments, **options)

    class Renamed(AdamW):
        pass

    for _ in range(2):  # torch changes the classes of optimizers that it has seen
        assert as_layered(made(Changed)) == "Changed changes step and not update_"
        for kind in (AdamW, Renamed, Both):
            optimizer = made(kind)
            assert as_layered(optimizer) is optimizer


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("kind", [AdamW, torch.optim.AdamW])
def test_hooks_wait_for_one_step_of_all(kind, when):
    optimizer = made(kind)
    handle = getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
    assert as_layered(optimizer) == "hooks wait for its step"
    handle.remove()
    assert not isinstance(as_layered(optimizer), str)
    module = torch.optim.Optimizer.__module__
    register = f"register_optimizer_step_{when}_hook"
    handle = getattr(__import__(module, fromlist=[register]), register)(lambda *_: None)
    try:
        assert as_layered(optimizer) == "hooks wait for its step"
    finally:
        handle.remove()


def test_a_scheduler_is_no_reason_to_step_as_a_whole():
    optimizer = made(torch.optim.SGD)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert isinstance(as_layered(optimizer), ByParameter)
