"""Ways out as ready ``key=value``: each was tried on the same arithmetic before it is said.

Only what training accepts is said, so a hint never leads to the next refusal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, PlanError
from roundpipe.finetune.forecast.profile import profile_of
from roundpipe.finetune.forecast.speed import quick_seconds, setting_of
from roundpipe.finetune.forecast.wish import method_of, trains_today
from roundpipe.plan.amounts import write_bytes
from roundpipe.report.forecast import Hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from roundpipe.finetune.forecast.memory import Case
    from roundpipe.finetune.forecast.speed import Speed
    from roundpipe.finetune.forecast.wish import Wish

_MOST = 3
_GAIN = 1.05  # times as fast: less is not worth a word
_ROOM = 1.02  # times what is needed, so that three digits never say less
_ROUND = 128  # tokens; a length that is said is a multiple


def fitting_hints(
    wish: Wish,
    case: Case,
    lacking: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[Hint, ...]:
    """What would make the job fit; where one change does not do, nothing is said of it.

    ``lacking``: names of what does not fit.
    """
    trials = _Trials(wish, case, environment)
    found: list[Hint] = []
    if "device memory" in lacking:
        found += trials.for_devices()
    if "host memory" in lacking:
        found += trials.for_host() or [trials.more_memory()]
    if lacking == ("disk",):
        found.append(_for_disk(wish, case))
    unique = {hint.text: hint for hint in found}
    return tuple(unique.values())[:_MOST]


class _Trials:
    """Tries changes of one case."""

    def __init__(self, wish: Wish, case: Case, environment: Mapping[str, str]) -> None:
        self._wish, self._case, self._environment = wish, case, environment

    def for_devices(self) -> Iterator[Hint]:
        """Changes with which every stage fits a device."""
        config, case = self._wish.config, self._case
        if not self._is_single():
            sizes = case.sizes()
            if sizes and self._is_enough(case, sizes[-1]):
                yield Hint(f"micro_batch_size={sizes[-1]}")
                return
        longest = case.longest(batch=case.batch_size)
        shorter = longest // _ROUND * _ROUND if longest >= _ROUND else longest
        if 2 <= shorter < config.max_length:
            job = replace(case.job, length=shorter)
            if self._is_enough(replace(case, job=job), 1):
                yield self._with_size(Hint(f"max_length={shorter}"))
        yield from self._other_methods(lambda tried: "")

    def for_host(self) -> list[Hint]:
        """Changes with which host memory holds all."""
        return list(self._for_host())

    def more_memory(self) -> Hint:
        """How much host memory would do, where nothing else does."""
        case = self._case
        needs = case.host_total(case.least_host(size=1), case.least_device(size=1))
        return Hint(f"{write_bytes(needs * _ROOM)} of host memory")

    def _for_host(self) -> Iterator[Hint]:
        case, config = self._case, self._wish.config

        def host(tried: Case) -> str:
            need, device = tried.least_host(size=1), tried.least_device(size=1)
            return write_bytes(tried.host_total(need, device))

        if self._wish.method.name == "full" and config.optim_state_dtype == "fp32":
            for moments in ("bf16", "int8"):
                tried = replace(case, job=case.job.with_moments(moments))
                words = f"optim_state_dtype={moments}"
                if self._helps(tried, optim_state_dtype=moments):
                    yield Hint(words, host(tried))
                    break
        if config.staleness == 1:
            tried = replace(case, job=replace(case.job, staleness=0))
            if self._helps(tried):
                yield Hint("staleness=0", host(tried))
        yield from self._other_methods(host)
        batch = config.batch_size // 2
        while batch >= 1:
            tried = replace(case, batch_size=batch)
            if self._helps(tried):
                yield Hint(f"batch_size={batch}", host(tried))
                break
            batch //= 2

    def _other_methods(self, effect: Callable[[Case], str]) -> Iterator[Hint]:
        for name in ("lora", "qlora"):
            if self._wish.method.name in (name, "qlora"):
                continue
            try:
                method = method_of(name, self._wish.config)
                profile = profile_of(
                    self._wish,
                    bits=self._case.job.bits,
                    method=method,
                    environment=self._environment,
                )
            except ConfigError:
                continue
            tried = replace(self._case, profile=profile)
            if self._helps(tried, finetuning_type=name):
                yield self._with_size(Hint(f"finetuning_type={name}", effect(tried)))
                break

    def _is_single(self) -> bool:
        """Whether microbatches are one sequence each, or as small as the planner likes."""
        config = self._wish.config
        return (config.micro_batch_size or 1) == 1 and config.num_microbatch is None

    def _with_size(self, hint: Hint) -> Hint:
        """A hint that was tried with microbatches of one sequence says so."""
        if self._is_single():
            return hint
        return Hint(f"micro_batch_size=1 {hint.text}", hint.effect)

    def _helps(self, tried: Case, **values: Any) -> bool:
        return trains_today(**values) and self._is_enough(tried, 1)

    def _is_enough(self, tried: Case, size: int) -> bool:
        device = tried.least_device(size=size)
        if device.total > tried.device_limit:
            return False
        host = tried.host_total(tried.least_host(size=size), device)
        return host <= tried.machine.host.memory_bytes


def _for_disk(wish: Wish, case: Case) -> Hint:
    has = case.machine.host.disk_bytes or 0
    is_small = wish.config.save_only_model
    for fewer in range((wish.kept or 1) - 1, 0, -1):
        if case.disk(fewer, only_model=is_small)[0] <= has:
            return Hint(f"save_total_limit={fewer}")
    if wish.kept and case.disk(wish.kept, only_model=True)[0] <= has:
        return Hint("save_only_model=true")
    if wish.kept and case.disk(0)[0] <= has:
        return Hint("save_strategy=no")
    return Hint("output_dir=FOLDER on a larger disk")


def speed_hints(wish: Wish, speed: Speed) -> tuple[Hint, ...]:
    """What would make a job that fits quicker, tried by playing a few plain candidates."""
    case, config = speed.case, wish.config
    now = _rate(case, speed.size)
    tried: list[tuple[str, Case, int]] = []
    if config.micro_batch_size is not None or config.num_microbatch is not None:
        tried += [(f"micro_batch_size={size}", case, size) for size in case.sizes()[-2:]]
    if not speed.bound.startswith("compute"):
        if config.staleness == 0:
            late = replace(case, job=replace(case.job, staleness=1))
            tried.append(("staleness=1", late, speed.size))
        more = replace(case, batch_size=2 * case.batch_size)
        tried.append((f"batch_size={more.batch_size}", more, speed.size))
    found = []
    for text, other, size in tried:
        gain = _rate(other, size) / now if now else 0.0
        need = other.host_total(other.least_host(size=size), other.least_device(size=size))
        if gain >= _GAIN and need <= other.machine.host.memory_bytes:
            found.append((gain, Hint(text, f"{100 * (gain - 1):.0f} % more tokens/s")))
    return tuple(hint for _, hint in sorted(found, key=lambda pair: -pair[0])[:_MOST])


def _rate(case: Case, size: int) -> float:
    """Sequences a second."""
    try:
        return case.batch_size / quick_seconds(setting_of(case, size))
    except PlanError:
        return 0.0
