"""An update in plain PyTorch, in chunks that stay in cache: where no C++ compiler is.

Everything is done to one chunk before the next: cast and scale the gradient, update moments and
parameter, cast it into the working weights. Separate passes would move every byte through memory
several times, and host bandwidth is what an optimizer lacks.

Adam is done to a piece by PyTorch's own fused kernel, where there is one, which differs from its
single-tensor optimizer in a last bit; everything else by the operations of that optimizer, in their
order: the same bits, where the state is fp32.

Operations run with the intra-op threads of the thread that updates. On idle cores that is a fifth
quicker than threads of our own that take a chunk each, which wait for each other in Python.

All memory is allocated before the first write, so running out of it changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roundpipe.optim import forms

if TYPE_CHECKING:
    from torch import Tensor

    from roundpipe.optim.operands import Moment, Numbers, Operands, Told

CHUNK = 1 << 18  # elements, a multiple of forms.BLOCK: five fp32 streams of 1 MB each
FUSED = hasattr(torch, "_fused_adam_") and hasattr(torch, "_fused_adamw_")


@torch.no_grad()
def update_in_chunks_(operands: Operands, numbers: Numbers) -> None:
    """Do one update in place; all is contiguous. Same bits for any number of intra-op threads."""
    numel = operands.param.numel()
    work = _Work(operands, min(CHUNK, forms.num_blocks(numel) * forms.BLOCK))
    for start in range(0, numel, CHUNK):
        work.do(operands, numbers, slice(start, min(start + CHUNK, numel)))


class _Work:
    """The buffers of a chunk, and what is done in them."""

    def __init__(self, o: Operands, size: int) -> None:
        dtype = torch.float32 if o.remainder is not None else o.param.dtype
        device = o.param.device
        self._grad, self._other = torch.empty((2, size), dtype=dtype, device=device)
        self._param = None if o.remainder is None else torch.empty(size, device=device)
        self._int = torch.empty(size if dtype == torch.float32 else 0, dtype=torch.int32,
                                device=device)  # fmt: skip
        is_fused = FUSED and device.type == "cpu" and dtype in {torch.float32, torch.float64}
        self._step = torch.empty((), device=device) if is_fused else None
        narrow = any(m is not None and m.values.dtype != dtype for m in o.moments)
        self._draws = torch.empty_like(self._int) if narrow else None
        # 8-bit moments: a coder each, which holds the moment between reading and writing.
        self._coders = [
            None if m is None or m.scale is None else forms.Coder(size, device) for m in o.moments
        ]
        self._halves = [
            None if m is None or m.values.dtype == dtype or m.scale is not None
            else torch.empty(size, device=device)
            for m in o.moments
        ]  # fmt: skip

    def do(self, o: Operands, numbers: Numbers, part: slice) -> None:
        """Update the elements ``part``."""
        numel = part.stop - part.start
        param = flat_param = o.param.view(-1)[part]
        if self._param is not None and o.remainder is not None:
            low = o.remainder.view(-1)[part]
            param = forms.joined(flat_param, low, out=self._param[:numel])
        grad = self._gradient(o, part)
        if self._draws is not None:
            forms.draw_(self._draws[:numel], self._int[:numel], param, grad, numbers.draw)
        first, second = (self._load(i, moment, part) for i, moment in enumerate(o.moments))
        if numbers.rule == "adam":
            assert first is not None
            assert second is not None
            self._adam(param, grad, first, second, numbers)
        else:
            self._sgd(param, grad, first, numbers)
        for i, moment in enumerate(o.moments):
            self._store(i, moment, part)
        if self._param is not None and o.remainder is not None:
            param.masked_fill_(param.isnan(), float("nan"))  # of many NaNs one
            forms.split_(param, flat_param, o.remainder.view(-1)[part], self._int[:numel])
        if o.out is not None:
            o.out.view(-1)[part].copy_(flat_param)

    def _gradient(self, o: Operands, part: slice) -> Tensor:
        grad, own = o.grad.view(-1)[part], self._grad[: part.stop - part.start]
        if grad.dtype != own.dtype:
            grad = own.copy_(grad)
        return grad if o.grad_scale is None else torch.mul(grad, o.grad_scale, out=own)

    def _load(self, i: int, moment: Moment | None, part: slice) -> Tensor | None:
        if moment is None:
            return None
        numel = part.stop - part.start
        coder, half = self._coders[i], self._halves[i]
        if coder is not None:
            coder.decode(moment, part)
            return coder.values[:numel]
        values: Tensor = moment.values.view(-1)[part]
        if half is not None:
            values = half[:numel].copy_(values)
        return values

    def _store(self, i: int, moment: Moment | None, part: slice) -> None:
        coder, half = self._coders[i], self._halves[i]
        if moment is None or self._draws is None:
            return
        numel = part.stop - part.start
        draws, values = self._draws[:numel], moment.values.view(-1)[part]
        if coder is not None and moment.is_signed:
            torch.bitwise_and(draws, 0xFFFFF, out=coder.noise[:numel])
            coder.encode(moment, part)
        elif coder is not None:
            noise = torch.bitwise_right_shift(draws, 12, out=coder.noise[:numel])
            noise.bitwise_and_(0xFFFFF)
            coder.encode(moment, part)
        elif half is not None and moment.is_signed:
            values.copy_(half[:numel])
        elif half is not None:
            forms.round_to_bf16_(half[:numel], draws, values, self._int[:numel])

    def _adam(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Numbers) -> None:
        numel = p.numel()
        if self._step is not None and c.told is not None:
            self._fused(p, g, m, v, c, c.told)
            return
        if c.l2 != 0:
            g = torch.add(g, p, alpha=c.l2, out=self._grad[:numel])
        if c.decay != 1:
            p.mul_(c.decay)
        m.lerp_(g, c.first_weight)
        v.mul_(c.second_keep).addcmul_(g, g, value=c.second_weight)
        denom = torch.sqrt(v, out=self._other[:numel]).div_(c.root_correction).add_(c.eps)
        p.addcdiv_(m, denom, value=c.step_size)

    def _fused(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, c: Numbers, told: Told) -> None:
        assert self._step is not None
        fused = torch._fused_adam_ if c.l2 else torch._fused_adamw_
        fused(
            [p], [g], [m], [v], [], [self._step.fill_(told.step)],
            lr=told.lr, beta1=told.beta1, beta2=c.second_keep,
            weight_decay=c.l2 or told.weight_decay if c.decay != 1 or c.l2 else 0.0,
            eps=c.eps, amsgrad=False, maximize=False,
        )  # fmt: skip

    def _sgd(self, p: Tensor, g: Tensor, m: Tensor | None, c: Numbers) -> None:
        own = self._grad[: p.numel()]
        if c.l2 != 0:
            g = torch.add(g, p, alpha=c.l2, out=own)
        if m is not None:
            if c.is_first:
                m.copy_(g)
            else:
                m.mul_(c.first_weight).add_(g, alpha=c.second_keep)
            g = torch.add(g, m, alpha=c.first_weight, out=own) if c.is_nesterov else m
        p.add_(g, alpha=c.step_size)
