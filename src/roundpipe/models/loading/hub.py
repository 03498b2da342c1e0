"""A model of the hub as a folder: first what is small, then its weights, nothing that is not read.

    list of files -> config, tokenizer, index -> names of the weights -> room on the disk -> weights
    `---- seconds, every mistake is found here ---------------------------------'   `- gigabytes -'

The hub's own client keeps the files, goes on with what was broken off and reads tokens, endpoint
and cache from the environment. Weights that a repository has twice (as pickles, as one more file of
the authors' own form, in other precisions) are fetched once.
"""

from __future__ import annotations

import glob
import logging
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, PlanError
from roundpipe.models.loading.distrust import INDEX, config_fields, is_plain, weight_files
from roundpipe.models.loading.download import Downloads, is_ours, silent_bar
from roundpipe.models.loading.hub_errors import explain, is_kind, why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Progress = Callable[[int], None]

logger = logging.getLogger(__name__)

_ONE_FILE = "model.safetensors"
_ADAPTER = "adapter_model.safetensors"
_BESIDE_ADAPTER = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_LARGEST_SMALL = 256 << 20  # bytes
_SPARE = 64 << 20  # bytes of the disk that stay free
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PATIENCE = 10  # seconds
_FINAL = ("RevisionNotFoundError", "HFValidationError")  # a copy in the cache makes no difference


@dataclass(frozen=True)
class Hub:
    """Which hub, where its files are kept, who asks; None: as the environment says."""

    endpoint: str | None = None
    cache: Path | None = None
    token: str | bool | None = None

    def cache_folder(self) -> Path:
        """The folder of the cache."""
        from huggingface_hub import constants  # noqa: PLC0415 (imports late)

        return Path(self.cache or constants.HF_HUB_CACHE).expanduser()

    def place(self) -> dict[str, Any]:
        """What the client's functions want to hear."""
        return {"endpoint": self.endpoint, "cache_dir": self.cache, "token": self.token}


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit. ``folder`` has the small files, and ``weights`` when fetched.

    ``sizes``: bytes by file name, of what the hub lists; empty where the cache alone was asked.
    ``note``: why the cache was taken, if the hub could not be asked.
    """

    repo: str
    commit: str
    folder: Path
    weights: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    note: str | None = None
    hub: Hub = field(default_factory=Hub)

    @property
    def missing(self) -> tuple[str, ...]:
        """Weight files that are still to be fetched."""
        return tuple(name for name in self.weights if not (self.folder / name).is_file())

    @property
    def missing_bytes(self) -> int:
        """Bytes of these files."""
        return sum(self.sizes.get(name, 0) for name in self.missing)

    @property
    def partial_bytes(self) -> int:
        """Bytes that an earlier try has left behind, of which the next one goes on."""
        blobs = self.folder.parents[1] / "blobs"
        return sum(p.stat().st_size for p in blobs.glob("*.incomplete") if is_ours(p))


def open_snapshot(repo: str, revision: str | None = None, hub: Hub | None = None) -> Snapshot:
    """Find the commit of a repository and fetch its small files; blocks on the network.

    Without a network, with a gated model whose token is gone, and with a commit that the cache has,
    the cache is taken if it has all of it. Raises ConfigError for everything that is wrong, each
    with a way out, before a weight is fetched.
    """
    hub = hub or Hub()
    what = f"{repo}@{revision}" if revision else repo
    cached = _in_cache(repo, revision, hub)
    if cached is not None and revision and _COMMIT.fullmatch(revision) and not cached.missing:
        return cached
    try:
        sizes = _listing(repo, revision, hub)
        _require_model(sizes, what)
        folder = _download(repo, revision, _small(sizes), hub)
    except ConfigError:
        raise
    except Exception as error:  # of the client, the HTTP library below it, the system
        if cached is not None and not cached.missing and not is_kind(error, *_FINAL):
            reason = why(error, repo=repo, endpoint=hub.endpoint)[0]
            return _noted(cached, reason.partition(", and its cache")[0])
        raise explain(error, what, repo=repo, endpoint=hub.endpoint) from error
    weights = tuple(_weights(folder, sizes, what))
    return Snapshot(repo, folder.name, folder, weights, sizes, hub=hub)


def open_adapter(repo: str, revision: str | None = None, hub: Hub | None = None) -> Path:
    """Fetch an adapter of the hub, with its tokenizer; its folder. Blocks on the network.

    Raises ConfigError with a way out. What the cache has is taken where the hub cannot be asked.
    """
    hub = hub or Hub()
    what = f"{repo}@{revision}" if revision else repo
    try:
        names = ("adapter_config.json", _ADAPTER, *_BESIDE_ADAPTER)
        return _download(repo, revision, names, hub)
    except Exception as error:  # of the client, the HTTP library below it, the system
        raise explain(error, what, repo=repo, endpoint=hub.endpoint) from error


def require_room(snapshot: Snapshot) -> None:
    """Raise PlanError unless the cache's disk has room for what is still to be fetched."""
    needed = max(0, snapshot.missing_bytes - snapshot.partial_bytes)
    place = snapshot.hub.cache_folder()
    free = shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free
    if needed + _SPARE > free and needed:
        raise PlanError(
            f"no room to download {snapshot.repo}: {needed / 1e9:.1f} GB needed, "
            f"{free / 1e9:.1f} GB free in: {place}\n"
            "hint: HF_HOME=FOLDER on another disk, set before the command"
        )


def fetch_weights(snapshot: Snapshot, progress: Progress | None = None) -> None:
    """Fetch the weights that are not there yet; blocks on the network.

    ``progress(done)`` is called from other threads, with bytes. What was broken off goes on where
    it ended. Raises ConfigError with a way out, PlanError where the disk has no room.
    """
    if not snapshot.missing:
        return
    require_room(snapshot)
    try:
        names = snapshot.missing
        _download_large(snapshot, names, progress)
        _download(snapshot.repo, snapshot.commit, names, snapshot.hub)
    except Exception as error:  # as above
        endpoint = snapshot.hub.endpoint
        raise explain(error, snapshot.repo, repo=snapshot.repo, endpoint=endpoint) from error


def _listing(repo: str, revision: str | None, hub: Hub) -> dict[str, int]:
    """Bytes of the repository's files by name; of those at its top."""
    from huggingface_hub import HfApi  # noqa: PLC0415 (imports late)

    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    found = api.model_info(repo, revision=revision, files_metadata=True, timeout=_PATIENCE)
    files = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    return {
        name: size
        for name, size in files.items()
        if is_plain(name) or re.fullmatch(r"additional_chat_templates/[\w.-]+\.jinja", name)
    }


def _require_model(names: Iterable[str], what: str) -> None:
    """Raise ConfigError unless a repository with these files holds a model that we open."""
    names = set(names)
    ends = {name.rpartition(".")[2] for name in names}
    if "config.json" not in names:
        if "adapter_config.json" in names:
            raise ConfigError(
                f"an adapter, not a model: {what}\n"
                f"hint: adapter_name_or_path={what}, and the model that it was trained on"
            )
        if "gguf" in ends:
            file = min(name for name in names if name.endswith(".gguf"))
            raise ConfigError(
                f"only GGUF files on the hub: {what}\n"
                f"hint: hf download {what.partition('@')[0]} {file} --local-dir ., then "
                f"model_name_or_path={file}"
            )
        kind = "a model that makes images" if "model_index.json" in names else "no config.json"
        raise ConfigError(f"not a language model: {what}: {kind}\nhint: give a causal LM")
    if "safetensors" in ends:
        return
    if "bin" in ends or "pt" in ends or "pth" in ends:
        raise ConfigError(
            f"only pickled weights (pytorch_model.bin) on the hub: {what}\n"
            "hint: a pickle can run any code, so it is not opened; where you trust it, convert it "
            f'once: AutoModelForCausalLM.from_pretrained("{what.partition("@")[0]}")'
            '.save_pretrained("converted"), then model_name_or_path=converted'
        )
    raise ConfigError(f"no weights (*.safetensors) on the hub: {what}\nhint: give another model")


def _small(sizes: Mapping[str, int]) -> list[str]:
    return [
        name for name, size in sizes.items() if name.endswith(_SMALL) and size <= _LARGEST_SMALL
    ]


def _weights(folder: Path, names: Iterable[str], what: str) -> list[str]:
    """The files that hold the weights, as the loader of a folder would choose among ``names``."""
    explicit = config_fields(folder).get("transformers_weights")
    if explicit is None:
        explicit = _ONE_FILE if _ONE_FILE in names else INDEX
    if not isinstance(explicit, str) or not is_plain(explicit):
        raise ConfigError(
            f"a file outside the model's folder: {what}: {explicit!r}\n"
            "hint: transformers_weights of config.json names a file beside it, or is left out"
        )
    if explicit.endswith(".safetensors"):
        found = [explicit]
    elif (folder / explicit).is_file():
        found = list(weight_files(folder / explicit))
    else:
        raise ConfigError(
            f"its weight files have no index: {what}\nhint: give a model that has {INDEX}"
        )
    absent = [name for name in found if name not in names]
    if absent:
        raise ConfigError(
            f"weight files that its index names are not there: {what}: {absent[0]}\n"
            "hint: give another revision of it: id@revision"
        )
    return found


def _in_cache(repo: str, revision: str | None, hub: Hub) -> Snapshot | None:
    """What the cache has of a repository, if that is enough to know its weights."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 (imports late)
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(repo, "config.json", cache_dir=hub.cache, revision=revision)
    except HFValidationError:
        return None
    if not isinstance(found, str):
        return None
    folder = Path(found).parent
    there = {path.name for path in folder.iterdir()}
    try:
        if _ONE_FILE not in there and INDEX in there:
            there.update(weight_files(folder / INDEX))
        weights = tuple(_weights(folder, there, repo))
    except ConfigError:
        return None
    return Snapshot(repo, folder.name, folder, weights, hub=hub)


def _noted(cached: Snapshot, note: str) -> Snapshot:
    told = f"{cached.repo}: {note}; its cached copy is used, commit {cached.commit[:8]}"
    return Snapshot(
        cached.repo, cached.commit, cached.folder, cached.weights, note=told, hub=cached.hub
    )


def _download(repo: str, revision: str | None, names: Iterable[str], hub: Hub) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (imports late)

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=silent_bar(),
            etag_timeout=_PATIENCE,
            **hub.place(),
        )
    )


def _download_large(snapshot: Snapshot, names: Sequence[str], progress: Progress | None) -> None:
    from huggingface_hub import hf_hub_url  # noqa: PLC0415 (imports late)

    def url_of(name: str) -> str:
        return hf_hub_url(
            snapshot.repo, name, revision=snapshot.commit, endpoint=snapshot.hub.endpoint
        )

    blobs = snapshot.folder.parents[1] / "blobs"
    Downloads(blobs, url_of, token=snapshot.hub.token, progress=progress).fetch(names)
