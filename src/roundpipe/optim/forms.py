"""Forms of optimizer state: fp32, bf16 or 8-bit moments, and what a 16-bit weight lacks of fp32.

A master weight may be kept as its bf16 working weight and a signed 16-bit *remainder*: together
exactly fp32. The weight is the fp32 value rounded to nearest with ties *up*, so that what is
missing always fits in 16 bits; with ties to even it would not.

8-bit moments are small floats (second moment: 5 bits exponent and 3 bits mantissa, no sign; first:
sign, 4 and 3) times a power of two for each block of 256. Three choices make them train like fp32:

1. Floats, not steps of equal size: what counts is the ratio of the two moments, and values in a
   block differ by orders of magnitude. A second moment never becomes 0 unless it is: it is a
   divisor.
2. Rounding at random, up with the probability of the part cut off. A second moment changes by
   0.1 % a step and would stand still under rounding to nearest, in 8 bits as in bf16; at random it
   is right on average.
3. Powers of two as scales: a value that has not changed is not rounded again when its block's
   largest has.

The draws are a hash of the parameter, its gradient and the step: the same in any thread or piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from roundpipe.errors import ConfigError
from roundpipe.optim.operands import Moment

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["fp32", "bf16", "int8"]

BLOCK = 256  # elements that share the scale of 8-bit moments
CUT = 64  # a cut at a multiple of it changes no bit; of BLOCK where moments are 8-bit

_FORMS: dict[object, Form] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}
_UNSIGNED_LOW = 96 << 3  # the code of the smallest exponent, in units of the last bit kept
_SIGNED_LOW = 112 << 3
_SMALLEST = 2.0**-100  # a block whose largest is below is zero


def form_of(state_dtype: object) -> Form:
    """The form that a user's ``state_dtype`` means; raises ConfigError if none."""
    if isinstance(state_dtype, str) and state_dtype in get_args(Form):
        return state_dtype  # type: ignore[return-value]
    if state_dtype in _FORMS:
        return _FORMS[state_dtype]
    raise ConfigError(
        f"state_dtype must be fp32, bf16 or int8: {state_dtype}\nhint: state_dtype='fp32'"
    )


def new_moment(parameter: Tensor, form: Form, *, is_signed: bool) -> Moment:
    """A moment of zeros; fp64 for an fp64 parameter."""
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    dtype = {"fp32": wide, "bf16": torch.bfloat16, "int8": torch.uint8}[form]
    # Contiguous whatever the parameter's strides: blocks are counted in this order.
    values = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    scale = None
    if form == "int8":
        scale = torch.zeros(num_blocks(parameter.numel()), device=parameter.device)
    return Moment(values, scale, is_signed)


def num_blocks(numel: int) -> int:
    """How many blocks of 8-bit moments ``numel`` elements have."""
    return -(-numel // BLOCK)


def convert(moment: Moment, form: Form) -> Moment:
    """The same moment in another form, rounded to nearest; itself where it has that form."""
    now: Form = "int8" if moment.scale is not None else "fp32"
    if moment.values.dtype in {torch.bfloat16, torch.float16}:
        now = "bf16"
    if now == form and moment.values.dtype != torch.float16:
        return Moment(moment.values.contiguous(), moment.scale, moment.is_signed)
    numel, shape = moment.values.numel(), moment.values.shape
    coder = Coder(num_blocks(numel) * BLOCK, moment.values.device)
    wide = coder.values
    if moment.scale is None:
        wide[:numel].copy_(moment.values.reshape(-1))
    else:
        coder.decode(moment, slice(0, numel))
    if form != "int8":
        dtype = torch.float32 if form == "fp32" else torch.bfloat16
        return Moment(wide[:numel].to(dtype, copy=True).view(shape), None, moment.is_signed)
    coded = new_moment(moment.values, form, is_signed=moment.is_signed)
    coder.noise.fill_(1 << 19)  # half of the last bit kept: to nearest
    coder.encode(coded, slice(0, numel))
    return coded


# ---- masters as bf16 and remainder


def joined(param: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 values of bf16 ``param`` and int16 ``remainder``; into ``out`` (fp32) if given."""
    out = torch.empty(param.shape, device=param.device) if out is None else out
    bits = out.view(torch.int32)
    bits.copy_(param.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    return out


def split_(master: Tensor, param: Tensor, remainder: Tensor, scratch: Tensor) -> None:
    """Write fp32 ``master`` as bf16 ``param`` and int16 ``remainder``; ``scratch``: int32."""
    bits = master.view(torch.int32)
    torch.add(bits, 0x8000, out=scratch).bitwise_right_shift_(16)
    param.view(torch.int16).copy_(scratch)
    remainder.copy_(torch.sub(bits, scratch.bitwise_left_shift_(16), out=scratch))


# ---- random rounding


def draw_(draws: Tensor, scratch: Tensor, param: Tensor, grad: Tensor, draw: int) -> None:
    """Fill ``draws`` (int32) with 32 random bits each; see the module's docstring."""
    torch.mul(param.view(torch.int32), _signed(0x9E3779B1), out=draws)
    torch.mul(grad.view(torch.int32), _signed(0x85EBCA6B), out=scratch)
    draws.add_(scratch).add_(_signed(draw))
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
        torch.bitwise_right_shift(draws, shift, out=scratch)
        scratch.bitwise_and_((1 << (32 - shift)) - 1)  # the shift copies the sign
        draws.bitwise_xor_(scratch)
        if factor != 1:
            draws.mul_(_signed(factor))


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def round_to_bf16_(values: Tensor, draws: Tensor, target: Tensor, scratch: Tensor) -> None:
    """Write fp32 ``values`` to bf16 ``target``, rounded at random; not finite ones cut off."""
    bits = values.view(torch.int32)
    torch.bitwise_right_shift(draws, 16, out=scratch).bitwise_and_(0xFFFF)
    scratch.mul_(torch.isfinite(values)).add_(bits).bitwise_right_shift_(16)
    target.view(torch.int16).copy_(scratch)


class Coder:
    """Buffers to read and write 8-bit moments, ``size`` elements at a time (whole blocks).

    ``values`` (fp32) is what was read or is to be written, destroyed by writing; ``noise`` (int32,
    20 bits) what it is rounded with.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.values: Tensor = torch.zeros(size, device=device)
        self._float = torch.zeros(size, device=device)
        self.noise, self._int, self._small = torch.zeros(
            (3, size), dtype=torch.int32, device=device
        )
        self._flag = torch.zeros(size, dtype=torch.bool, device=device)
        self._largest, self._inverse, self._scale = torch.zeros((3, size // BLOCK), device=device)
        codes = torch.arange(256, dtype=torch.int32, device=device)
        self._tables = {False: _unsigned_values(codes), True: _signed_values(codes)}

    def decode(self, moment: Moment, part: slice) -> None:
        """Read the elements ``part`` of a flat moment, from a block's start, into ``values``."""
        assert moment.scale is not None
        codes = moment.values.view(-1)[part]
        numel, blocks = codes.numel(), slice(part.start // BLOCK, num_blocks(part.stop))
        index = self._int[:numel].copy_(codes)
        torch.index_select(self._tables[moment.is_signed], 0, index, out=self.values[:numel])
        self.values[numel:].zero_()
        scale = moment.scale[blocks]
        by_block = self.values.view(-1, BLOCK)[: scale.numel()]
        by_block.mul_(scale[:, None])

    def encode(self, moment: Moment, part: slice) -> None:
        """Write ``values`` to the elements ``part`` of a flat moment, from a block's start."""
        assert moment.scale is not None
        numel, blocks = part.stop - part.start, num_blocks(part.stop - part.start)
        self.values[numel:].zero_()
        first = part.start // BLOCK
        moment.scale[first : first + blocks].copy_(self._scale_blocks()[:blocks])
        write = self._signed_codes if moment.is_signed else self._unsigned_codes
        moment.values.view(-1)[part].copy_(write()[:numel])

    def _scale_blocks(self) -> Tensor:
        """Divide ``values`` by their block's power of two, which is returned: at most 1.875."""
        by_block, flag = self.values.view(-1, BLOCK), self._flag[: self._scale.numel()]
        absolute = torch.abs(self.values, out=self._float).view(-1, BLOCK)
        largest = torch.amax(absolute, 1, out=self._largest)
        inverse = self._inverse
        scale: Tensor = self._scale
        bits: Tensor = torch.add(
            largest.view(torch.int32), (1 << 20) - 1, out=scale.view(torch.int32)
        )
        bits.bitwise_right_shift_(23).bitwise_left_shift_(23)
        torch.gt(largest, _SMALLEST, out=flag)
        torch.where(flag, scale, largest.mul_(0), out=scale)  # NaN stays NaN
        torch.reciprocal(scale, out=inverse)
        inverse.masked_fill_(torch.gt(scale, 0, out=flag).logical_not_(), 0)
        by_block.mul_(inverse[:, None])
        return scale

    def _unsigned_codes(self) -> Tensor:
        code: Tensor = torch.add(self.values.view(torch.int32), self.noise, out=self._int)
        code.bitwise_right_shift_(20).sub_(_UNSIGNED_LOW).clamp_(1, 255)
        positive: Tensor = torch.gt(self.values, 0, out=self._flag)
        return code.mul_(positive)

    def _signed_codes(self) -> Tensor:
        bits, noise, code, small = self.values.view(torch.int32), self.noise, self._int, self._small
        share = self._float.copy_(noise).mul_(2.0**-20)
        sign: Tensor = torch.bitwise_right_shift(bits, 24, out=code)
        sign.bitwise_and_(0x80)
        bits.bitwise_and_(0x7FFFFFFF)
        is_small = torch.lt(self.values, 2.0**-14, out=self._flag)
        noise.add_(bits).bitwise_right_shift_(20).sub_(_SIGNED_LOW)
        small.copy_(self.values.mul_(2.0**17).clamp_(max=8.0).add_(share))
        torch.where(is_small, small, noise, out=noise)
        return sign.bitwise_or_(noise.clamp_(max=127))


def _unsigned_values(codes: Tensor) -> Tensor:
    values = ((codes + _UNSIGNED_LOW) << 20).view(torch.float32)
    return torch.where(codes > 0, values, 0.0)


def _signed_values(codes: Tensor) -> Tensor:
    rest = codes & 0x7F
    large = ((rest + _SIGNED_LOW) << 20).view(torch.float32)
    values = torch.where(rest < 8, rest * 2.0**-17, large)
    return torch.where(codes >= 0x80, -values, values)
