"""A model that is no chain trains as plain PyTorch does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.errors import ConfigError, ModelError, StepError

SMALL = {"upper_threshold": 1}  # every module with parameters is a part


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["tiny_t5", "tiny_bart"])
def test_an_encoder_and_a_decoder_have_the_gradients_of_the_plain_model(
    family, request, wrap, pairs_of_text, plain_gradients
):
    model = request.getfixturevalue(family)()
    expected = plain_gradients(model, lambda m: m(**pairs_of_text, use_cache=False).loss)
    plain = copy.deepcopy(model)(**pairs_of_text, use_cache=False)
    bits = []
    for devices in (1, 3):
        ours = wrap(copy.deepcopy(model), devices)
        assert isinstance(ours, roundpipe.AutoRoundPipe)
        out = ours(**pairs_of_text)
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.logits, plain.logits, rtol=1e-5, atol=1e-6)
        out.loss.backward()
        bits.append(ours.gradients())
        same(bits[-1], expected)
    for other in bits[1:]:
        assert all(torch.equal(other[name], gradient) for name, gradient in bits[0].items())


def test_what_happens_between_blocks_sees_whole_microbatches(wrap, unet, noise, plain_gradients):
    model, (x, when) = unet(), noise(5)
    expected = plain_gradients(model, lambda m: m(x, when).square().mean())
    ours = wrap(model)
    assert {"down.0.0", "down.1.1", "up.0.0", "mix.1", "time"} <= ours.parts.keys()
    out = ours(x, when)
    assert out.shape == x.shape
    out.square().mean().backward()
    same(ours.gradients(), expected)


def test_the_caller_s_loss_may_compare_samples_of_different_microbatches(
    wrap, two_towers, plain_gradients
):
    a, b = torch.randn(6, 6), torch.randn(6, 5)

    def contrast(model):
        left, right = model(a, b)
        return nn.functional.cross_entropy(left @ right.T, torch.arange(6))

    model = two_towers()
    expected = plain_gradients(model, contrast)
    ours = wrap(model, **SMALL)
    lent = [name for name, pipe in ours.parts.items() if pipe._part.loans]
    assert lent == ["project_left", "project_right"]
    contrast(ours).backward()
    same(ours.gradients(), expected)
    names = [name for name, _ in ours.optim_named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_a_weight_lent_to_parts_stays_one(wrap, two_towers):
    model = two_towers()
    ours = wrap(model, **SMALL)
    optimizer = torch.optim.SGD(ours.optim_parameters(), lr=0.1)
    left, right = ours(torch.randn(4, 6), torch.randn(4, 5))
    (left - right).square().sum().backward()
    ours.step(optimizer)
    assert model.project_left.weight is model.project_right.weight
    state = ours.state_dict()
    assert torch.equal(state["project_left.weight"], state["project_right.weight"])
    assert torch.equal(state["project_left.weight"], model.project_left.weight)


def test_steps_are_those_of_a_plain_loop(wrap, unet, noise):
    plain = unet()
    ours = wrap(copy.deepcopy(plain), 2)
    mine = torch.optim.SGD(ours.optim_parameters(), lr=0.05, momentum=0.9)
    other = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for size in (4, 5, 3):
        x, when = noise(size)
        ours(x, when).square().mean().backward()
        plain(x, when).square().mean().backward()
        result = ours.step(mine, max_grad_norm=0.5)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
        other.zero_grad()
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0)
    found = ours.state_dict()
    assert found.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_function_steps_and_an_optimizer_context_gives_masters(wrap, mlp):
    model = mlp().to(torch.bfloat16)
    ours = wrap(model, **SMALL)
    with roundpipe.OptimizerCtx():
        optimizer = roundpipe.optim.Adam(ours.parameters(), lr=0.1)
    assert {p.dtype for p in ours.optim_parameters()} == {torch.float32}
    before = ours.state_dict()
    ours(torch.randn(4, 6, dtype=torch.bfloat16)).sum().backward()
    ours.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
    after = ours.state_dict()
    assert all(value.dtype == torch.bfloat16 for value in after.values())
    assert not any(torch.equal(before[name], after[name]) for name in after)


def test_an_optimizer_over_working_weights_is_refused(wrap, mlp):
    ours = wrap(mlp(), **SMALL)
    ours(torch.randn(4, 6)).sum().backward()
    with pytest.raises(ConfigError, match=r"optim_parameters\(\)"):
        ours.step(torch.optim.SGD(ours.parameters(), lr=0.1))


def test_a_step_whose_gradients_are_not_finite_is_skipped(wrap, mlp):
    ours = wrap(mlp(), **SMALL)
    optimizer = torch.optim.SGD(ours.optim_parameters(), lr=0.1)
    before = ours.state_dict()
    (ours(torch.randn(4, 6)).sum() * float("inf")).backward()
    assert ours.step(optimizer).skipped
    assert all(torch.equal(before[n], v) for n, v in ours.state_dict().items())
    with pytest.raises(ConfigError, match="nothing to step with"):
        ours.step(optimizer)


def test_dropout_draws_the_same_on_any_number_of_devices_and_differs_between_parts(
    wrap, unet, noise
):
    x, when = noise(4)
    found = []
    for devices in (1, 3):
        ours = wrap(unet(dropout=0.5), devices, seed=5)
        ours(x, when).square().mean().backward()
        found.append(ours.gradients())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    seeds = [pipe._seed for pipe in ours.parts.values()]
    assert len(set(seeds)) == len(seeds)


def test_frozen_parts_and_the_input_get_the_gradients_they_want(wrap, unet, noise):
    plain, (x, when) = unet(), noise(4)
    for part in (plain.first, plain.down):
        part.requires_grad_(requires_grad=False)
    ours = wrap(copy.deepcopy(plain))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours(mine, when).square().mean().backward()
    plain(other, when).square().mean().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)
    same(ours.gradients(), {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})


def test_what_is_trained_may_change_between_steps(wrap, mlp):
    model = mlp()
    ours = wrap(model, **SMALL)
    optimizer = torch.optim.SGD(ours.optim_parameters(), lr=0.1)
    model.two.requires_grad_(requires_grad=False)
    ours(torch.randn(4, 6)).sum().backward()
    assert not any(name.startswith("two") for name in ours.gradients())
    ours.step(optimizer)
    model.two.requires_grad_(requires_grad=True)
    ours(torch.randn(4, 6)).sum().backward()
    assert "two.weight" in ours.gradients()


def test_one_part_at_a_time_has_memory_on_the_devices(wrap, unet, noise):
    ours = wrap(unet())
    ours(*noise(4)).sum().backward()
    holding = {
        name
        for name, pipe in ours.parts.items()
        for model in pipe._engine.models
        if model.weights.buffer is not None or model.sums.buffer is not None
    }
    assert len(holding) == 1
    assert len(ours.parts) > 5


def test_evaluation_keeps_no_graph_and_follows_modes(wrap, unet, noise):
    model = unet(dropout=0.5)
    ours, (x, when) = wrap(model), noise(4)
    ours.eval()
    with torch.no_grad():
        found = ours(x, when)
    assert not found.requires_grad
    torch.testing.assert_close(found, copy.deepcopy(model)(x, when), rtol=1e-5, atol=1e-6)
    config = roundpipe.RoundPipeRunConfig(requires_grad=False, merge_output=False, num_microbatch=4)
    assert len(ours(x, when, roundpipe_run_config=config)) == 4


def test_weights_load_and_are_read_by_the_model_s_own_names(wrap, unet):
    model, other = unet(), unet()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    ours = wrap(model)
    ours.load_state_dict(other.state_dict())
    assert all(torch.equal(v, other.state_dict()[n]) for n, v in ours.state_dict().items())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert ours.down[0][0] is model.down[0][0]  # attributes are the model's


def test_microbatches_may_go_different_ways(wrap, plain_gradients):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            if x.sum() > 0:
                x = self.one(x)
            x = self.two(x)
            return self.one(x) if x[0, 0] > 0 else x

    torch.manual_seed(0)
    model = Branching()
    x = torch.randn(6, 4)
    x[:2] = x[:2].abs()
    x[2:4] = -x[2:4].abs()
    pieces = list(x.split(2))
    expected = plain_gradients(model, lambda m: torch.cat([m(p) for p in pieces]).square().sum())
    ours = wrap(model, num_microbatch=3, **SMALL)
    ours(x).square().sum().backward()
    same(ours.gradients(), expected)


def test_microbatches_may_call_a_part_in_different_ways(wrap, plain_gradients):
    class Part(nn.Linear):
        def forward(self, x, plus=0.0, minus=0.0):
            return super().forward(x) + plus - minus

    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = Part(4, 4)

        def forward(self, x):
            return self.one(x, plus=2 * x) if x.sum() > 0 else self.one(x, minus=2 * x)

    torch.manual_seed(0)
    model, x = Calling(), torch.randn(4, 4)
    pieces = [x[:2].abs(), -x[2:].abs()]
    expected = plain_gradients(model, lambda m: torch.cat([m(p) for p in pieces]).square().sum())
    ours = wrap(model, **SMALL)
    ours(torch.cat(pieces)).square().sum().backward()
    same(ours.gradients(), expected)


def test_a_part_s_weight_used_outside_it_is_refused_where_it_would_be_lost(wrap):
    class Reaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x) + nn.functional.linear(x, self.one.weight)

    ours = wrap(Reaching(), **SMALL)
    out = ours(torch.randn(4, 4))
    with pytest.raises(ModelError, match=r"one.weight[\s\S]*skip_modules"):
        out.sum().backward()


def test_children_of_a_sequential_that_are_called_one_by_one_are_refused(wrap):
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            for layer in self.all:
                x = layer(x)
            return x

    ours = wrap(Listing(), **SMALL)
    with pytest.raises(ModelError, match=r"nn\.ModuleList"):
        ours(torch.randn(4, 4))
    assert len(ours.all) == 2


def test_a_cache_that_recompute_would_find_filled_is_refused(wrap, tiny_t5, pairs_of_text):
    ours = wrap(tiny_t5())
    with pytest.raises(ModelError, match="use_cache=False"):
        ours(**pairs_of_text, use_cache=True)
    assert ours(**pairs_of_text).loss.isfinite()


def test_outputs_that_hooks_collect_inside_parts_are_refused(wrap, tiny_t5, pairs_of_text):
    """They would be those of another microbatch, or none."""
    with pytest.raises(ModelError, match="inside parts are not supported: hidden_states\nhint: "):
        wrap(tiny_t5())(**pairs_of_text, output_hidden_states=True)


def test_what_is_not_known_here_is_refused_with_the_way_out(wrap, mlp):
    ours = wrap(mlp(), **SMALL)
    with pytest.raises(ConfigError, match=r"\.backward\(\)"):
        ours.forward_backward((torch.randn(4, 6),))
    with pytest.raises(ConfigError, match="close"):
        ours.generate()
    with pytest.raises(ConfigError, match=r"one chain of layers\nhint: torch\.save"):
        ours.save_checkpoint("checkpoint-1", None)
    with pytest.raises(ConfigError, match=r"one chain of layers\nhint: .*load_state_dict"):
        ours.load_checkpoint("checkpoint-1")
    ours.model.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="hook"):
        ours(torch.randn(4, 6))
    ours.close()
    with pytest.raises(ConfigError, match="closed"):
        ours(torch.randn(4, 6))


def test_after_a_part_has_failed_the_step_is_made_anew(wrap):
    class Failing(nn.Linear):
        def forward(self, x):
            if x.isnan().any():
                raise ValueError("not a number")
            return super().forward(x)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), Failing(4, 4)

        def forward(self, x):
            return self.two(self.one(x))

    torch.manual_seed(0)
    ours = wrap(Two(), **SMALL)
    x = torch.randn(4, 4)
    ours(x).sum().backward()
    expected = ours.gradients()["one.weight"].clone()
    ours.zero_grad()
    ours(torch.randn(4, 4)).sum().backward()
    with pytest.raises(StepError, match="not a number"):
        ours(torch.full((4, 4), float("nan")))
    ours(x).sum().backward()
    assert torch.equal(ours.gradients()["one.weight"], expected)


def test_closing_frees_devices_and_the_module_goes_on(wrap, mlp):
    model = mlp()
    ours = wrap(model, **SMALL)
    x = torch.randn(4, 6)
    ours(x).sum().backward()
    ours.step(torch.optim.SGD(ours.optim_parameters(), lr=0.1))
    expected = ours(x).detach()
    again = wrap(model, **SMALL)  # closes the first
    with pytest.raises(ConfigError, match="closed"):
        ours(x)
    again.close()
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


def test_a_scaled_loss_gives_unscaled_steps(wrap, mlp):
    plain = mlp()
    scaler = roundpipe.GradScaler(init_scale=1024.0)
    ours = wrap(copy.deepcopy(plain), grad_scaler=scaler, **SMALL)
    mine = torch.optim.SGD(ours.optim_parameters(), lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    scaler.scale(ours(x).square().mean()).backward()
    ours.step(mine)
    plain(x).square().mean().backward()
    other.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
