"""The compiled update: `kernel.cpp` called through ctypes, which lets other Python threads run.

Only for what lies contiguously in host memory; `Kernel.can_run` says whether it can.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from roundpipe.errors import RoundPipeError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from roundpipe.optim.operands import Moment, Numbers, Operands

_FLOATS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_RULES = {"adam": 0, "sgd": 1}


class KernelError(RoundPipeError):
    """The compiled update cannot be had on this machine; the message says why."""


class _Update(ctypes.Structure):
    """The same fields in the same order as ``Update`` in kernel.cpp."""

    _fields_ = (
        ("numel", ctypes.c_int64),
        ("param", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("first_scale", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("second_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("grad_float", ctypes.c_int32),
        ("out_float", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("is_scaled", ctypes.c_int32),
        ("grad_scale", ctypes.c_float),
        ("draw", ctypes.c_uint32),
        ("l2", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("first_weight", ctypes.c_float),
        ("second_keep", ctypes.c_float),
        ("second_weight", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("step_size", ctypes.c_float),
        ("is_nesterov", ctypes.c_int32),
        ("is_first", ctypes.c_int32),
    )


class Kernel:
    """A loaded library; any number of threads may use it. Raises KernelError if it is not ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            size, self._update = library.roundpipe_update_bytes, library.roundpipe_update
        except (OSError, AttributeError) as error:
            raise KernelError(f"it cannot be loaded: {error}") from error
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(_Update):
            raise KernelError(f"it is of another version: {path}")
        self._update.argtypes = (ctypes.POINTER(_Update),)
        self._update.restype = None

    def can_run(self, operands: Operands) -> bool:
        """Whether it knows these dtypes and the memory is the host's. Else chunks of PyTorch do."""
        o = operands
        wide = torch.float32 if o.remainder is None else torch.bfloat16
        moments = [m for m in o.moments if m is not None]
        return (
            o.param.dtype == wide
            and o.grad.dtype in _FLOATS
            and (o.out is None or o.out.dtype in _FLOATS)
            and all(m.values.dtype in _MOMENTS for m in moments)
            and len({m.values.dtype for m in moments}) <= 1
            and all(tensor.device.type == "cpu" for tensor in o.tensors())
        )

    def update_(self, operands: Operands, numbers: Numbers, *, threads: int) -> None:
        """Do one update in place, by ``threads`` threads, this one among them.

        Every tensor is contiguous and `can_run`. Blocks until all is written; allocates nothing
        but the threads, and does without those that the system refuses.
        """
        o, c = operands, numbers
        numel = o.param.numel()
        for tensor in o.tensors():
            assert tensor.numel() == numel, (tensor.shape, o.param.shape)
            assert tensor.is_contiguous(), tensor.stride()
        first, second = o.moments
        update = _Update(
            numel=numel,
            param=o.param.data_ptr(),
            remainder=_address(o.remainder),
            grad=o.grad.data_ptr(),
            out=_address(o.out),
            grad_float=_FLOATS[o.grad.dtype],
            out_float=0 if o.out is None else _FLOATS[o.out.dtype],
            form=0 if first is None else _MOMENTS[first.values.dtype],
            rule=_RULES[c.rule],
            threads=threads,
            is_scaled=o.grad_scale is not None,
            grad_scale=1.0 if o.grad_scale is None else float(o.grad_scale),
            draw=c.draw,
            l2=c.l2,
            decay=c.decay,
            first_weight=c.first_weight,
            second_keep=c.second_keep,
            second_weight=c.second_weight,
            root_correction=c.root_correction,
            eps=c.eps,
            step_size=c.step_size,
            is_nesterov=c.is_nesterov,
            is_first=c.is_first,
        )
        update.first, update.first_scale = _addresses(first, numel)
        update.second, update.second_scale = _addresses(second, numel)
        self._update(ctypes.byref(update))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(moment: Moment | None, numel: int) -> tuple[int | None, int | None]:
    if moment is None:
        return None, None
    if moment.scale is not None:
        assert moment.scale.is_contiguous()
        assert moment.scale.numel() * 256 >= numel, (moment.scale.shape, numel)
    return moment.values.data_ptr(), _address(moment.scale)
