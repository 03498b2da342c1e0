"""The model card of a result: ``README.md``, whose head the hub reads and whose text people do.

Only what is known is said: a licence stands there if the base's own card names one, a base or a
dataset if it is one of the hub (the hub refuses paths). No path of the data, no excerpt of it: a
card is made to be shared.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

import yaml

from roundpipe.durable import write_text
from roundpipe.finetune.output.usage import usage_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from roundpipe.finetune.output.usage import Block, Result

CARD_FILE = "README.md"
MARK = "<!-- written by roundpipe -->"
_EARLIER_MARK = "<!-- written by roundpipe train -->"
_LARGEST_CARD = 1 << 20  # bytes that are read of another card
_LICENSE = ("license", "license_name", "license_link")
_PACKAGES = ("roundpipe-tune", "torch", "transformers", "peft")
_TEXT, _IMAGES = "text-generation", "image-text-to-text"


@dataclass(frozen=True)
class Card:
    """What a card tells beside how the result is used.

    ``kind``: "merged" is a model that an adapter has become part of. ``summary``: one line of what
    was trained; ``settings``: names and values, as a table; ``data`` and ``losses``: a line each.
    ``datasets``: ids of the hub. ``base_folder``: where the base's files lie, and its card may.
    ``notes``: what one has to know of the result, a line each.
    """

    result: Result
    kind: Literal["adapter", "model", "merged"]
    summary: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Sequence[str] = ()
    losses: Sequence[str] = ()
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    notes: Sequence[str] = ()
    base_folder: Path | None = None


def write_card(folder: Path, card: Card) -> bool:
    """Write ``README.md`` into ``folder`` unless one lies there that is not ours; whether it did.

    Raises OSError.
    """
    path = folder / CARD_FILE
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        if MARK not in text and _EARLIER_MARK not in text:
            return False
    write_text(path, card_text(card))
    return True


def card_text(card: Card) -> str:
    """The card as Markdown below a head in YAML."""
    lines = ["---", _head(card), "---", MARK, "", f"# {card.result.source.name}, fine-tuned", ""]
    if card.summary:
        lines += [card.summary, ""]
    lines += [f"- {line}" for line in card.notes] + [""] * bool(card.notes)
    lines += _table(card.settings)
    for title, told in (("Data", card.data), ("Losses", card.losses)):
        if told:
            lines += [f"## {title}", "", *(f"- {line}" for line in told), ""]
    lines += ["## Use", ""]
    for block in usage_lines(card.result):
        lines += _use(block)
    return "\n".join([*lines, "## Versions", "", ", ".join(_versions()), ""])


def _head(card: Card) -> str:
    """The values of the head that the hub knows, in its order."""
    from huggingface_hub import ModelCardData  # noqa: PLC0415 (imports late)

    result = card.result
    base = result.source.hub_id
    values: dict[str, Any] = {
        "library_name": "peft" if card.kind == "adapter" else "transformers",
        "pipeline_tag": _TEXT if result.model_class.endswith("CausalLM") else _IMAGES,
        "tags": ["roundpipe", *card.tags],
        **_license(card.base_folder),
    }
    if base is not None:
        values["base_model"] = base
        values["base_model_relation"] = "adapter" if card.kind == "adapter" else "finetune"
    if card.datasets:
        values["datasets"] = list(dict.fromkeys(card.datasets))
    kind: Any = ModelCardData  # its keywords carry no types
    return str(kind(**values).to_yaml())


def _license(folder: Path | None) -> dict[str, str]:
    """What the head of the base's own card says of its licence."""
    if folder is None:
        return {}
    with contextlib.suppress(OSError, yaml.YAMLError):
        with (folder / CARD_FILE).open(encoding="utf-8", errors="replace") as file:
            text = file.read(_LARGEST_CARD)
        start, _, rest = text.partition("---\n")
        head = yaml.safe_load(rest.partition("\n---")[0]) if not start.strip() else None
        if isinstance(head, dict):
            told = {key: head.get(key) for key in _LICENSE}
            return {key: value for key, value in told.items() if isinstance(value, str)}
    return {}


def _table(settings: Mapping[str, Any]) -> list[str]:
    if not settings:
        return []
    rows = [f"| `{key}` | {_cell(value)} |" for key, value in settings.items()]
    return ["## Settings", "", "| | |", "|---|---|", *rows, ""]


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple | set) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _use(block: Block) -> list[str]:
    lines = [f"### {block.title}", ""]
    if block.lines:
        return [*lines, f"```{block.language}", *block.lines, "```", ""]
    reasons = "; ".join(block.reasons)
    return [*lines, f"Not as it is: {reasons}. `roundpipe merge` makes one model of it first.", ""]


def _versions() -> Iterator[str]:
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"
