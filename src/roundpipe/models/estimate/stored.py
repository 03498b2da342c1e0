"""Profiles of well-known models that travel with the package: a plan of one needs no torch.

Counted by ``scripts/count_known.py``, which has to run again when counting changes. A file holds
one model in 16 and in 32 bits, trained in full, with adapters, and with adapters on 4-bit weights,
which run as adapters do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.models.estimate.method import Method
from roundpipe.models.estimate.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from roundpipe.models.known import KnownModel

FOLDER = Path(__file__).parent.parent / "known" / "counted"
METHODS = (Method(name="full"), Method(name="lora"), Method(name="qlora"))


def stored_profile(model: KnownModel, method: Method, *, bits: int) -> Profile | None:
    """The profile counted for a model, method and width; None where there is none."""
    path = FOLDER / f"{model.name}.json"
    if method not in METHODS or not path.is_file():
        return None
    stored = json.loads(path.read_text(encoding="utf-8"))
    data = stored.get(f"{method.name} {bits}")
    if data is None:
        return None
    return Profile.from_json({"regimes": stored[f"lora {bits}"]["regimes"], **data})


def store(model: KnownModel, profiles: Iterable[Profile], folder: Path = FOLDER) -> None:
    """Write profiles of one model to its file."""
    lines = []
    for profile in profiles:
        data: dict[str, Any] = profile.to_json()
        if profile.method == "qlora":
            del data["regimes"]
        key = json.dumps(f"{profile.method} {profile.bits}")
        lines.append(f"{key}: {json.dumps(data, separators=(',', ':'))}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (folder / f"{model.name}.json").write_text(text, encoding="utf-8")
