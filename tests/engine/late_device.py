"""A device whose Python runs at once and whose copies run late: what a card does, on the CPU."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice


class _Later(TorchFunctionMode):
    """Puts copies that need not block on a stream, which knows addresses and owns nothing."""

    def __init__(self, put):
        super().__init__()
        self._put = put

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args
            self._put(target.detach(), source.detach())
            return target
        return func(*args, **kwargs)


class LateEvent:
    """An event of such a device, which its streams can wait for by themselves."""

    def __init__(self, event):
        self.event = event
        self.is_complete, self.wait = event.is_complete, event.wait


class LateDevice:
    """Streams but ``compute`` are a `CpuDevice`'s, random delays and all.

    ``pinned_bytes``: of host memory, for all devices of a test together. ``passing`` is to be set
    to the engine's blocks: a copy does not keep what lies there from being given to someone else.
    """

    pins = True

    def __init__(self, name="late", *, registrar=None, seed=0, max_delay_seconds=1e-3):
        self._cpu = CpuDevice(name, threads=1, max_delay_seconds=max_delay_seconds, seed=seed)
        self.registrar = registrar or FakeDevice(pinned_bytes=1 << 40)
        self.passing = None
        self.register, self.unregister = self.registrar.register, self.registrar.unregister

    def __getattr__(self, name):
        return getattr(self._cpu, name)

    def launch(self, stream, work, *, timed=False, label="", on_error=None, **_):
        try:
            if stream == "compute":
                work()
            else:
                with _Later(lambda target, source: self._copy(stream, target, source)):
                    work()
        except BaseException as error:
            on_error(error)
        return self._cpu.launch(stream, lambda: None, timed=timed, label=label)

    def record(self, stream):
        return LateEvent(self._cpu.record(stream))

    def wait(self, stream, event):
        """Block the caller for what happens on the host, as a card's streams must."""
        if stream == "compute" or not isinstance(event, LateEvent):
            event.wait()
        else:
            self._cpu.wait(stream, event.event)

    def _copy(self, stream, target, source):
        target, source = self._not_owned(target), self._not_owned(source)
        self._cpu.launch(stream, lambda: target.copy_(source))

    def _not_owned(self, tensor):
        """The same memory, without keeping whoever owns it from losing it."""
        held = self.passing._held if self.passing is not None else {}
        berth = held.get(tensor.untyped_storage().data_ptr())
        if berth is None:
            return tensor
        flat = berth.block.tensor[: tensor.untyped_storage().nbytes()].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def late_devices(count, *, pinned_bytes=1 << 40):
    registrar = FakeDevice(pinned_bytes=pinned_bytes)
    return [LateDevice(f"late{i}", registrar=registrar, seed=i) for i in range(count)]
