"""From what a user writes for ``devices`` to devices.

    auto           every card torch can use; without any card, one CPU device
    2              the first two cards; without any card, two CPU devices
    cuda           every card torch can use, never the CPU;  cuda*2: the first two
    cuda:0         the card that the system's tool calls 0;  cuda:0*2: two workers on it
    cpu, cpu*3     CPU devices, which share the intra-op threads evenly
    [cuda:0, 2]    a list of these; a number in a list is a card's
    emulated:8x4090,512GB            a machine one does not have, see plan/machine_text
    emulated:8x4090,time_scale=0.1   ten times as fast as it would be

A machine that has a card which torch cannot use is an error that names the cause: a run on the CPU
beside a card must be asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from roundpipe.device.cards import Card, find_cards
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.cuda import CudaDevice, CudaState, cause_of_none, cuda_state
from roundpipe.device.emulated import emulate
from roundpipe.errors import DeviceError
from roundpipe.plan.machine_text import parse_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from roundpipe.device.api import Device

    DeviceSpec = str | int | torch.device | Device | Iterable[str | int | torch.device | Device]

_ON_CPU = "hint: devices=cpu trains on the CPU all the same"
_TERM = re.compile(r"(cpu|cuda)(?::(\d+))?(?:\s*\*\s*(\d+))?")
_HIDING = {
    "NVIDIA": ("CUDA_VISIBLE_DEVICES",),
    "AMD": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
_EMULATED = "emulated:"
_TIME_SCALE = re.compile(r"time_scale\s*=\s*(.*)")
_ORDERING = ("CUDA_DEVICE_ORDER", *_HIDING["AMD"])


@dataclass(frozen=True)
class _Wanted:
    """One device to make. ``index`` is torch's own index of a card; None is the CPU."""

    name: str
    index: int | None = None


@dataclass(frozen=True)
class Surroundings:
    """What the answer depends on beside the spec; every part can be given, for tests.

    Without an ``environment`` nothing is known of it, and cards are counted as torch counts them.
    """

    environment: Mapping[str, str] | None = None
    find_cards: Callable[[], Sequence[Card]] = find_cards
    cuda_state: Callable[..., CudaState] = cuda_state

    def usable(self) -> CudaState:
        """Which cards torch can use, in the order in which the user counts them."""
        known = self.environment
        chosen = known is None or any(name in known for name in _ORDERING)
        return self.cuda_state(keep_torch_order=chosen)

    def cause_of_unused(self, state: CudaState, cards: Sequence[Card]) -> str:
        """Why torch cannot use any of ``cards``."""
        vendors = {card.vendor for card in cards}
        if state.cuda_version is None and state.hip_version is None:
            return f"{cause_of_none(state)}; install torch's build for {_platform(cards[0])}"
        built_for = "NVIDIA" if state.cuda_version is not None else "AMD"
        if built_for not in vendors:
            return f"this torch is a build for {built_for} ({state.torch_version})"
        for name in _HIDING[built_for]:
            value = (self.environment or {}).get(name)
            if value is not None and not re.match(r"\s*(\d|[A-Za-z])", value):
                return f"{name}={value!r} hides every card"
        card = next(card for card in cards if card.vendor == built_for)
        if not card.has_driver:
            return (
                "no driver is loaded for it, or none was passed into this container "
                f"({cause_of_none(state)})"
            )
        return cause_of_none(state)


def resolve_devices(
    spec: DeviceSpec = "auto",
    *,
    threads: int | None = None,
    environment: Mapping[str, str] | None = None,
    surroundings: Surroundings | None = None,
) -> list[Device]:
    """Make the devices that ``spec`` asks for; see the module docstring for what it may be.

    ``torch.device`` and ready devices may stand in a list too; a ``torch.device``'s index is
    torch's own. ``threads`` is the intra-op threads of each CPU device, by default an even share of
    the calling thread's. ``environment`` is the process's, for its ``CUDA_VISIBLE_DEVICES`` and
    kin. Raises DeviceError with the cause and the way out, ConfigError for a machine that it does
    not understand.
    """
    if isinstance(spec, str) and spec.strip().startswith(_EMULATED):
        return _emulated(spec.strip().removeprefix(_EMULATED))
    around = surroundings or Surroundings(environment)
    wanted = _named(_expand(spec, around))
    num_cpus = sum(isinstance(one, _Wanted) and one.index is None for one in wanted)
    share = threads or max(1, torch.get_num_threads() // max(1, num_cpus))
    return [_make(one, share) if isinstance(one, _Wanted) else one for one in wanted]


def _make(wanted: _Wanted, threads: int) -> Device:
    if wanted.index is None:
        return CpuDevice(wanted.name, threads=threads)
    return CudaDevice(wanted.index, wanted.name)


def _emulated(text: str) -> list[Device]:
    """The devices of the machine that ``text`` describes, with how fast its time goes."""
    terms, scale = [], 1.0
    for term in text.split(","):
        match = _TIME_SCALE.fullmatch(term.strip())
        if match is None:
            terms.append(term)
            continue
        if not re.fullmatch(r"\d+\.?\d*|\.\d+", match.group(1).strip()):
            raise DeviceError(f"not a number: {term.strip()}\nhint: time_scale=0.1")
        scale = float(match.group(1))
    return list(emulate(parse_machine(",".join(terms)), time_scale=scale))


def _expand(spec: DeviceSpec, around: Surroundings) -> list[_Wanted | Device]:
    """One entry a device, in order."""
    if isinstance(spec, str):
        terms = [term.strip() for term in spec.strip().strip("[]").split(",")]
        if len(terms) > 1:
            return [one for term in terms for one in _expand_item(_number(term), around)]
        spec = _number(terms[0])
    if spec == "auto":
        return list(_automatic(around))
    if isinstance(spec, int) and not isinstance(spec, bool):
        return list(_first(spec, around))
    if isinstance(spec, str | torch.device) or _is_device(spec):
        return _expand_item(spec, around)
    try:
        items = list(cast("Iterable[object]", spec))
    except TypeError:
        raise _not_understood(spec) from None
    if not items:
        raise DeviceError("devices names no device: []\nhint: devices=auto")
    return [one for item in items for one in _expand_item(item, around)]


def _number(term: str) -> str | int:
    return int(term) if term.isdecimal() else term


def _is_device(item: object) -> bool:
    """Whether it can do what a Device does; of another kind than ours too."""
    return all(hasattr(item, method) for method in ("launch", "record", "wait", "torch_device"))


def _expand_item(item: object, around: Surroundings) -> list[_Wanted | Device]:
    """What one entry of a list stands for."""
    if _is_device(item):
        return [cast("Device", item)]
    if isinstance(item, torch.device):
        return [_of_torch(item)]
    if isinstance(item, int) and not isinstance(item, bool):
        item = f"cuda:{item}"
    match = _TERM.fullmatch(item.strip()) if isinstance(item, str) else None
    if match is None:
        raise _not_understood(item)
    kind, index, times = match.groups()
    count = 1 if times is None else int(times)
    if count == 0:
        raise DeviceError(f"devices names no device: {item}")
    if kind == "cpu":
        return [_Wanted("cpu" if index is None else f"cpu:{index}")] * count
    if index is None:
        cards = list(_cards(around))
        return list(cards if times is None else _take(cards, count))
    return [_numbered(int(index), around)] * count


def _of_torch(device: torch.device) -> _Wanted:
    if device.type == "cpu":
        return _Wanted("cpu")
    if device.type == "cuda":
        return _Wanted(f"cuda:{device.index or 0}", device.index or 0)
    raise _not_understood(device)


def _automatic(around: Surroundings) -> Sequence[_Wanted]:
    """Every usable card, or one CPU where there is no card at all."""
    if around.usable().cards or around.find_cards():
        return _cards(around)
    return [_Wanted("cpu")]


def _first(count: int, around: Surroundings) -> Sequence[_Wanted]:
    """So many cards, or so many CPU devices where there is no card at all."""
    if count < 1:
        raise DeviceError(f"devices must be at least 1: {count}")
    if around.usable().cards or around.find_cards():
        return _take(_cards(around), count)
    return [_Wanted("cpu")] * count


def _take(cards: Sequence[_Wanted], count: int) -> Sequence[_Wanted]:
    if count > len(cards):
        raise DeviceError(
            f"more devices asked for than cards that torch can use: {count} of {len(cards)}\n"
            f"hint: devices={len(cards)}, or cuda:0*{count} for {count} workers on one card"
        )
    return cards[:count]


def _cards(around: Surroundings) -> Sequence[_Wanted]:
    """Every card torch can use; an error with the cause if it is none."""
    state = around.usable()
    if state.cards:
        return [_Wanted(f"cuda:{place}", index) for place, index in enumerate(state.cards)]
    cards = around.find_cards()
    if not cards:
        raise DeviceError(f"this machine has no card that torch could use\n{_ON_CPU}")
    found = ", ".join(f"{card.vendor} ({card.seen})" for card in cards)
    cause = around.cause_of_unused(state, cards)
    raise DeviceError(f"there is a card that torch cannot use: {found}: {cause}\n{_ON_CPU}")


def _numbered(place: int, around: Surroundings) -> _Wanted:
    """The card that the user calls ``cuda:place``."""
    cards = _cards(around)
    if place >= len(cards):
        names = ", ".join(card.name for card in cards)
        raise DeviceError(f"no such card: cuda:{place}\nhint: torch can use {names}")
    return cards[place]


def _platform(card: Card) -> str:
    return "ROCm" if card.vendor == "AMD" else "CUDA"


def _not_understood(item: object) -> DeviceError:
    return DeviceError(
        f"not a device: {item!r}\n"
        "hint: auto, a number of cards, cuda:0, cpu, cpu*3, a list of these, or emulated:8x4090"
    )


def _named(wanted: Iterable[_Wanted | Device]) -> list[_Wanted | Device]:
    """Tell devices of one name apart: ``cpu:0``, ``cpu:1``; two workers on a card ``cuda:0/0``."""
    everything = list(wanted)
    total = Counter(one.name for one in everything)
    seen: Counter[str] = Counter()
    named: list[_Wanted | Device] = []
    for one in everything:
        if isinstance(one, _Wanted) and total[one.name] > 1:
            between = ":" if one.name == "cpu" else "/"
            named.append(replace(one, name=f"{one.name}{between}{seen[one.name]}"))
        else:
            named.append(one)
        seen[one.name] += 1
    return named
