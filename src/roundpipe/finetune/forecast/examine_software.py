"""What runs would run on: libraries and their versions, the shell's variables, disks.

Which versions are enough stands in this package's own metadata; a library that only an extra asks
for is optional. Nothing is imported to be looked at. Of a hub's token only its being there is kept.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roundpipe.device.cards import find_cards
from roundpipe.device.disk import disk_rates, existing
from roundpipe.device.survey import free_disk
from roundpipe.report.readings import DiskReadings, PackageReadings, SoftwareReadings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roundpipe.device.cards import Card
    from roundpipe.device.disk import DiskRates
    from roundpipe.report.readings import DeviceReadings

_OURS = "roundpipe-tune"
_EXTRAS = ("gguf", "tensorboard")
VARIABLES = (
    *("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"),
)


def requirements() -> list[str]:
    """What this package asks for, one requirement a line; empty where it is not installed."""
    try:
        return importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def installed(name: str) -> str | None:
    """The version of a library, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def hub_cache() -> Path:
    """Where what is fetched of the hub is kept."""
    from huggingface_hub import constants  # noqa: PLC0415 (imports late)

    return Path(constants.HF_HUB_CACHE).expanduser()


def has_token() -> bool:
    """Whether the hub would be asked with a token."""
    from huggingface_hub import get_token  # noqa: PLC0415

    return get_token() is not None


@dataclass(frozen=True)
class SoftwareExamination:
    """Where to look; every part can be given, for tests."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()  # where a run would write
    requirements: Callable[[], Sequence[str]] = requirements
    installed: Callable[[str], str | None] = installed
    hub_cache: Callable[[], Path] = hub_cache
    has_token: Callable[[], bool] = has_token
    rates: Callable[[Path], DiskRates] = disk_rates
    find_cards: Callable[[], Sequence[Card]] = find_cards

    def software(self, devices: Sequence[DeviceReadings]) -> SoftwareReadings:
        """Everything but the disks, for a machine with ``devices``."""
        cards = self.find_cards() if all(device.is_cpu for device in devices) else ()
        return SoftwareReadings(
            python=platform.python_version(),
            torch=f"{torch.__version__}, {_built_for()}",
            packages=tuple(self._packages()),
            variables={
                name: self.environment[name] for name in VARIABLES if name in self.environment
            },
            has_hub_token=self.has_token(),
            unused_cards=", ".join(f"{card.vendor} ({card.seen})" for card in cards),
        )

    def disks(self) -> tuple[DiskReadings, ...]:
        """The disk of runs and that of the hub's cache, measured; once where they are one."""
        folders = {"runs": existing(self.folder), "the hub's cache": existing(self.hub_cache())}
        by_device: dict[int, list[str]] = {}
        for use, folder in folders.items():
            by_device.setdefault(folder.stat().st_dev, []).append(use)
        return tuple(self._disk(uses, folders[uses[0]]) for uses in by_device.values())

    def _disk(self, uses: Sequence[str], folder: Path) -> DiskReadings:
        rates = self.rates(folder)
        return DiskReadings(
            used_for=" and ".join(uses),
            folder=str(folder),
            free_bytes=free_disk(folder),
            write=_rounded(rates.write),
            read=_rounded(rates.read),
        )

    def _packages(self) -> list[PackageReadings]:
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415

        found: dict[str, PackageReadings] = {}
        for text in self.requirements():
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            marker = wanted.marker
            extra = next(
                (name for name in _EXTRAS if marker and marker.evaluate({"extra": name})), ""
            )
            is_ours = marker is None or marker.evaluate({"extra": ""})
            if is_ours or extra:
                version = self.installed(wanted.name)
                found[wanted.name] = PackageReadings(
                    name=wanted.name,
                    version=version,
                    needs=str(wanted.specifier).removeprefix(">=") or None,
                    is_enough=version is None
                    or wanted.specifier.contains(version, prereleases=True),
                    is_optional=not is_ours,
                )
        return list(found.values())


def _built_for() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else float(f"{rate:.3g}")
