import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.optim import AdamW
from roundpipe.optim import adamw as module
from roundpipe.optim.adamw import AdamWConfig, adamw_


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(start, grads, max_norm=None, **options):
    """What torch's single-tensor AdamW makes of it, moments included."""
    parameter = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], foreach=False, fused=False, **options)
    for grad in grads:
        parameter.grad = grad.to(start.dtype, copy=True)
        if max_norm is not None:
            nn.utils.clip_grad_norm_([parameter], max_norm)
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def run(start, grads, c, **options):
    master, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for step, grad in enumerate(grads, start=1):
        adamw_(master, grad, m, v, step, c, **options)
    return master, m, v


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("numel", [1, 37, 1000, 65_537])
def test_ten_steps_have_the_bits_of_torch(monkeypatch, weight_decay, numel):
    monkeypatch.setattr(module, "CHUNK", 256)
    start, grads = randn(0, numel), [randn(i, numel) for i in range(1, 11)]
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    assert_equal(run(start, grads, AdamWConfig(**options)), reference(start, grads, **options))


def test_a_bf16_gradient_equals_its_fp32_cast():
    start, grads = randn(0, 1000), [randn(i, 1000).bfloat16() for i in range(1, 4)]
    assert_equal(run(start, grads, AdamWConfig()), reference(start, grads))


def test_fp64_and_bf16_masters_have_the_bits_of_torch_too():
    for dtype in (torch.float64, torch.bfloat16):
        start, grads = randn(0, 99).to(dtype), [randn(i, 99).to(dtype) for i in range(1, 4)]
        assert_equal(run(start, grads, AdamWConfig()), reference(start, grads))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 99), st.booleans())
def test_pieces_equal_the_whole(cut, half):
    start, grads, c = randn(0, 100), [randn(i, 100) for i in range(1, 4)], AdamWConfig(lr=1e-2)
    grads = [g.bfloat16() for g in grads] if half else grads
    whole = run(start, grads, c)
    parts = [
        run(start[part], [g[part] for g in grads], c) for part in (slice(0, cut), slice(cut, None))
    ]
    assert_equal([torch.cat(pieces) for pieces in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_gradient_scale_has_the_bits_of_clipping_first_and_leaves_the_gradient(max_norm):
    start, grad = randn(0, 1000), randn(1, 1000)
    scale = torch.clamp(max_norm / (torch.linalg.vector_norm(grad) + 1e-6), max=1.0)
    given_grad = grad.clone()
    ours = run(start, [given_grad], AdamWConfig(), grad_scale=scale)
    assert_equal(ours, reference(start, [grad], max_norm=max_norm))
    assert torch.equal(given_grad, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_working_weights_get_a_cast_of_the_new_master(monkeypatch, dtype):
    monkeypatch.setattr(module, "CHUNK", 256)
    out = torch.full((1000,), float("nan"), dtype=dtype)
    master, _, _ = run(randn(0, 1000), [randn(1, 1000)], AdamWConfig(), out=out)
    assert torch.equal(out, master.to(dtype))


def test_shapes_without_elements_scalars_and_transposed_tensors_are_fine(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    for start in (torch.empty(0), torch.tensor(1.5), randn(0, 6, 4).T, randn(0, 4, 6)):
        grads = [torch.full_like(start, 0.1)]
        assert_equal(run(start, grads, AdamWConfig()), reference(start, grads))


def test_running_out_of_memory_changes_nothing(monkeypatch):
    parameter = nn.Parameter(randn(0, 10))
    optimizer = AdamW([parameter])
    parameter.grad = randn(1, 10)
    optimizer.step()
    before = copy.deepcopy((parameter.detach(), optimizer.state[parameter]))

    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(torch.Tensor, "new_empty", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert torch.equal(parameter, before[0])
    for key, value in optimizer.state[parameter].items():
        assert torch.equal(value, before[1][key])


# ---- the optimizer


def pair(**options):
    """A net under our optimizer and its twin under torch's."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)
    groups = [
        [{"params": net[0].parameters(), "weight_decay": 0.3}, {"params": net[1].parameters()}]
        for net in (ours, theirs)
    ]
    return (
        ours,
        AdamW(groups[0], **options),
        theirs,
        torch.optim.AdamW(groups[1], foreach=False, fused=False, **options),
    )


def backward(net, seed):
    net.zero_grad()
    net(randn(seed, 4, 5)).square().sum().backward()


def assert_same_parameters(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def test_groups_and_schedulers_give_the_bits_of_torch():
    ours, optimizer, theirs, torchs = pair(lr=1e-2)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=True)
        for o in (optimizer, torchs)
    ]
    for step in range(10):
        for net, o, scheduler in zip((ours, theirs), (optimizer, torchs), schedulers, strict=True):
            backward(net, step)
            o.step()
            scheduler.step()
        assert_same_parameters(ours, theirs)


def test_parameters_without_gradient_are_neither_decayed_nor_stepped():
    ours, optimizer, _, _ = pair()
    before = ours[0].weight.detach().clone()
    backward(ours, 0)
    ours[0].weight.grad = None
    optimizer.step()
    assert torch.equal(ours[0].weight, before)
    assert ours[0].weight not in optimizer.state
    assert optimizer.state[ours[1].weight]["step"] == 1


def test_state_is_exchanged_with_torch_and_training_goes_on_with_the_same_bits():
    ours, optimizer, theirs, torchs = pair(lr=1e-2)
    for step in range(3):
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        torchs.step()
    again, fresh, _, _ = pair()
    again.load_state_dict(theirs.state_dict())
    fresh.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()) | {
        "param_groups": torchs.state_dict()["param_groups"]
    })  # fmt: skip
    for net, o in ((ours, optimizer), (theirs, torchs), (again, fresh)):
        backward(net, 3)
        o.step()
    assert_same_parameters(ours, theirs)
    assert_same_parameters(ours, again)


def test_a_snapshot_does_not_follow_the_learning_rate():
    a, b = nn.Parameter(randn(0, 10)), nn.Parameter(randn(0, 10))
    first, second = AdamW([a], lr=1e-2), AdamW([b], lr=1e-2)
    snapshot = first.hyperparameters()
    first.param_groups[0]["lr"] = 5.0
    first.update_(a, randn(1, 10), snapshot)
    b.grad = randn(1, 10)
    second.step()
    assert torch.equal(a, b)


def test_a_snapshot_counts_as_a_step_for_schedulers():
    parameter = nn.Parameter(randn(0, 10))
    optimizer = AdamW([parameter])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.hyperparameters()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = AdamW([parameter], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    assert parameter < 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative: -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative: -0.1"),
    ],
)
def test_values_out_of_range_are_refused_in_the_constructor_and_in_groups(options, message):
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=message):
        AdamW([parameter], **options)
    with pytest.raises(ConfigError, match=message):
        AdamW([{"params": [parameter], **options}])


def test_sparse_gradients_are_refused_with_the_way_out():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="hint: nn"):
        optimizer.step()
