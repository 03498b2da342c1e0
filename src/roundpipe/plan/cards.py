"""Cards one can buy: what their data sheets say, found by whatever people call them.

A data sheet promises more than work gets. The figures in the table are the sheets' (dense, no
sparsity); what is left of them is in `SHARES` and `usable_bytes`, each with its reason, and
`card_named` gives the product of both. What `roundpipe doctor` measures replaces all of it.

Kinds differ in how matrix products are added up. GeForce cards multiply fp16 at full rate only when
they add in fp16 too; workstation and data centre cards do not care; before Ampere there is no bf16.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.plan.card_table import ROWS, Kind
from roundpipe.plan.machine import Card

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roundpipe.plan.card_table import Row


@dataclass(frozen=True)
class Shares:
    """What is left of a sheet's figures in long transformer work."""

    matrix: float  # of 16-bit and tf32 matrix products
    matrix_fp16: float  # of those added in fp16
    bandwidth: float  # of the card's memory, element by element
    duplex: float  # of a link's rate while the other way runs


# The one place where sheets become work.
# - GeForce, adding in fp32: units run at half rate, so neither power nor memory holds them back and
#   cards boost above the sheet's clock: 0.9.
# - GeForce, adding in fp16: 231 of 330 TFLOP/s in the head of an 8B model on a 4090, at the power
#   limit: 0.7.
# - Workstation and data centre cards are power-limited at full rate: 240-260 of an A100's 312,
#   650-700 of an H100's 989: 0.8 and 0.68.
# - AMD's matrix instructions share issue slots with everything else: 0.6.
# - Both ways of a link at once: 11-16 of 24-26 GB/s on eight 4090s; with two busy copy engines and
#   a server's root complexes about 0.8.
SHARES: Mapping[Kind, Shares] = {
    Kind.TURING: Shares(0.9, 0.7, 0.85, 0.52),
    Kind.GEFORCE: Shares(0.9, 0.7, 0.85, 0.52),
    Kind.TURING_PRO: Shares(0.75, 0.75, 0.85, 0.52),
    Kind.WORKSTATION: Shares(0.75, 0.75, 0.85, 0.52),
    Kind.VOLTA: Shares(0.75, 0.75, 0.85, 0.8),
    Kind.AMPERE_DC: Shares(0.8, 0.8, 0.85, 0.8),
    Kind.HOPPER: Shares(0.68, 0.68, 0.85, 0.8),
    Kind.AMD: Shares(0.6, 0.6, 0.8, 0.52),
}
FP32_SHARE = 0.8  # of the sheet's fp32 rate: no tensor units, rarely the power limit

# Firmware and page tables keep about 2 % of a card's memory; torch's context, its modules and
# cuBLAS workspaces take half a GiB before the first tensor.
_KEPT_BY_DRIVER = 0.02
_CONTEXT_BYTES = 512 * 2**20


@dataclass(frozen=True)
class CardModel:
    """One card of the table with one memory size; figures are the data sheet's."""

    name: str
    kind: Kind
    memory_gib: float
    tflops: Mapping[str, float]
    gigabytes_per_second: float
    pcie: int  # generation
    lanes: int

    @property
    def usable_bytes(self) -> int:
        """What tensors can have of the memory; see the numbers above."""
        return round(self.memory_gib * 2**30 * (1 - _KEPT_BY_DRIVER)) - _CONTEXT_BYTES

    @property
    def duplex(self) -> float:
        """What is left of its link's rate while the other way runs."""
        return SHARES[self.kind].duplex

    def at_work(self) -> Card:
        """The card as the planner sees it: rates that work really gets, memory it really has."""
        shares = SHARES[self.kind]
        left = {"fp32": FP32_SHARE, "fp16_fp16": shares.matrix_fp16}
        return Card(
            name=self.name,
            memory_bytes=self.usable_bytes,
            flops={
                key: _rounded(tflops * 1e12 * left.get(key, shares.matrix))
                for key, tflops in self.tflops.items()
            },
            bandwidth=_rounded(self.gigabytes_per_second * 1e9 * shares.bandwidth),
        )


def guessed_card(name: str, *, memory_bytes: int, multiprocessors: int) -> Card:
    """A card that is not in the table, by its size alone: rates as of a GeForce of its width."""
    fp32 = 128 * 2 * 1.7e9 * multiprocessors  # cores of a multiprocessor, at a usual clock
    shares = SHARES[Kind.GEFORCE]
    return Card(
        name=name,
        memory_bytes=memory_bytes,
        flops={
            "fp32": _rounded(fp32 * FP32_SHARE),
            "bf16": _rounded(2 * fp32 * shares.matrix),
            "fp16": _rounded(2 * fp32 * shares.matrix),
        },
        bandwidth=_rounded(10e9 * multiprocessors * shares.bandwidth),
    )


def _rounded(rate: float) -> float:
    """To four digits: more would claim to be known, and would not read back from a file."""
    return float(f"{rate:.4g}")


def card_models() -> Iterator[CardModel]:
    """Every card of the table, one for each memory size."""
    for row in ROWS:
        yield from _models(row)


def find_card(name: str, *, memory_bytes: int | None = None) -> CardModel | None:
    """The card that ``name`` means, or None; also a name as drivers write it.

    Where a card is sold with several memory sizes: the one written behind the name, else the one
    nearest to ``memory_bytes``, else the first of the table.
    """
    words, memory_gib = _words(name)
    models = _by_name().get(words, [])
    if memory_gib is not None:
        # A size that is not sold is another card; drivers round.
        models = [m for m in models if abs(m.memory_gib - memory_gib) <= 0.05 * m.memory_gib]
    if memory_bytes is not None:
        wanted = memory_bytes / 2**30
        models = sorted(models, key=lambda model: abs(model.memory_gib - wanted))
    return models[0] if models else None


def card_named(name: str) -> CardModel:
    """The card that ``name`` means; raises ConfigError naming the nearest ones."""
    found = find_card(name)
    if found is not None:
        return found
    raise ConfigError(f"unknown card: {name}\nhint: {', '.join(nearest_cards(name))}")


def nearest_cards(name: str) -> list[str]:
    """Up to four names of cards like ``name``, as one would write them in a machine."""
    words, _ = _words(name)
    models = _by_name()
    if words in models:  # the card is there, with other memory
        return [_short(model.name) for model in models[words]]
    near = [key for key in models if words and words in key]
    near += difflib.get_close_matches(words, models, n=8, cutoff=0.5)
    names = dict.fromkeys(_short(models[key][0].name) for key in near)
    return list(names)[:4] or ["4090", "a100-80gb", "h100", "cpu"]


def _models(row: Row) -> Iterator[CardModel]:
    sold = [gib for other in ROWS if other.name == row.name for gib in other.memory_gib]
    for memory_gib in (*row.memory_gib, *row.refitted_gib):
        is_only = len(sold) == 1 and memory_gib in sold
        yield CardModel(
            name=row.name if is_only else f"{row.name} {memory_gib:g}GB",
            kind=row.kind,
            memory_gib=memory_gib,
            tflops=row.tflops(),
            gigabytes_per_second=row.gigabytes_per_second,
            pcie=row.pcie,
            lanes=row.lanes,
        )


# Words that say nothing which the rest of a name does not say.
_NOISE = {
    "nvidia", "geforce", "rtx", "gtx", "amd", "radeon", "rx", "graphics", "gpu", "tesla",
    "generation", "edition", "workstation", "with", "design", "hbm2", "hbm2e", "hbm3", "hbm3e",
    "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "instinct", "oam", "series",
}  # fmt: skip
_GLUED = re.compile(r"^(?:geforce|rtx|gtx|rx)+(?=[a-z]?\d|pro)")
_MEMORY = re.compile(r"(\d+)(?:gb|gib|g)")
_BEHIND = re.compile(r"(.*[a-z]{2,})(\d+)(?:gb|gib|g)")  # 4060ti16gb


def _words(name: str) -> tuple[str, float | None]:
    """A name reduced to what tells cards apart, and the memory in GiB it names."""
    memory: float | None = None
    kept: list[str] = []
    text = re.sub(r"(\d)\s+(gi?b\b)", r"\1\2", name.lower().replace("max-q", "maxq"))
    for raw in re.findall(r"[a-z0-9]+", text):
        word = _GLUED.sub("", raw)
        size = _MEMORY.fullmatch(word) or (
            re.fullmatch(r"(\d{1,3})", word) if kept else None  # a100-80
        )
        behind = _BEHIND.fullmatch(word)
        if size is not None:
            memory = float(size.group(1))
        elif behind is not None:
            kept.append(behind.group(1))
            memory = float(behind.group(2))
        elif word not in _NOISE:
            kept.append(word)
    return "".join(kept), memory


def _short(name: str) -> str:
    """As one would write it in a machine: ``4090``, ``4060ti-16gb``, ``quadro-rtx-8000``."""
    words = name.lower().removeprefix("rtx ").removeprefix("rx ")
    return re.sub(r"(\d) (ti|super|xt|xtx|gre)\b", r"\1\2", words).replace(" ", "-")


@functools.cache
def _by_name() -> dict[str, list[CardModel]]:
    """What can be meant by each name, in the table's order."""
    found: dict[str, list[CardModel]] = {}
    for row in ROWS:
        for name in (row.name, *row.aliases):
            found.setdefault(_words(name)[0], []).extend(_models(row))
    return found
