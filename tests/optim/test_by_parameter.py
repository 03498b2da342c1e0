"""Torch's optimizers stepped one parameter at a time: the bits of one ``step`` of them all."""

import copy
import warnings

import pytest
import torch
from torch import nn

from roundpipe.errors import StepError
from roundpipe.optim.by_parameter import EACH_ALONE, ByParameter, is_each_alone
from roundpipe.optim.layered import as_layered

KINDS = [getattr(torch.optim, name) for name, _ in EACH_ALONE if hasattr(torch.optim, name)]
OPTIONS = {
    torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}, {}],
    torch.optim.Adam: [{"amsgrad": True}, {"fused": True}, {"maximize": True}],
    torch.optim.AdamW: [{}, {"fused": True}],
    torch.optim.RMSprop: [{"momentum": 0.9, "centered": True}],
    torch.optim.Adagrad: [{"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"fused": True}],
    torch.optim.Adafactor: [{}, {"maximize": True}],
    torch.optim.NAdam: [{"decoupled_weight_decay": True}],
    torch.optim.Muon: [{"adjust_lr_fn": "match_rms_adamw"}],
}
CASES = [(kind, options) for kind in KINDS for options in OPTIONS.get(kind, [{}])]
CASES += [(kind, {"foreach": True}) for kind in KINDS if kind is not torch.optim.Muon]


def parameters(kind) -> list[nn.Parameter]:
    """Shapes with remainders for vector loops; Muon takes matrices only."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 33), (64, 5), (9, 9), (3, 1)]
    if kind is not torch.optim.Muon:
        shapes += [(37,), (2, 5, 7), ()]
    if kind not in (torch.optim.Muon, torch.optim.Adafactor):  # which divides by the size
        shapes += [(3, 0)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def groups(held):
    """Two groups of their own hyperparameters."""
    return [{"params": held[::2]}, {"params": held[1::2], "lr": 3e-3, "weight_decay": 0.02}]


def gradients(held, step):
    """None for a parameter or two, others in bf16."""
    generator = torch.Generator().manual_seed(100 + step)
    return [
        None if (index + step) % 4 == 3 else torch.randn(p.shape, generator=generator).bfloat16()
        for index, p in enumerate(held)
    ]


def make(kind, options):
    held = parameters(kind)
    options = {"lr": 1e-2, **options}
    return held, kind(groups(held), **options)


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for key, value in state.items():
            ours = mine["state"][index][key]
            assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value


@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=[f"{kind.__name__}-{options}" for kind, options in CASES]
)
@pytest.mark.filterwarnings("ignore:.*not currently support.*")
def test_steps_equal_steps_of_the_whole_bit_for_bit(kind, options):
    held, optimizer = make(kind, options)
    plain_held, plain = make(kind, options)
    layered = as_layered(optimizer)
    assert isinstance(layered, ByParameter)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.7) for each in (optimizer, plain)]
    scale = torch.tensor(0.37)
    for step in range(4):
        snapshot = layered.hyperparameters()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedulers[0].step()
        grads = gradients(held, step)
        for parameter, grad in reversed(list(zip(held, grads, strict=True))):
            if grad is not None:
                arrived = grad.clone()
                layered.update_(parameter, grad, snapshot, grad_scale=scale)
                assert torch.equal(grad, arrived)
                assert parameter.grad is None
        for parameter, grad in zip(plain_held, grads, strict=True):
            parameter.grad = None if grad is None else grad.float() * scale
        plain.step()
        schedulers[1].step()
        for mine, theirs in zip(held, plain_held, strict=True):
            assert torch.equal(mine, theirs)
    assert_same(optimizer.state_dict(), plain.state_dict())


def test_what_mixes_parameters_or_is_unknown_is_not_listed():
    held = [nn.Parameter(torch.ones(2))]

    class Own(torch.optim.SGD):
        pass

    assert is_each_alone(torch.optim.SGD(held))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, Own):
        assert not is_each_alone(kind(held))
        assert as_layered(kind(held)) == f"{kind.__name__} may mix parameters"


def test_a_learning_rate_that_is_a_tensor_is_the_one_at_the_call():
    held, plain = (nn.Parameter(torch.ones(3)) for _ in range(2))
    rate = torch.tensor(0.5)
    layered = ByParameter(torch.optim.AdamW([held], lr=rate, foreach=False))
    reference = torch.optim.AdamW([plain], lr=torch.tensor(0.5), foreach=False)
    snapshot = layered.hyperparameters()
    rate.fill_(0.0)
    layered.update_(held, torch.ones(3), snapshot)
    plain.grad = torch.ones(3)
    reference.step()
    assert torch.equal(held, plain)
    assert not torch.equal(held, torch.ones(3))


def test_working_weights_get_a_cast():
    held = nn.Parameter(torch.full((3,), 1.0))
    out = torch.zeros(3, dtype=torch.bfloat16)
    layered = ByParameter(torch.optim.SGD([held], lr=0.25))
    layered.update_(held, torch.ones(3), layered.hyperparameters(), out=out)
    assert out.tolist() == [0.75] * 3


def test_a_gradient_of_the_right_dtype_is_not_copied_and_not_changed():
    held, grad, seen = nn.Parameter(torch.ones(3)), torch.ones(3), []

    layered = ByParameter(torch.optim.SGD([held], lr=0.25))
    whole = torch.optim.SGD.step

    def step(self, closure=None):
        seen.append(held.grad)
        return whole(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", step)
        layered.update_(held, grad, layered.hyperparameters())
        layered.update_(held, grad, layered.hyperparameters(), grad_scale=torch.tensor(2.0))
    assert seen[0] is grad
    assert grad.tolist() == [1.0] * 3
    assert held.tolist() == [0.25] * 3


def test_a_step_that_failed_halfway_is_not_repeated(monkeypatch):
    held = nn.Parameter(torch.ones(3))
    layered = ByParameter(torch.optim.SGD([held], lr=1.0))
    snapshot = layered.hyperparameters()

    def fail(self, closure=None):
        held.data.add_(1)
        raise MemoryError

    monkeypatch.setattr(torch.optim.SGD, "step", fail)
    with pytest.raises(MemoryError):
        layered.update_(held, torch.ones(3), snapshot)
    assert held.grad is None
    monkeypatch.undo()
    with pytest.raises(StepError, match=r"torch.optim.SGD failed in the middle"):
        layered.update_(held, torch.ones(3), snapshot)
    layered.update_(held, torch.ones(3), layered.hyperparameters())
    assert held.tolist() == [1.0] * 3


def test_a_gradient_that_cannot_be_cast_leaves_the_step_repeatable():
    held = nn.Parameter(torch.ones(3))
    layered = ByParameter(torch.optim.SGD([held], lr=1.0))
    snapshot = layered.hyperparameters()
    with pytest.raises(RuntimeError):
        layered.update_(held, torch.ones(3), snapshot, grad_scale=torch.ones(2))
    layered.update_(held, torch.ones(3), snapshot)
    assert held.tolist() == [0.0] * 3


def test_muon_says_itself_that_it_takes_matrices():
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon([nn.Parameter(torch.ones(3))])


def test_what_a_step_leaves_in_the_optimizer_is_carried_back():
    held = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([held], lr=1.0, fused=True)
    assert optimizer._need_device_dtype_check_for_fused
    layered = ByParameter(optimizer)
    before = copy.copy(vars(optimizer))
    layered.update_(held, torch.ones(3), layered.hyperparameters())
    assert not optimizer._need_device_dtype_check_for_fused
    assert optimizer.state is before["state"]
    assert optimizer.param_groups is before["param_groups"]
