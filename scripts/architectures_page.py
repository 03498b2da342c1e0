"""Write docs/architectures.md from the catalogue and what its last whole run compared.

A test holds that the page is up to date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architectures.md"
FOLDER = ROOT / "tests" / "models" / "architectures"
SIGNS = {"bits": "●", "close": "○", None: "–"}
COLUMNS = ("training", "positions", "no labels", "last logits", "token count", "router loss")

INTRO = """\
# Architectures

A Hugging Face causal LM is split by the structure of its own forward, with no code for any one
model ([how](design/carried_boundary.md)). This page lists the architectures of transformers
{version} for which a model with a tiny configuration was compared with plain PyTorch, and what was
compared. It is written by `scripts/architectures_page.py` from
`tests/models/architectures/catalogue.yaml`, the configurations as data, and `found.json`, what the
last whole run has compared.

**{num_equal} rows, {num_classes} model classes: loss, logits and every gradient equal those of a
plain PyTorch loop over the same microbatches.** {num_refused} are refused by name, with the reason.

`make test` compares a spread of {num_spread}, `make accept` all; it prints the list at the end.
With `--update-golden` a run writes `found.json` anew.

## What is compared

Five sequences of 13 tokens in two microbatches, padded on the left, on the right and not at all,
some tokens not trained; fp32, in training mode without dropout.

- **training**: `forward_backward` on 1, 2 and 3 CPU devices: the loss, all logits, and the gradient
  of every parameter by name. One that gets none in plain PyTorch gets none.
- **positions**: the same with `position_ids` given, on two devices.
- **no labels**: `forward` in evaluation without labels, on three devices: all logits, no loss.
- **last logits**: the same with `logits_to_keep=2`.
- **token count**: training with `num_items_in_batch` given, where the model's loss knows it.
- **router loss**: training with `output_router_logits` on, where the model has an auxiliary loss.

● the same bits · ○ close, to 1e-6 of a tensor's largest value, for the reason given ·
– the model's forward knows no such thing. A weight that hangs in several places of a model (a tied
head, a block that is used again) gets the sum of its uses' gradients in another order than within
one graph: there ● means close.
"""


def read() -> tuple[dict[str, Any], dict[str, Any]]:
    """The catalogue and what was found."""
    catalogue = yaml.safe_load((FOLDER / "catalogue.yaml").read_text(encoding="utf-8"))
    found = json.loads((FOLDER / "found.json").read_text(encoding="utf-8"))
    return catalogue, found


def page() -> str:
    """The page's text."""
    catalogue, found = read()
    rows = {name: row or {} for rows in catalogue["groups"].values() for name, row in rows.items()}
    equal = {name: found[name] for name in rows if "compared" in found.get(name, {})}
    parts = [
        INTRO.format(
            version=catalogue["transformers"],
            num_equal=len(equal),
            num_classes=len({entry["class"] for entry in equal.values()}),
            num_refused=sum("refused" in row for row in rows.values()),
            num_spread=sum(bool(row.get("spread")) for row in rows.values()),
        )
    ]
    for group, members in catalogue["groups"].items():
        here = {name: found[name] for name in members if "compared" in found.get(name, {})}
        if here:
            parts.append(table(group, here, rows))
    parts.append(refused({name: row for name, row in rows.items() if "refused" in row}, found))
    parts.append(left_out(catalogue["left_out"]))
    return "\n".join(parts)


def table(group: str, entries: dict[str, Any], rows: dict[str, Any]) -> str:
    """What was compared of one group."""
    lines = [
        f"## {group[0].upper()}{group[1:]}\n",
        f"| model type | class | {' | '.join(COLUMNS)} | note |",
        f"|---|---|{':-:|' * len(COLUMNS)}---|",
    ]
    for name, entry in entries.items():
        signs = " | ".join(SIGNS.get(result, "†") for result in entry["compared"].values())
        lines.append(f"| {name} | `{entry['class']}` | {signs} | {note(entry, rows[name])} |")
    return "\n".join(lines) + "\n"


def note(entry: dict[str, Any], row: dict[str, Any]) -> str:
    """What is special about a row."""
    said = [row[key] for key in ("shows", "close") if key in row]
    said += [f"† {what}: {why}" for what, why in row.get("skip", {}).items()]
    if len(entry["tied"]) == 1:
        said.append("tied head")
    elif entry["tied"]:
        said.append(f"{len(entry['tied'])} weights in several places")
    return "; ".join(said)


def refused(rows: dict[str, Any], found: dict[str, Any]) -> str:
    """Those that are not run, with what the error says."""
    lines = [
        "## Refused\n",
        "`RoundPipe(model)` raises `ModelError` with the class, the reason and a way out.\n",
        "| model type | class | reason |",
        "|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | `{found[name]['class']}` | {row['refused']} |")
    return "\n".join(lines) + "\n"


def left_out(reasons: dict[str, list[str]]) -> str:
    """Those of transformers' lists that no row is for."""
    lines = [
        "## Not compared\n",
        "What transformers lists beside these as generating text, and why no row is for it:\n",
        *(f"- {why}: {', '.join(names)}" for why, names in reasons.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
