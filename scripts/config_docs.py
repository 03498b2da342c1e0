"""Write docs/config.md: every key of a config, and what becomes of the keys of other trainers.

python scripts/config_docs.py            writes it
python scripts/config_docs.py --check    exits 1 where it is not current
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from roundpipe.finetune.settings import keys
from roundpipe.finetune.settings.entry import DatasetEntry
from roundpipe.finetune.settings.fields import TrainConfig
from roundpipe.finetune.settings.foreign import axolotl, llamafactory, transformers, trl, unsloth
from roundpipe.finetune.settings.schema import aliases_of, groups

PAGE = Path(__file__).parent.parent / "docs" / "config.md"
HEAD = """# Keys of a config

Every setting, with its default. `roundpipe train`, `plan` and `init` take all of them, in a YAML
file or on the command line: `key=value`, `--key value`, `--key=value`, with dashes or underscores.
Values are YAML; `1e-4` is a number; `null`, `none` and an empty value mean the default unless the
table says otherwise. `roundpipe schema > roundpipe.schema.json` writes the same as JSON schema;
with it beside a config, editors complete keys and mark slips:

```yaml
# yaml-language-server: $schema=roundpipe.schema.json
dataset: my.jsonl
learning_rate: 1e-4
```

*Also* names the keys of other trainers that set a field: plain other names first, then keys whose
value decides. `roundpipe plan FILE` prints what each key of a file became. This page is written
from the code by `scripts/config_docs.py`.
"""
FOREIGN = """## Keys of other trainers

A config of LLaMA-Factory, axolotl, unsloth or TRL runs as it is. Each of its keys is in one of
three lists: *translated* (the tables above), *not needed here*, *refused*. A value that is null,
false or empty asks for nothing and is dropped (but for a no to an adapter, `use_peft: false`, to a
logger, or to training answers alone, `assistant_only_loss: false`). Only a key that is in no list
is an error, which names the nearest key there is.

What a config leaves out counts too: one that can only be axolotl's or TRL's and names neither a
method nor anything of an adapter means full fine-tuning, and a line says that it was read so.
LLaMA-Factory's `dataset_info.json` is read from `dataset_dir` (`data` where nothing is said).

Command lines of those trainers are understood too (`--bf16`, `--no-packing`,
`--lora_target_modules q_proj v_proj`). `${HOME}` and other variables of the environment are filled
in; keys that begin with `x-` or `_` may hold what anchors name. `roundpipe plan FILE` prints what
each key became; what is refused comes with what to write instead, to be pasted behind the command.
A page for each: [TRL](from_trl.md), [LLaMA-Factory](from_llamafactory.md),
[Axolotl](from_axolotl.md), [unsloth](from_unsloth.md).
"""
DEPENDS = {
    "learning_rate": "2e-4; 1e-5 for full",
    "lora_alpha": "2 × lora_r",
    "eval_strategy": "by eval_steps, eval_dataset, val_size",
    "save_strategy": "minutes; steps with save_steps",
}
TRAINERS = {
    "transformers": transformers,
    "TRL": trl,
    "LLaMA-Factory": llamafactory,
    "axolotl": axolotl,
    "unsloth": unsloth,
}


def text() -> str:
    """The page."""
    schema = TrainConfig.model_json_schema()["properties"]
    lines = [HEAD]
    for title, fields in groups().items():
        lines += [f"## {title}", "", "| key | default | meaning | also |", "|---|---|---|---|"]
        for name in fields:
            info = TrainConfig.model_fields[name]
            choices = _choices(schema[name])
            meaning = f"{info.description}{f' ({choices})' if choices else ''}"
            also = ", ".join(f"`{each}`" for each in aliases_of(name))
            lines.append(f"| `{name}` | {_default(name)} | {_cell(meaning)} | {also} |")
        lines.append("")
    lines += ["## An entry of `dataset`", "", "| key | meaning |", "|---|---|"]
    for name, info in DatasetEntry.model_fields.items():
        lines.append(f"| `{name}` | {_cell(str(info.description))} |")
    lines += ["", FOREIGN]
    lines += ["### Not needed here", ""]
    for trainer, module in TRAINERS.items():
        lines += _listed(trainer, module.NEEDLESS)
    lines += ["### Refused", "", "The sentence is the way out.", ""]
    for trainer, module in TRAINERS.items():
        lines += _listed(trainer, module.REFUSED)
    lines += [
        "### Sections",
        "",
        "Keys inside " + ", ".join(f"`{key}`" for key in keys.UNFOLDED) + " count as if they stood "
        "at the top.",
    ]
    return "\n".join(lines) + "\n"


def _listed(trainer: str, table: dict[str, str]) -> list[str]:
    lines = [f"**{trainer}**", ""]
    for sentence, names in table.items():
        lines.append(f"- {sentence}: " + ", ".join(f"`{name}`" for name in names.split()))
    return [*lines, ""]


def _default(name: str) -> str:
    info = TrainConfig.model_fields[name]
    if info.is_required():
        return "must be given"
    if name in DEPENDS:
        return DEPENDS[name]
    value = info.default
    if value is None or value == ():
        return "none"
    return f"`{json.dumps(value) if isinstance(value, bool | float) else value}`"


def _choices(about: dict[str, object]) -> str:
    found = about.get("enum") or next(
        (each.get("enum") for each in about.get("anyOf", []) if "enum" in each),  # type: ignore[attr-defined]
        None,
    )
    return ", ".join(map(str, found)) if isinstance(found, list) else ""


def _cell(words: str) -> str:
    return words.replace("|", "\\|")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == text() else 1)
    PAGE.write_text(text(), encoding="utf-8")
