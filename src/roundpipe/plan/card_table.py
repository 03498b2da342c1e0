"""The table of `cards.py`: one row a card, figures from the makers' data sheets.

``fp32`` and ``tensor`` are dense TFLOP/s at the sheet's boost clock, ``tensor`` the highest 16-bit
rate. What the other arithmetics get follows from the kind: see `Row.tflops`. Memory sizes of a card
(in one row, or in several of one name) come in the order in which a bare name means them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Kind(Enum):
    """Cards whose arithmetics stand in one relation to each other."""

    TURING = auto()  # GeForce 20: no bf16, no tf32; half rate when adding in fp32
    GEFORCE = auto()  # GeForce 30, 40, 50: half rate when adding in fp32
    TURING_PRO = auto()  # Turing without the half rate
    WORKSTATION = auto()  # the same chips as GeForce 30-50, full rate when adding in fp32
    VOLTA = auto()
    AMPERE_DC = auto()  # A100 and its sisters
    HOPPER = auto()  # and Blackwell of data centres
    AMD = auto()  # no tf32


_WITHOUT_BF16 = (Kind.TURING, Kind.TURING_PRO, Kind.VOLTA)
_WITHOUT_TF32 = (*_WITHOUT_BF16, Kind.AMD)
_HALF_RATE = (Kind.TURING, Kind.GEFORCE)


@dataclass(frozen=True)
class Row:
    """One card; ``tensor`` adds in fp16 where that is faster."""

    name: str
    kind: Kind
    memory_gib: tuple[float, ...]
    fp32: float
    tensor: float
    gigabytes_per_second: float
    pcie: int
    lanes: int = 16
    aliases: tuple[str, ...] = ()
    refitted_gib: tuple[float, ...] = ()  # with more memory than the maker gave it

    def tflops(self) -> dict[str, float]:
        """The sheet's rate of each arithmetic that the card has."""
        added_in_fp32 = self.tensor / 2 if self.kind in _HALF_RATE else self.tensor
        rates = {"fp32": self.fp32, "fp16": added_in_fp32, "fp16_fp16": self.tensor}
        if self.kind not in _WITHOUT_TF32:
            rates["tf32"] = added_in_fp32 / 2
        if self.kind not in _WITHOUT_BF16:
            rates["bf16"] = added_in_fp32
        return rates


def _turing(
    name: str,
    memory: tuple[float, ...],
    fp32: float,
    bandwidth: float,
    refitted: tuple[float, ...] = (),
) -> Row:
    return Row(name, Kind.TURING, memory, fp32, 8 * fp32, bandwidth, pcie=3, refitted_gib=refitted)


def _geforce(  # noqa: PLR0913, PLR0917 - a row of a table
    name: str,
    memory: tuple[float, ...],
    fp32: float,
    bandwidth: float,
    pcie: int = 4,
    lanes: int = 16,
    refitted: tuple[float, ...] = (),
) -> Row:
    return Row(
        name,
        Kind.GEFORCE,
        memory,
        fp32,
        4 * fp32,
        bandwidth,
        pcie,
        lanes,
        refitted_gib=refitted,
    )


def _workstation(  # noqa: PLR0913, PLR0917 - a row of a table
    name: str,
    memory: tuple[float, ...],
    fp32: float,
    bandwidth: float,
    pcie: int = 4,
    lanes: int = 16,
    aliases: tuple[str, ...] = (),
) -> Row:
    return Row(name, Kind.WORKSTATION, memory, fp32, 4 * fp32, bandwidth, pcie, lanes, aliases)


_GEFORCE_20 = (
    _turing("RTX 2060", (6, 12), 6.5, 336),
    _turing("RTX 2060 Super", (8,), 7.2, 448),
    _turing("RTX 2070", (8,), 7.5, 448),
    _turing("RTX 2070 Super", (8,), 9.1, 448),
    _turing("RTX 2080", (8,), 10.1, 448),
    _turing("RTX 2080 Super", (8,), 11.2, 496),
    _turing("RTX 2080 Ti", (11,), 13.4, 616, refitted=(22,)),
)

_GEFORCE_30 = (
    _geforce("RTX 3050", (8,), 9.1, 224, lanes=8),
    _geforce("RTX 3050", (6,), 6.8, 168, lanes=8),
    _geforce("RTX 3060", (12,), 12.7, 360),
    _geforce("RTX 3060", (8,), 12.7, 240),
    _geforce("RTX 3060 Ti", (8,), 16.2, 448),
    _geforce("RTX 3070", (8,), 20.3, 448),
    _geforce("RTX 3070 Ti", (8,), 21.7, 608),
    _geforce("RTX 3080", (10,), 29.8, 760),
    _geforce("RTX 3080", (12,), 30.6, 912),
    _geforce("RTX 3080 Ti", (12,), 34.1, 912),
    _geforce("RTX 3090", (24,), 35.6, 936),
    _geforce("RTX 3090 Ti", (24,), 40.0, 1008),
)

_GEFORCE_40 = (
    _geforce("RTX 4060", (8,), 15.1, 272, lanes=8),
    _geforce("RTX 4060 Ti", (8, 16), 22.1, 288, lanes=8),
    _geforce("RTX 4070", (12,), 29.1, 504),
    _geforce("RTX 4070 Super", (12,), 35.5, 504),
    _geforce("RTX 4070 Ti", (12,), 40.1, 504),
    _geforce("RTX 4070 Ti Super", (16,), 44.1, 672),
    _geforce("RTX 4080", (16,), 48.7, 717),
    _geforce("RTX 4080 Super", (16,), 52.2, 736),
    _geforce("RTX 4090", (24,), 82.6, 1008, refitted=(48,)),
    _geforce("RTX 4090 D", (24,), 73.5, 1008, refitted=(48,)),
)

_GEFORCE_50 = (
    _geforce("RTX 5050", (8,), 13.2, 320, pcie=5, lanes=8),
    _geforce("RTX 5060", (8,), 19.2, 448, pcie=5, lanes=8),
    _geforce("RTX 5060 Ti", (8, 16), 23.7, 448, pcie=5, lanes=8),
    _geforce("RTX 5070", (12,), 30.9, 672, pcie=5),
    _geforce("RTX 5070 Ti", (16,), 43.9, 896, pcie=5),
    _geforce("RTX 5080", (16,), 56.3, 960, pcie=5),
    _geforce("RTX 5090", (32,), 104.8, 1792, pcie=5),
)

# In laptops the rate follows the power the maker allows; these are a middle of it.
_LAPTOPS = (
    _geforce("RTX 3060 Laptop", (6,), 10.9, 336),
    _geforce("RTX 3070 Laptop", (8,), 14.0, 448),
    _geforce("RTX 3080 Laptop", (8, 16), 17.0, 448),
    _geforce("RTX 3080 Ti Laptop", (16,), 20.0, 512),
    _geforce("RTX 4050 Laptop", (6,), 9.0, 192, lanes=8),
    _geforce("RTX 4060 Laptop", (8,), 11.6, 256, lanes=8),
    _geforce("RTX 4070 Laptop", (8,), 15.6, 256, lanes=8),
    _geforce("RTX 4080 Laptop", (12,), 24.7, 432),
    _geforce("RTX 4090 Laptop", (16,), 33.0, 576),
    _geforce("RTX 5070 Laptop", (8,), 16.0, 384, pcie=5, lanes=8),
    _geforce("RTX 5070 Ti Laptop", (12,), 20.0, 672, pcie=5, lanes=8),
    _geforce("RTX 5080 Laptop", (16,), 26.0, 896, pcie=5),
    _geforce("RTX 5090 Laptop", (24,), 33.0, 896, pcie=5),
)

_WORKSTATION = (
    Row("Quadro RTX 4000", Kind.TURING_PRO, (8,), 7.1, 57, 416, 3),
    Row("Quadro RTX 5000", Kind.TURING_PRO, (16,), 11.2, 89, 448, 3),
    Row("Quadro RTX 6000", Kind.TURING_PRO, (24,), 16.3, 130.5, 672, 3),
    Row("Quadro RTX 8000", Kind.TURING_PRO, (48,), 16.3, 130.5, 672, 3),
    Row("Titan RTX", Kind.TURING_PRO, (24,), 16.3, 130.5, 672, 3, 16, ("titanrtx",)),
    _workstation("RTX A2000", (6, 12), 8.0, 288),
    _workstation("RTX A4000", (16,), 19.2, 448),
    _workstation("RTX A4500", (20,), 23.7, 640),
    _workstation("RTX A5000", (24,), 27.8, 768),
    _workstation("RTX A5500", (24,), 34.1, 768),
    _workstation("RTX A6000", (48,), 38.7, 768),
    _workstation("RTX 2000 Ada", (16,), 12.0, 224, lanes=8),
    _workstation("RTX 4000 Ada", (20,), 26.7, 360),
    _workstation("RTX 4000 SFF Ada", (20,), 19.2, 280),
    _workstation("RTX 4500 Ada", (24,), 39.6, 432),
    _workstation("RTX 5000 Ada", (32,), 65.3, 576),
    _workstation("RTX 6000 Ada", (48,), 91.1, 960),
    _workstation("RTX PRO 2000 Blackwell", (16,), 17.0, 288, 5, 8, ("PRO 2000",)),
    _workstation("RTX PRO 4000 Blackwell", (24,), 46.9, 672, 5, 16, ("PRO 4000",)),
    _workstation("RTX PRO 4500 Blackwell", (32,), 54.9, 896, 5, 16, ("PRO 4500",)),
    _workstation("RTX PRO 5000 Blackwell", (48, 72), 65.0, 1344, 5, 16, ("PRO 5000",)),
    _workstation("RTX PRO 6000 Blackwell", (96,), 125.0, 1792, 5, 16, ("PRO 6000",)),
    _workstation(
        "RTX PRO 6000 Blackwell Max-Q", (96,), 110.0, 1792, 5, 16, ("PRO 6000 Max-Q",)
    ),
    _workstation(
        "RTX PRO 6000 Blackwell Server", (96,), 120.0, 1597, 5, 16, ("PRO 6000 Server",)
    ),
)  # fmt: skip

_DATA_CENTRE = (
    Row("T4", Kind.TURING_PRO, (16,), 8.1, 65, 320, 3),
    Row("V100", Kind.VOLTA, (32, 16), 15.7, 125, 900, 3),
    Row("V100 PCIe", Kind.VOLTA, (32, 16), 14.0, 112, 900, 3),
    _workstation("A2", (16,), 4.5, 200, lanes=8),
    _workstation("A10", (24,), 31.2, 600),
    Row("A10G", Kind.WORKSTATION, (24,), 35.0, 70, 600, 4),
    _workstation("A40", (48,), 37.4, 696),
    _workstation("L4", (24,), 30.3, 300),
    Row("L40", Kind.WORKSTATION, (48,), 90.5, 181, 864, 4),
    _workstation("L40S", (48,), 91.6, 864),
    Row("A30", Kind.AMPERE_DC, (24,), 10.3, 165, 933, 4),
    Row("A100", Kind.AMPERE_DC, (80,), 19.5, 312, 2039, 4, 16, ("A100 PCIe",)),
    Row("A100", Kind.AMPERE_DC, (40,), 19.5, 312, 1555, 4, 16, ("A100 PCIe",)),
    Row("A800", Kind.AMPERE_DC, (80,), 19.5, 312, 2039, 4, 16, ("A800 PCIe", "A800 Active")),
    Row("A800", Kind.AMPERE_DC, (40,), 19.5, 312, 1555, 4, 16, ("A800 PCIe", "A800 Active")),
    Row("H100", Kind.HOPPER, (80,), 67, 989, 3350, 5, 16, ("H100 SXM",)),
    Row("H100 PCIe", Kind.HOPPER, (80,), 51, 756, 2039, 5),
    Row("H100 NVL", Kind.HOPPER, (94,), 60, 835, 3938, 5),
    Row("H800", Kind.HOPPER, (80,), 67, 989, 3350, 5),
    Row("H20", Kind.HOPPER, (96, 141), 44, 148, 4000, 5),
    Row("H200", Kind.HOPPER, (141,), 67, 989, 4800, 5),
    Row("H200 NVL", Kind.HOPPER, (141,), 60, 835, 4800, 5),
    Row("B200", Kind.HOPPER, (180,), 75, 2250, 7700, 5),
)

# Their fp32 rate counts two instructions at once, which matrix products hardly ever get.
_AMD = (
    Row("RX 7800 XT", Kind.AMD, (16,), 18.7, 74.7, 624, 4),
    Row("RX 7900 GRE", Kind.AMD, (16,), 23.0, 92, 576, 4),
    Row("RX 7900 XT", Kind.AMD, (20,), 25.8, 103, 800, 4),
    Row("RX 7900 XTX", Kind.AMD, (24,), 30.7, 122.8, 960, 4),
    Row("PRO W7900", Kind.AMD, (48,), 30.7, 122.6, 864, 4, 16, ("W7900",)),
    Row("RX 9070", Kind.AMD, (16,), 18.1, 145, 640, 5),
    Row("RX 9070 XT", Kind.AMD, (16,), 24.3, 195, 640, 5),
    Row("MI210", Kind.AMD, (64,), 22.6, 181, 1638, 4),
    Row("MI300X", Kind.AMD, (192,), 163.4, 1307, 5300, 5),
)

ROWS = (
    *_GEFORCE_20,
    *_GEFORCE_30,
    *_GEFORCE_40,
    *_GEFORCE_50,
    *_LAPTOPS,
    *_WORKSTATION,
    *_DATA_CENTRE,
    *_AMD,
)
