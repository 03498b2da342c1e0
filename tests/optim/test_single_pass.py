import copy
import io
import logging
import warnings

import pytest
import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.optim import SGD, Adam, AdamW, single_pass
from roundpipe.optim.forms import joined

PAIRS = {
    "AdamW": (AdamW, torch.optim.AdamW, {}),
    "Adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "SGD, nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD, plain": (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
}


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pair(kind="AdamW", implementation="chunks", **options):
    """A net under our optimizer and its twin under torch's."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    theirs = copy.deepcopy(ours)
    groups = [
        [{"params": net[0].parameters(), "weight_decay": 0.3}, {"params": net[1].parameters()}]
        for net in (ours, theirs)
    ]
    make, torchs, own = PAIRS[kind]
    options = {**own, **options}
    plain = {} if torchs is torch.optim.SGD else {"fused": False}
    return (
        ours,
        make(groups[0], implementation=implementation, **options),
        theirs,
        torchs(groups[1], foreach=False, **plain, **options),
    )


def backward(net, seed):
    net.zero_grad()
    net(randn(seed, 4, 5)).square().sum().backward()


def assert_same_parameters(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


# ---- beside torch


@pytest.mark.parametrize("kind", PAIRS)
def test_groups_and_schedulers_give_the_bits_of_torch(bits_of_torch, kind):
    ours, optimizer, theirs, torchs = pair(kind, lr=1e-2)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            o, 0.1, total_steps=12, cycle_momentum="SGD," not in kind
        )
        for o in (optimizer, torchs)
    ]
    for step in range(10):
        for net, o, scheduler in zip((ours, theirs), (optimizer, torchs), schedulers, strict=True):
            backward(net, step)
            o.step()
            scheduler.step()
        assert_same_parameters(ours, theirs)


@pytest.mark.parametrize("kind", PAIRS)
def test_compiled_updates_stay_beside_those_of_torch(implementation, kind):
    ours, optimizer, theirs, torchs = pair(kind, implementation, lr=1e-2)
    assert optimizer.implementation == implementation
    for step in range(5):
        for net, o in ((ours, optimizer), (theirs, torchs)):
            backward(net, step)
            o.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", PAIRS)
def test_state_is_exchanged_with_torch_and_training_goes_on_with_the_same_bits(bits_of_torch, kind):
    ours, optimizer, theirs, torchs = pair(kind, lr=1e-2)
    for step in range(3):
        backward(ours, step)
        optimizer.step()
        backward(theirs, step)
        torchs.step()
    again, fresh, _, _ = pair(kind)
    again.load_state_dict(theirs.state_dict())
    fresh.load_state_dict(copy.deepcopy(torchs.state_dict()))
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for net, o in ((ours, optimizer), (theirs, torchs), (again, fresh)):
        backward(net, 3)
        o.step()
    assert_same_parameters(ours, theirs)
    assert_same_parameters(ours, again)


# ---- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_saved_state_goes_on_with_the_same_bits(implementation, kind, state_dtype, dtype):
    make, _, options = PAIRS[kind]

    def made(start):
        parameter = nn.Parameter(start.clone())
        options_ = {**options, "state_dtype": state_dtype, "implementation": implementation}
        return parameter, make([parameter], lr=1e-2, **options_)

    def step(parameter, optimizer, seed):
        parameter.grad = randn(seed, 700).to(dtype)
        optimizer.step()

    first, optimizer = made(randn(0, 700).to(dtype))
    for seed in range(3):
        step(first, optimizer, seed)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second, other = made(first.detach())
    other.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        step(first, optimizer, seed)
        step(second, other, seed)
    assert torch.equal(first, second)
    for key, value in optimizer.state[first].items():
        assert torch.equal(value, other.state[second][key])
        assert value.dtype == other.state[second][key].dtype


@pytest.mark.parametrize("after", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("before", ["fp32", "bf16", "int8"])
def test_state_of_one_form_is_loaded_into_another(before, after):
    def made(form):
        parameter = nn.Parameter(randn(0, 30, 40))
        return parameter, AdamW([parameter], lr=1e-2, state_dtype=form)

    first, optimizer = made(before)
    first.grad = randn(1, 30, 40)
    optimizer.step()
    second, other = made(after)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["state_dtype"] == after
    for parameter, each in ((first, optimizer), (second, other)):
        parameter.data = randn(0, 30, 40)
        parameter.grad = randn(2, 30, 40)
        each.step()
    assert other.state[second]["step"] == 2
    assert (first - second).abs().mean() < 0.03 * 1e-2


def test_torchs_state_of_a_bf16_parameter_becomes_fp32_moments():
    theirs = nn.Parameter(randn(0, 50).bfloat16())
    torchs = torch.optim.AdamW([theirs], lr=1e-2)
    theirs.grad = randn(1, 50).bfloat16()
    torchs.step()
    ours = nn.Parameter(theirs.detach().clone())
    optimizer = AdamW([ours])
    optimizer.load_state_dict(torchs.state_dict())
    ours.grad = randn(2, 50).bfloat16()
    optimizer.step()
    state = optimizer.state[ours]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    assert state["step"] == 2
    assert joined(ours.detach(), state["remainder"]).isfinite().all()


def test_the_implementation_is_in_the_state_and_another_one_is_said_once(caplog, implementation):
    ours, optimizer, _, _ = pair(implementation=implementation)
    backward(ours, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert {group["implementation"] for group in saved["param_groups"]} == {implementation}
    with caplog.at_level(logging.INFO):
        same = pair(implementation=implementation)[1]
        same.load_state_dict(saved)
    assert not caplog.records
    for group in saved["param_groups"]:
        group["implementation"] = "another"
    with caplog.at_level(logging.INFO):
        same.load_state_dict(saved)
    (record,) = caplog.records
    assert "made by another implementation: another, now " + implementation in record.getMessage()
    assert same.implementation == implementation
    assert same.param_groups[1]["implementation"] == implementation


def test_a_copy_or_pickle_of_an_optimizer_is_one(implementation):
    ours, optimizer, _, _ = pair(implementation=implementation)
    backward(ours, 0)
    optimizer.step()
    net, other = copy.deepcopy((ours, optimizer))
    for each, o in ((ours, optimizer), (net, other)):
        backward(each, 1)
        o.step()
    assert_same_parameters(ours, net)
    assert other.implementation == implementation


def test_a_copy_on_a_machine_without_compiler_goes_on_in_chunks(monkeypatch, caplog):
    ours, optimizer, _, _ = pair(implementation="chunks")
    optimizer.defaults["implementation"] = "compiled"
    monkeypatch.setattr(single_pass, "resolve", lambda implementation: None)
    backward(ours, 0)
    optimizer.step()
    assert optimizer.implementation == "chunks"
    assert optimizer.state_dict()["param_groups"][1]["implementation"] == "chunks"


# ---- steps


def test_parameters_without_gradient_are_neither_decayed_nor_stepped():
    ours, optimizer, _, _ = pair()
    before = ours[0].weight.detach().clone()
    backward(ours, 0)
    ours[0].weight.grad = None
    optimizer.step()
    assert torch.equal(ours[0].weight, before)
    assert ours[0].weight not in optimizer.state
    assert optimizer.state[ours[1].weight]["step"] == 1


def test_groups_may_differ_in_the_form_of_their_state():
    a, b = nn.Parameter(randn(0, 300)), nn.Parameter(randn(0, 300))
    optimizer = AdamW([{"params": [a], "state_dtype": torch.float32}, {"params": [b]}],
                      state_dtype="int8")  # fmt: skip
    a.grad = b.grad = randn(1, 300)
    optimizer.step()
    assert optimizer.state[a]["exp_avg"].dtype == torch.float32
    assert optimizer.state[b]["exp_avg"].dtype == torch.uint8


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


@pytest.mark.parametrize("kind", [AdamW, Adam, SGD])
def test_sparse_gradients_are_refused_with_the_way_out(kind):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = kind(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=f"{kind.__name__} needs dense .*\nhint: nn"):
        optimizer.step()


def test_parameters_that_cannot_be_trained_exactly_are_refused_and_not_added():
    good, half = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).half())
    with pytest.raises(ConfigError, match=r"bf16 or fp64: torch\.float16"):
        AdamW([half])
    optimizer = AdamW([good])
    with pytest.raises(ConfigError, match=r"hint: optim_dtype=torch\.float32"):
        optimizer.add_param_group({"params": [half]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ConfigError, match="hint: state_dtype='fp32'"):
        AdamW([nn.Parameter(torch.ones(2).double())], state_dtype="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_out_of_memory_changes_nothing(monkeypatch, implementation, dtype):
    parameter = nn.Parameter(randn(0, 10).to(dtype))
    optimizer = AdamW([parameter], implementation=implementation, state_dtype="int8")

    def fails_after(calls, function):
        left = iter(range(calls))

        def function_(*args, **kwargs):
            if next(left, None) is None:
                raise MemoryError
            return function(*args, **kwargs)

        return function_

    def snapshot():
        return copy.deepcopy((parameter.detach(), dict(optimizer.state.get(parameter, {}))))

    for _ in range(2):
        before, failures = snapshot(), 0
        for calls in range(40):
            parameter.grad = randn(1, 10).to(dtype)
            with monkeypatch.context() as patch:
                for name in ("zeros", "empty", "empty_like", "zeros_like", "tensor"):
                    patch.setattr(torch, name, fails_after(calls, getattr(torch, name)))
                try:
                    optimizer.step()
                except MemoryError:
                    failures += 1
                else:
                    break
            after = snapshot()
            assert torch.equal(after[0], before[0])
            assert after[1].keys() == before[1].keys()
            assert all(torch.equal(v, before[1][k]) for k, v in after[1].items())
        assert failures >= (1 if implementation == "chunks" or not before[1] else 0)
        assert optimizer.state[parameter]["step"] == 1 + (before[1].get("step", 0))
