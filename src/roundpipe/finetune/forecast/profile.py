"""The model of a plan: from whatever a user names to a `Profile`, weights never loaded.

A well-known model's counts travel with the package and need neither network nor torch. A folder, a
config.json or a GGUF file brings its own config. Any other hub id is looked for in the hub's cache,
and then on the hub, of which only config.json is read.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.finetune.model.source import ModelSource, locate_model
from roundpipe.models.estimate import profile
from roundpipe.models.estimate.config import find_config, make_config
from roundpipe.models.known import find_known, nearest_known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.forecast.wish import Wish
    from roundpipe.models.estimate.method import Method
    from roundpipe.models.estimate.profile import Profile

_PATIENCE = 4  # seconds


def profile_of(
    wish: Wish,
    *,
    bits: int,
    method: Method | None = None,
    environment: Mapping[str, str] | None = None,
) -> Profile:
    """Count the model of ``wish``, or take what was counted. A second or two for an unknown one.

    ``method``: instead of the wish's own. Raises ConfigError, ModelError for a model that cannot be
    split exactly.
    """
    method = wish.method if method is None else method
    given = wish.model
    is_plain = wish.config.attn_implementation == "eager"
    if not Path(given).expanduser().exists() and find_known(given) is not None and not is_plain:
        return profile(given, method, bits=bits)
    name, fields = model_fields(given, environment or {})
    from roundpipe.models.estimate.build import count  # noqa: PLC0415, torch

    config = make_config(fields)
    if is_plain:
        config._attn_implementation = "eager"
    try:
        return count(config, method, name=name, bits=bits)
    except RoundPipeError:
        raise
    except Exception as error:  # whatever the code of one of 400 architectures raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"cannot count the model: {name}: {first}"
            "\nhint: name a causal language model, or mend its config.json"
        ) from error


def model_fields(given: str, environment: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """A short name and the fields of the config of what ``given`` names. Raises ConfigError."""
    path = Path(given).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".json"):
        return find_config(path)
    if not path.exists() and find_known(given) is not None:
        return find_config(given)
    source = locate_model(given)
    if source.gguf_file is not None:
        return source.name, _gguf_fields(source)
    if not source.is_hub:
        return find_config(source.location)
    _, fields = find_config(_hub_file(source, environment))
    return source.name, fields


def _gguf_fields(source: ModelSource) -> dict[str, Any]:
    from transformers import AutoConfig  # noqa: PLC0415, seconds

    try:
        config = AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model_name_or_path: cannot read the config of {source.given}: {first}\n"
            "hint: pip install gguf, or name the model the file was made of"
        ) from error
    fields: dict[str, Any] = config.to_dict()
    return fields


def _hub_file(source: ModelSource, environment: Mapping[str, str]) -> Path:
    """config.json of a hub id, from the cache or from the hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415

    with contextlib.suppress(ValueError):  # no such id could be
        found = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
        if isinstance(found, str):
            return Path(found)
    if not is_hub_reachable(environment):
        raise ConfigError(_unreachable(source, ConnectionError()))
    try:
        return Path(
            hf_hub_download(
                source.location,
                "config.json",
                revision=source.revision,
                etag_timeout=_PATIENCE,
            )
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(_unreachable(source, error)) from error


def is_hub_reachable(environment: Mapping[str, str]) -> bool:
    """Whether the hub answers at all: its own client would try for half a minute."""
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if any(environment.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # who knows: the proxy may
    address = urlsplit(environment.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True


def _unreachable(source: ModelSource, error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    near = nearest_known(source.location)
    ways = [f"model={near[0]}"] if near else []
    if "GatedRepoError" in kinds:
        why = "the hub gives it only to those who asked"
        ways.append("ask for access on its page and log in with: hf auth login")
    elif kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        why = "the hub has no such model, or hides it"
    elif "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds:
        why = "it has no config.json"
    else:
        why = "the hub cannot be reached, and its cache does not have it"
    ways.append("model=FOLDER or model=FILE/config.json plans without a network")
    return f"no config at hand for {source.given}: {why}\nhint: {', or '.join(ways)}"
