"""What a base model is made of, in 64 digits: the same wherever its files lie.

A run that goes on elsewhere must find the same base below its adapter, under another path, with
other file times, downloaded or copied. To hash all of it would take minutes; so of every weight
file its size, its header (names, dtypes, shapes, places of all tensors) and `BLOCKS` blocks of
`BLOCK` bytes count, spread evenly, first and last among them. Weights that were trained differ in
every block; a file that was torn differs in its size.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError
from roundpipe.models.loading.distrust import INDEX, config_fields, is_plain, weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.model.source import ModelSource

BLOCKS = 64
BLOCK = 1 << 16  # bytes
_MOST_BLOCKS = 4096  # of all files together: a model has hundreds of files at times
_HEADER = 100_000_000  # bytes; the largest that safetensors allows
_NOT_CONTENT = ("_name_or_path", "transformers_version", "auto_map")  # who wrote it, and where


def fingerprint(source: ModelSource) -> str:
    """Sum up the content of a base model whose files are here; about a second for 100 GB.

    Raises ConfigError where files are missing.
    """
    digest = hashlib.sha256()
    folder = Path(source.location)
    if source.gguf_file is not None:
        paths = [folder / source.gguf_file]
    else:
        fields = config_fields(folder)
        told = {key: value for key, value in fields.items() if key not in _NOT_CONTENT}
        digest.update(json.dumps(told, sort_keys=True).encode())
        paths = [folder / name for name in sorted(_weight_names(folder, fields))]
    blocks = max(2, min(BLOCKS, _MOST_BLOCKS // max(1, len(paths))))
    for path in paths:
        try:
            for piece in _pieces(path, blocks):
                digest.update(piece)
        except OSError as error:
            raise ConfigError(
                f"model_name_or_path: a weight file cannot be read: {path}: {error}\n"
                "hint: fetch it again"
            ) from error
    return digest.hexdigest()


def _weight_names(folder: Path, fields: dict[str, object]) -> list[str]:
    """The files that the loader reads."""
    explicit = fields.get("transformers_weights")
    if not isinstance(explicit, str) or not is_plain(explicit):
        explicit = "model.safetensors"
        if not (folder / explicit).is_file():
            explicit = INDEX
    if explicit.endswith(".json") and (folder / explicit).is_file():
        return list(weight_files(folder / explicit))
    return [explicit]


def _pieces(path: Path, blocks: int) -> Iterator[bytes]:
    """Size, header and some blocks of a file. Its name may differ: a GGUF file is renamed often."""
    size = path.stat().st_size
    yield f"{size}\n".encode()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            yield file.read(min(length, _HEADER))
        last = max(0, size - BLOCK)
        for place in sorted({last * number // (blocks - 1) for number in range(blocks)}):
            file.seek(place)
            yield file.read(BLOCK)
