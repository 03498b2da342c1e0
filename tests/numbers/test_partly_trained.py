"""Frozen, unused and partly used parameters: no gradient is legal anywhere and stays None."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.plan.schedule import Phase


class Switch(nn.Module):
    """Uses ``often`` always, ``seldom`` if an input is above 2, ``never`` not at all."""

    def __init__(self):
        super().__init__()
        self.often = nn.Linear(16, 16)
        self.seldom = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)

    def forward(self, x):
        if x.max() > 2:
            return x + self.often(x) + self.seldom(x)
        return x + self.often(x)


def switching():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), Switch(), nn.Linear(16, 16), Switch())
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(16, 8))  # so that the first switch sees the input
        model[0].bias.zero_()
        model[2].weight.copy_(torch.eye(16))
        model[2].bias.zero_()
    model[2].weight.requires_grad_(False)
    return model


def points(*, high):
    """Four samples with small inputs but for those in ``high``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4, 8, generator=generator) * 0.1
    for sample in high:
        x[sample, 0] = 9.0
    return {"x": x, "y": torch.zeros(4, 16)}


def adamw_for(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False, fused=False)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("make", [roundpipe.optim.AdamW, adamw_for])
def test_what_gets_no_gradient_stays_none_and_is_not_decayed(
    make, num_devices, square_loss, plain, wrap, train_xy, same_bits
):
    reference = plain(switching(), square_loss)
    plain_adamw = adamw_for(reference.model.parameters())
    wrapped = wrap(switching(), num_devices)
    adamw = make(wrapped.optim_parameters())
    if make is roundpipe.optim.AdamW:
        adamw.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    for high in ([], [2], [0, 3], []):  # in no, one, two microbatches; then in none again
        batch = points(high=high)
        expected = reference.forward_backward(batch, 4)
        names = set(reference.sums)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 4), expected)
        assert set(wrapped.gradients()) == names
        assert ("1.seldom.weight" in names) == bool(high)
        reference.step(plain_adamw)
        wrapped.step(adamw)

    state, start = wrapped.state_dict(), switching().state_dict()
    same_bits(state, reference.model.state_dict())
    for name in ("1.never.weight", "3.never.bias", "2.weight"):
        assert torch.equal(state[name], start[name])


def test_a_function_sees_none_where_nothing_came(square_loss, wrap, train_xy):
    wrapped = wrap(switching(), 2)
    train_xy(wrapped, points(high=[]), square_loss, 4)
    seen = {}

    wrapped.step(lambda: seen.update({n: p.grad for n, p in wrapped.optim_named_parameters()}))

    assert seen["1.never.weight"] is None
    assert seen["1.seldom.weight"] is None
    assert seen["1.often.weight"].abs().sum() > 0
    assert "2.weight" not in seen


def test_a_microbatch_that_skips_whole_layers_gives_them_no_gradient(wrap, plain, same_bits):
    """The loss function may cut the graph for a microbatch; nothing waits for its gradient."""

    def loss(outputs, labels):
        return outputs.sum() if labels.item() else (outputs.detach() * 0).sum().requires_grad_()

    def model():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))

    labels = torch.tensor([0, 1, 0])
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    reference = plain(model(), loss)
    expected = reference.forward_backward({"x": x, "y": labels}, 3)
    wrapped = wrap(model(), 2)

    found = wrapped.forward_backward(
        (x,), label=labels, loss_fn=loss, run_config=roundpipe.RoundPipeRunConfig(num_microbatch=3)
    )

    assert torch.equal(found, expected)
    same_bits(wrapped.gradients(), reference.gradients())


def lora_on(model, layers, **settings):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=4,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=layers,
        init_lora_weights="gaussian",
        **settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wrapped = get_peft_model(model, lora, autocast_adapter_dtype=False)
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:  # zeros at first, so that A would get no gradient
                nn.init.normal_(parameter, std=0.1)
    return wrapped


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_lora_on_one_layer_gets_the_plain_gradients_and_nothing_below_runs_backward(
    num_devices, grain, batches, tiny_llama, plain, wrap, train_lm, same_bits
):
    batch = batches.sequences([9, 14, 5, 7])
    reference = plain(lora_on(tiny_llama(), [2]))
    expected = reference.forward_backward(batch, 4)
    gradients = reference.gradients()
    wrapped = wrap(lora_on(tiny_llama(), [2]), num_devices)

    for _ in range(3):  # the third is planned from measured times
        found = train_lm(wrapped, batch, 4, recompute_grain=grain)

        assert torch.equal(found, expected)
        same_bits(wrapped.gradients(), gradients)
        assert len(gradients) == 6
        schedule = wrapped._chain.making.runs[-1].program.schedule
        first = 3  # the embedding is layer 0, so block 2 is layer 3
        for visit in schedule.visits:
            if visit.phase is Phase.BACKWARD:
                assert min(visit.layers) >= first, schedule.text()
            if visit.has_backward:
                assert visit.gives_gradient == (min(visit.layers) > first)
        wrapped.zero_grad()


def test_lora_steps_equal_a_plain_loop(
    batches, tiny_llama, plain, wrap, train_lm, same_bits, copies
):
    reference = plain(lora_on(tiny_llama(), [1, 3], lora_dropout=0.0))
    trained = [p for p in reference.model.parameters() if p.requires_grad]
    plain_adamw = torch.optim.AdamW(trained, lr=1e-2, foreach=False, fused=False)
    wrapped = wrap(lora_on(tiny_llama(), [1, 3]), 3)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    frozen = copies({n: p for n, p in wrapped.named_parameters() if not p.requires_grad})

    for seed in range(4):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected = reference.forward_backward(batch, 4)
        reference.step(plain_adamw, 1.0)
        assert torch.equal(train_lm(wrapped, batch, 4), expected)
        wrapped.step(adamw, max_grad_norm=1.0)

    same_bits(wrapped.state_dict(), reference.model.state_dict())
    now = dict(wrapped.named_parameters())
    same_bits({name: now[name] for name in frozen}, frozen)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_trained_may_change_between_steps(
    waits, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """Freeze a layer, then let it loose again: the optimizer keeps its moments meanwhile."""
    reference = plain(tiny_tower(), square_loss)
    plain_adamw = torch.optim.AdamW(
        reference.model.parameters(), lr=1e-2, foreach=False, fused=False
    )
    model = tiny_tower()
    wrapped = wrap(model, 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)

    for seed, frozen in enumerate([[], [1], [1, 5], [1], []]):
        for layer, (mine, theirs) in enumerate(zip(model, reference.model, strict=True)):
            mine.requires_grad_(layer not in frozen)
            theirs.requires_grad_(layer not in frozen)
        if waits:
            wrapped.synchronize()  # else the call takes it over
        batch = batches.points(6, seed=seed)
        expected = reference.forward_backward(batch, 3)
        reference.step(plain_adamw)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        wrapped.step(adamw)
        same_bits(wrapped.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("make", [roundpipe.optim.AdamW, adamw_for])
def test_layers_let_loose_one_by_one_join_the_optimizer_as_groups(
    make, batches, tiny_tower, square_loss, plain, wrap, train_xy, same_bits
):
    """From the top down, each new layer with a rate of its own."""
    reference, model = plain(tiny_tower(), square_loss), tiny_tower()
    for each in (reference.model, model):
        each[:-1].requires_grad_(requires_grad=False)
    wrapped = wrap(model, 2)
    plain_adamw = adamw_for(p for p in reference.model.parameters() if p.requires_grad)
    adamw = make(wrapped.optim_parameters())
    if make is roundpipe.optim.AdamW:
        adamw.param_groups[0].update(lr=1e-2, weight_decay=0.1)
    for step, layer in enumerate([None, 4, None, 3, 0]):
        if layer is not None:
            for each in (reference.model, model):
                each[layer].requires_grad_(requires_grad=True)
            wrapped.synchronize()
            named = dict(wrapped.optim_named_parameters())
            mine = [p for name, p in named.items() if name.startswith(f"{layer}.")]
            assert len(mine) == len(list(model[layer].parameters()))
            settings = {"lr": 1e-3 * (step + 1), "weight_decay": 0.01}
            adamw.add_param_group({"params": mine, **settings})
            plain_adamw.add_param_group(
                {"params": list(reference.model[layer].parameters()), **settings}
            )
        batch = batches.points(6, seed=step)
        expected = reference.forward_backward(batch, 3)
        norm = reference.step(plain_adamw, 1.0)
        assert torch.equal(train_xy(wrapped, batch, square_loss, 3), expected)
        assert torch.equal(wrapped.step(adamw, max_grad_norm=1.0).grad_norm, norm)
    same_bits(wrapped.state_dict(), reference.model.state_dict())


def test_a_model_of_which_nothing_is_trained_runs_and_steps(
    batches, tiny_tower, square_loss, wrap, train_xy, same_bits
):
    model = tiny_tower()
    start = {n: t.clone() for n, t in model.state_dict().items()}
    wrapped = wrap(model, 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    model.requires_grad_(False)
    wrapped.synchronize()

    def loss(outputs, labels):
        return square_loss(outputs, labels).requires_grad_()

    assert train_xy(wrapped, batches.points(4), loss, 2) > 0
    assert wrapped.gradients() == {}
    assert wrapped.step(adamw).grad_norm == 0
    same_bits(wrapped.state_dict(), start)
