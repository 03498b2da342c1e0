import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.optim import forms
from roundpipe.optim.forms import BLOCK, Coder, convert, draw_, form_of, joined, new_moment, split_
from roundpipe.optim.operands import Moment


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_bits(*bits: int) -> torch.Tensor:
    signed = [b - (1 << 32) if b >= 1 << 31 else b for b in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("given_dtype", "form"),
    [(torch.float32, "fp32"), ("bf16", "bf16"), (torch.bfloat16, "bf16"), (torch.int8, "int8")],
)
def test_a_state_dtype_is_a_name_or_a_torch_dtype(given_dtype, form):
    assert form_of(given_dtype) == form


@pytest.mark.parametrize("wrong", ["fp16", torch.float16, None])
def test_any_other_state_dtype_is_refused_with_the_way_out(wrong):
    with pytest.raises(ConfigError, match=r"must be fp32, bf16 or int8: .*\nhint: state_dtype="):
        form_of(wrong)


# ---- masters as bf16 and remainder

BITS = st.integers(0, (1 << 32) - 1).filter(lambda b: b & 0x7F800000 != 0x7F800000 or not b << 9)
NEAR_TIES = st.integers(0, 0xFF7F).map(lambda high: (high << 16) + 0x8000)


@settings(max_examples=300)
@given(st.lists(st.one_of(BITS, NEAR_TIES), min_size=1, max_size=50))
def test_splitting_and_joining_gives_every_fp32_value_back(bits):
    master = of_bits(*(b & 0xFFFFFFFF for b in bits))
    master = torch.where(master.isnan(), 0.0, master)
    param = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = torch.empty(master.shape, dtype=torch.int16)
    split_(master, param, remainder, torch.empty(master.shape, dtype=torch.int32))
    assert torch.equal(joined(param, remainder).view(torch.int32), master.view(torch.int32))


def test_the_16_bit_half_is_rounded_to_nearest_with_ties_away_from_zero():
    master = of_bits(0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x3F80FFFF)
    param = torch.empty(5, dtype=torch.bfloat16)
    split_(master, param, torch.empty(5, dtype=torch.int16), torch.empty(5, dtype=torch.int32))
    expected = [0x3F81, 0x3F82, 0x3F80, 0xBF81 - 0x10000, 0x3F81]
    assert param.view(torch.int16).tolist() == expected
    plain = randn(0, 1000)
    param, remainder = plain.bfloat16(), torch.empty(1000, dtype=torch.int16)
    split_(plain, param, remainder, torch.empty(1000, dtype=torch.int32))
    assert torch.equal(param, plain.bfloat16())  # none of them is a tie


# ---- 8 bits


def coded(values: torch.Tensor, *, is_signed: bool, noise: int = 1 << 19) -> Moment:
    numel = values.numel()
    moment = new_moment(values, "int8", is_signed=is_signed)
    coder = Coder(forms.num_blocks(numel) * BLOCK, values.device)
    coder.values[:numel] = values
    coder.noise.fill_(noise)
    coder.encode(moment, slice(0, numel))
    return moment


def read(moment: Moment) -> torch.Tensor:
    return convert(moment, "fp32").values


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("noise", [0, 1 << 19, (1 << 20) - 1])
def test_every_code_reads_and_writes_itself_whatever_the_noise(is_signed, noise):
    codes = torch.arange(256, dtype=torch.uint8)
    if is_signed:
        codes[0x80] = 0  # a negative zero is written as one, and reads as zero
    moment = Moment(codes, torch.tensor([0.25]), is_signed)
    values = read(moment)
    assert values.unique().numel() == (255 if is_signed else 256)
    again = coded(values, is_signed=is_signed, noise=noise)
    assert torch.equal(again.values, codes)
    assert torch.equal(again.scale, moment.scale)


@pytest.mark.parametrize("is_signed", [True, False])
def test_nearest_is_within_a_sixteenth_over_many_orders_of_magnitude(is_signed):
    exponents = torch.linspace(-13 if is_signed else -30, 0, 5000)
    values = torch.exp2(exponents) * (randn(0, 5000).sign() if is_signed else 1)
    values[::BLOCK] = 1.0
    error = (read(coded(values, is_signed=is_signed)) - values).abs()
    assert (error / values.abs()).max() <= 1 / 16
    assert error.max() > 0


@pytest.mark.parametrize("is_signed", [True, False])
def test_rounding_at_random_is_right_on_average(is_signed):
    value, draws = 0.3137, 4096
    values = torch.full((draws,), value)
    values[::BLOCK] = 1.0
    moment = new_moment(values, "int8", is_signed=is_signed)
    coder = Coder(draws, values.device)
    coder.values.copy_(values)
    coder.noise.copy_(torch.arange(draws) * ((1 << 20) // draws))
    coder.encode(moment, slice(0, draws))
    got = read(moment)[values != 1.0]
    assert got.unique().numel() == 2
    assert abs(got.mean().item() - value) < 1e-3 * value


def test_a_second_moment_is_never_rounded_to_zero_but_zero_is():
    values = torch.tensor([1.0, 1e-12, 1e-30, 0.0])
    got = read(coded(values, is_signed=False, noise=0))
    assert got[3] == 0
    assert (got[:3] > 0).all()


def test_a_block_of_zeros_reads_as_zeros_and_other_blocks_do_not_care():
    values = torch.cat((torch.zeros(BLOCK), torch.full((BLOCK,), 1e20), torch.full((9,), 1e-20)))
    for is_signed in (True, False):
        got = read(coded(values, is_signed=is_signed))
        assert (got[:BLOCK] == 0).all()
        assert torch.allclose(got, values, rtol=0.07, atol=0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_value_that_is_not_finite_shows_in_its_block_alone(bad, is_signed):
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    got = read(coded(values, is_signed=is_signed))
    assert not got[3].isfinite()
    assert (got[BLOCK:] == 1).all()


def test_scales_are_powers_of_two_so_that_what_stays_is_not_rounded_again():
    values = randn(0, 4 * BLOCK)
    moment = coded(values, is_signed=True)
    assert (moment.scale.log2() == moment.scale.log2().round()).all()
    settled = read(moment)
    settled[::BLOCK] *= 64  # other scales
    again = read(coded(settled, is_signed=True, noise=12345))
    kept = settled.abs() > settled.abs().max() * 2**-14
    assert torch.equal(again[kept], settled[kept])


def test_draws_are_uniform_and_change_with_parameter_gradient_and_step():
    param, grad = randn(0, 40_000), randn(1, 40_000)
    grad[:20_000] = 0.0

    def draw(param, grad, step):
        draws, scratch = torch.empty((2, 40_000), dtype=torch.int32)
        draw_(draws, scratch, param, grad, step)
        return draws

    draws = draw(param, grad, 7)
    for shift in (0, 12, 16):
        share = ((draws >> shift) & 0xFF).bincount(minlength=256) / 40_000
        assert (share - 1 / 256).abs().max() < 0.002
    assert torch.equal(draws, draw(param, grad, 7))
    assert torch.equal(draws[5:9], draw(param.roll(-5), grad.roll(-5), 7)[:4])
    for other in (draw(param, grad, 8), draw(param.nextafter(grad), grad, 7)):
        assert (draws != other).float().mean() > 0.49


# ---- conversion


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("before", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("after", ["fp32", "bf16", "int8"])
def test_a_moment_converts_between_all_forms(before, after, is_signed):
    values = randn(0, 10, 77) if is_signed else randn(0, 10, 77).square()
    first = convert(Moment(values, None, is_signed), before)
    second = convert(first, after)
    assert second.values.shape == (10, 77)
    assert (second.scale is not None) is (after == "int8")
    narrow = "int8" in (before, after)
    got = convert(second, "fp32").values
    assert torch.allclose(got, values, rtol=0.07 if narrow else 0.01, atol=1e-4)
    if before == after:
        assert second.values is first.values
