"""What the small files of a model folder may not say, looked at before another library opens them.

Files come from anywhere. Rules:
1. A config names no attention or experts code but by a plain word: another name is that of a
   repository whose code would be fetched and run.
2. An index names safetensors files beside it, and nothing else.
3. A text file is no link out of the folder: what it holds may end up in what is published. Links
   into the cache of the model hub are its own way to keep files once. A link to weights is read as
   safetensors or not at all, and may lead anywhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

INDEX = "model.safetensors.index.json"
_LARGEST_CONFIG = 64 << 20  # bytes
_LARGEST_INDEX = 256 << 20
_TEXTS = (".json", ".jinja", ".txt", ".model")
_NEVER = ("_attn_implementation_internal", "_experts_implementation_internal")
_WORDS = ("attn_implementation", "_attn_implementation", "experts_implementation")
_FETCH_AGAIN = "an interrupted download leaves such a file; fetch it again"


def check_folder(folder: Path) -> None:
    """Raise ConfigError, naming file and key, for what the folder's small files may not say."""
    check_texts(folder)
    fields = config_fields(folder)
    for key, value in _settings(fields):
        if (key in _NEVER and value is not None) or (key in _WORDS and _is_elsewhere(value)):
            raise ConfigError(
                f"a config that names code to be fetched and run: {folder / 'config.json'}: "
                f"{key}: {value!r}\nhint: take {key} out of the file, or give another model"
            )
    explicit = fields.get("transformers_weights")
    for name in {INDEX, explicit if isinstance(explicit, str) else INDEX}:
        if is_plain(name) and name.endswith(".json") and (folder / name).is_file():
            weight_files(folder / name)


def check_texts(folder: Path) -> None:
    """Raise ConfigError, naming it, for a text file that is a link out of the folder."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _TEXTS:
            _check_link(folder, path)


def config_fields(folder: Path) -> dict[str, Any]:
    """What config.json of a folder holds; raises ConfigError where that is no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"no config.json in: {folder}\n"
            "hint: a model folder is one that save_pretrained of transformers wrote"
        )
    fields = read_json(path, _LARGEST_CONFIG, pairs=dict)  # as transformers: the last one counts
    if not isinstance(fields, dict):
        raise ConfigError(f"not the config of a model: {path}\nhint: {_FETCH_AGAIN}")
    return fields


def own_code(fields: dict[str, Any]) -> str | None:
    """The code that a config brings along and that is never run, as people know it; or None."""
    places = fields.get("auto_map")
    if not isinstance(places, dict) or not places:
        return None
    return ", ".join(sorted({str(place) for place in places.values()}))


def weight_files(index: Path) -> dict[str, tuple[str, ...]]:
    """The files that an index of weights names, and the tensors that it says are in each.

    Raises ConfigError for an index that is torn or names anything but safetensors files beside it.
    """
    read = read_json(index, _LARGEST_INDEX)
    places = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(places, dict) or not places:
        raise ConfigError(f"not an index of weights: {index}\nhint: {_FETCH_AGAIN}")
    listed: dict[str, list[str]] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or not is_plain(file) or not file.endswith(".safetensors"):
            raise ConfigError(
                f"an index names a file that is not opened: {index}: {tensor}: {file!r}\n"
                "hint: its files must be *.safetensors beside it"
            )
        listed.setdefault(file, []).append(tensor)
    return {file: tuple(tensors) for file, tensors in sorted(listed.items())}


def is_plain(name: str) -> bool:
    """Whether a name is that of a file in the folder itself."""
    return name not in {"", ".", ".."} and not set(name) & set("/\\\0:")


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError for a key that is there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"a key twice: {name}")
        found[name] = value
    return found


def read_json(path: Path, most: int, *, pairs: Callable[[Any], Any] = once) -> Any:
    """Read a JSON file of up to ``most`` bytes; ``pairs`` makes its objects."""
    if path.stat().st_size > most:
        raise ConfigError(
            f"too large a file: {path}: {path.stat().st_size} bytes, at most {most}\n"
            f"hint: {_FETCH_AGAIN}"
        )
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {path}: {error}\nhint: {_FETCH_AGAIN}") from error


def _check_link(folder: Path, path: Path) -> None:
    if not path.is_symlink():
        return
    place, target = folder.resolve(), path.resolve()
    if target.is_relative_to(place) or _is_blob(place, target):
        return
    raise ConfigError(
        f"a link out of the model's folder: {path}: {target}\nhint: put the file itself there"
    )


def _is_blob(place: Path, target: Path) -> bool:
    """Whether ``target`` is where the hub's cache keeps the files of the snapshot ``place``.

    Newer versions of it keep a file that several repositories have once, below the whole cache.
    """
    if place.parent.name != "snapshots":
        return False
    cache = place.parents[2]
    return target.is_relative_to(cache) and "blobs" in target.relative_to(cache).as_posix()


def _settings(value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All keys of a config and of those within it."""
    if isinstance(value, dict) and depth < 50:
        for key, inner in value.items():
            yield key, inner
            yield from _settings(inner, depth + 1)


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_elsewhere, value.values()))
    return isinstance(value, str) and bool(set(value) & set("/|:@\\"))
