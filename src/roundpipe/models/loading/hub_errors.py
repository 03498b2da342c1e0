"""What went wrong with the model hub, in one paragraph with one way out.

The hub's client raises errors of its own, of the HTTP library below it and of the system below
that. What they are called is relied on rather than where they come from: the HTTP library has
changed once already.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from roundpipe.errors import ConfigError, PlanError, RoundPipeError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = "or give a folder that has the model"
_UNREACHABLE = ("ConnectError", "ConnectionError", "TimeoutException", "NetworkError")
_CERTIFICATE = ("CERTIFICATE", "certificate", "SSL")
_NAME = ("Name or service", "nodename nor", "name resolution", "getaddrinfo")


def explain(error: Exception, what: str, *, repo: str, endpoint: str | None) -> RoundPipeError:
    """What to tell a user of ``error``: a ConfigError, or a PlanError for a disk that is full.

    ``what``: the model as the user wrote it; ``repo``: its page on the hub of ``endpoint``.
    """
    full = next((e for e in _chain(error) if getattr(e, "errno", None) == errno.ENOSPC), None)
    if full is not None:
        return PlanError(
            f"the disk is full: {what}: {getattr(full, 'filename', None) or full}\n"
            "hint: HF_HOME=FOLDER on another disk, set before the command; what is there is kept"
        )
    reason, hint = why(error, repo=repo, endpoint=endpoint)
    return ConfigError(f"{reason}: {what}\nhint: {hint}")


def why(error: Exception, *, repo: str, endpoint: str | None) -> tuple[str, str]:
    """The reason and the way out; without the model, which the reason may be told of."""
    from huggingface_hub import constants  # noqa: PLC0415 (imports late)

    hub = (endpoint or str(constants.ENDPOINT)).rstrip("/")
    known = _refused(error, f"{hub}/{repo}") or _unreachable(error, hub)
    if known is not None:
        return known
    told = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return (
        f"the model cannot be fetched: {type(error).__name__}: {told}",
        f"the same command again goes on where this one ended, {_FOLDER}",
    )


def is_kind(error: BaseException, *names: str) -> bool:
    """Whether an error, or one that it came from, is of a class called like one of ``names``."""
    return any(kind.__name__ in names for e in _chain(error) for kind in type(e).__mro__)


def _refused(error: Exception, page: str) -> tuple[str, str] | None:
    """What a hub that answers says."""
    status = next((found for e in _chain(error) if (found := _status(e)) is not None), None)
    kinds = {
        "GatedRepoError": (
            ("its licence is not accepted yet", f"accept it at {page}, then run the same again")
            if status == 403
            else (
                "a gated model, and nobody is logged in",
                f"accept its licence at {page}, then: hf auth login",
            )
        ),
        "RevisionNotFoundError": ("no such revision", f"the branches and tags are at {page}"),
        "RepositoryNotFoundError": (
            "no such model on the hub, or a private one",
            "check the spelling of the id, or of the folder; for a private model: hf auth login",
        ),
        "DisabledRepoError": ("the hub has closed this model", "give another model"),
        "OfflineModeIsEnabled": (
            "HF_HUB_OFFLINE is set, and its cache does not have all of it",
            f"run once with HF_HUB_OFFLINE=0, {_FOLDER}",
        ),
    }
    for kind, answer in kinds.items():
        if is_kind(error, kind):
            return answer
    answers = {
        401: ("the hub refuses the token", "hf auth login, or take HF_TOKEN away"),
        403: ("the hub refuses access", "hf auth login with a token that may read it"),
        429: (
            "the hub was asked too often",
            "run the same again in some minutes, it goes on; hf auth login raises the limit",
        ),
    }
    if status in answers:
        return answers[status]
    if status is not None and status >= 500:
        return f"the hub has trouble ({status})", f"run the same again later, {_FOLDER}"
    return None


def _unreachable(error: Exception, hub: str) -> tuple[str, str] | None:
    """Why nothing answers that is a hub."""
    text = " ".join(str(e) for e in _chain(error))
    said = "its name is not found" if any(word in text for word in _NAME) else "it does not answer"
    answers = (
        (
            is_kind(error, "HFValidationError"),
            "not an id of the model hub",
            "give an id such as owner/name, or a folder that exists",
        ),
        (
            is_kind(error, "UnsupportedProtocol", "InvalidURL"),
            "HF_ENDPOINT is no address",
            "HF_ENDPOINT=https://HOST, or take it away",
        ),
        (
            is_kind(error, "FileMetadataError"),
            f"what answers at {hub} is no model hub",
            "HF_ENDPOINT=https://HOST, or log in to the network that you are in",
        ),
        (
            is_kind(error, "ProxyError"),
            "the proxy does not let us through",
            "HTTPS_PROXY=http://HOST:PORT",
        ),
        (
            any(word in text for word in _CERTIFICATE),
            f"the certificate of {hub} is not trusted",
            "SSL_CERT_FILE=FILE.pem, the certificate of your network",
        ),
        (
            is_kind(error, *_UNREACHABLE),
            f"{hub} cannot be reached ({said}), and its cache does not have all of it",
            f"connect to the network, HF_ENDPOINT=MIRROR, {_FOLDER}",
        ),
    )
    return next(((reason, hint) for fits, reason, hint in answers if fits), None)


def _status(error: BaseException) -> int | None:
    found = getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: set[int] = set()
    pending: BaseException | None = error
    while pending is not None and id(pending) not in seen:
        seen.add(id(pending))
        yield pending
        pending = pending.__cause__ or pending.__context__
