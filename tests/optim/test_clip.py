import math

import pytest
import torch
from torch import nn

from roundpipe.optim.clip import clip_coefficient, layer_norms, total_norm

SHAPES = [[(64, 33), (64,), (7,)], [(1,), (129, 65)], [], [(3, 3, 3)]]


def gradients() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in layer] for layer in SHAPES]


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e9])
def test_norm_and_coefficient_have_the_bits_of_clip_grad_norm(max_norm):
    layers = gradients()
    parameters = [nn.Parameter(torch.zeros_like(g)) for layer in layers for g in layer]
    for parameter, grad in zip(parameters, [g for layer in layers for g in layer], strict=True):
        parameter.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(parameters, max_norm)
    total = total_norm([layer_norms(layer) for layer in layers])
    assert torch.equal(total, expected)
    coefficient = clip_coefficient(total, max_norm)
    flat = [g for layer in layers for g in layer]
    for parameter, grad in zip(parameters, flat, strict=True):
        assert torch.equal(grad * coefficient, parameter.grad)


def test_16_bit_gradients_are_summed_in_fp32():
    grads = [g.bfloat16() for layer in gradients() for g in layer]
    expected = nn.utils.get_total_norm([g.float() for g in grads])
    assert torch.equal(total_norm([layer_norms(grads)]), expected)
    many = torch.full((1 << 18,), 2.0**-6, dtype=torch.float16)
    assert layer_norms([many]).tolist() == [8.0]


def test_the_coefficient_never_enlarges():
    assert clip_coefficient(torch.tensor(0.0), 1.0) == 1.0
    assert clip_coefficient(torch.tensor(0.5), 1.0) == 1.0
    assert clip_coefficient(torch.tensor(4.0), 1.0) < 0.25 + 1e-6


def test_no_gradients_have_norm_zero():
    assert total_norm([]) == 0.0
    assert total_norm([layer_norms([]), layer_norms([])]) == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_total(bad):
    layers = gradients()
    layers[1][0].fill_(bad)
    total = total_norm([layer_norms(layer) for layer in layers])
    assert not total.isfinite()
