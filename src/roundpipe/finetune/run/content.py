"""What a run works on, told by content: another machine has the same data in another place."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roundpipe.finetune.data.dataset import Dataset
    from roundpipe.finetune.output.earlier import Earlier

_WHAT = {
    "base": ("model_name_or_path", "the base model has other weights"),
    "data": ("dataset", "the samples are others"),
}


def data_digest(dataset: Dataset) -> str:
    """SHA-256 over the tokens of all samples, those of the evaluation too."""
    both = (dataset.samples.digest, dataset.eval_samples.digest)
    return hashlib.sha256("\n".join(both).encode()).hexdigest()


@dataclass
class Content:
    """Digests of what this run works on, beside those of the checkpoint that it goes on from.

    ``expected`` is empty where it goes on from none. ``is_lenient``: a difference is only said.
    """

    say: Callable[[str], None]
    expected: Mapping[str, Any] = field(default_factory=dict)
    is_lenient: bool = False
    found: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(cls, earlier: Earlier | None, say: Callable[[str], None]) -> Content:
        """Expect what the checkpoint of an earlier run was made from."""
        if earlier is None or earlier.manifest is None:
            return cls(say)
        return cls(say, earlier.manifest.about, earlier.is_other)

    def note(self, what: str, digest: str) -> None:
        """Take the digest of ``base`` or ``data``. Raises ConfigError where it is another."""
        self.found[what] = digest
        before = self.expected.get(what)
        if before in (None, digest):
            return
        key, problem = _WHAT[what]
        if self.is_lenient:
            self.say(f"{key}: {problem} than when the run began")
            return
        raise ConfigError(
            f"{key}: {problem} than when the run in output_dir began"
            "\nhint: output_dir=ANOTHER, overwrite_output_dir=true, or resume_from_checkpoint=auto "
            "goes on with what is new"
        )
