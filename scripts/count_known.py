"""Count every well-known model, in both widths and by every method, and store what was counted.

    python scripts/count_known.py [NAME ...]

Takes a few seconds a model. To be run when counting changes, or when a model or transformers does.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from roundpipe.models.estimate.build import count
from roundpipe.models.estimate.config import make_config
from roundpipe.models.estimate.stored import FOLDER, METHODS, store
from roundpipe.models.known import find_known, known_models

if TYPE_CHECKING:
    from roundpipe.models.estimate.profile import Profile
    from roundpipe.models.known import KnownModel


def profiles_of(model: KnownModel, *, bits: int) -> list[Profile]:
    """The model by every method; adapters on 4-bit weights run as adapters do."""
    found: list[Profile] = []
    for method in METHODS:
        before = found[-1].regimes if method.is_packed else ()
        config = make_config(model.config)
        found.append(count(config, method, name=model.name, bits=bits, regimes=before))
    return found


def main(names: list[str]) -> None:
    """Count the models named, or all."""
    wanted = {found.id for name in names if (found := find_known(name)) is not None}
    FOLDER.mkdir(exist_ok=True)
    for model in known_models():
        if wanted and model.id not in wanted:
            continue
        begin = time.perf_counter()
        store(model, [profile for bits in (16, 32) for profile in profiles_of(model, bits=bits)])
        print(f"{model.name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
