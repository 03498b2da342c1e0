"""Train SmolLM2 on GSM8K for 300 LoRA steps, and score it before and after.

    python scripts/recorded_eval.py                 data from the hub
    python scripts/recorded_eval.py --data FOLDER   which holds train.jsonl and test.jsonl

The settings are those of examples/gsm8k_lora.yaml; scored are the first 200 problems of the test
split. The record goes to docs/runs/gsm8k-lora. What is there already is not made again, so an
interrupted command goes on; where it does is --work FOLDER (build/gsm8k-lora).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "runs" / "gsm8k-lora"
CONFIG = ROOT / "examples" / "gsm8k_lora.yaml"
RUN = "gsm8k-lora"  # in the folder of the work
KEPT = ("config.yaml", "trainer_log.jsonl", "training_loss.png")
LINE = "python scripts/recorded_eval.py"
PATTERN = "#### ([-0-9.,]+)"
LOCAL = ("dataset=gsm8k/train.jsonl", "eval_dataset={path: gsm8k/test.jsonl, max_samples: 200}")
# The settings of the run, for a model that has none of its own.
BARE = ("max_length=512", "dtype=bf16", "devices=cpu*2")
VERSIONS = ("torch", "transformers", "peft")
PAGE = """\
# Before and after: SmolLM2-135M-Instruct on GSM8K

300 steps of 4 samples, a LoRA adapter of rank 16, bf16, on two CPU devices; settings in
[examples/gsm8k_lora.yaml](../../../examples/gsm8k_lora.yaml). Again with one command:

```sh
{line}
```

Scored by `roundpipe eval` on the first {samples} problems of the test split ({tokens:,} tokens of
answers), of which training has seen none:

| | loss | perplexity | right answers | answers in the format of the data |
|---|---|---|---|---|
{rows}

Answers are greedy, with no examples in the prompt. One counts as right if the number behind `####`
is that of the data (`answer_pattern='{pattern}'`). In brackets: the 95 % interval.

![Loss over the steps](training_loss.png)

Beside this page: the [resolved config](config.yaml), the [log](trainer_log.jsonl), and every answer
[before](before.jsonl) and [after](after.jsonl).

{date}, {machine}; {versions}. The machine had other work: the {minutes:.0f} minutes
that the 300 steps took say nothing about speed.
"""


def main() -> int:
    """Make what is missing, then the page."""
    parser = argparse.ArgumentParser(description="Train and score the run of docs/runs/gsm8k-lora.")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gsm8k-lora")
    given = parser.parse_args()
    work: Path = given.work
    work.mkdir(parents=True, exist_ok=True)
    keys: tuple[str, ...] = ()
    if given.data is not None:  # a path that means the same on any machine
        keys = LOCAL
        link = work / "gsm8k"
        link.unlink(missing_ok=True)
        link.symlink_to(given.data.resolve(), target_is_directory=True)
    roundpipe(work, "train", str(CONFIG), f"output_dir={RUN}", *keys)
    score(work, "before", model_of(work), *BARE, f"dataset={eval_data(work)}")
    score(work, "after", RUN)
    write_record(work)
    return 0


def model_of(work: Path) -> str:
    """The base model of the run, as it was given."""
    return str(config_of(work)["model_name_or_path"])


def eval_data(work: Path) -> str:
    """What the run has evaluated on, as a value of the command line."""
    return json.dumps(config_of(work)["eval_dataset"])


def config_of(work: Path) -> dict[str, Any]:
    """The resolved config of the run."""
    import yaml  # noqa: PLC0415

    values: dict[str, Any] = yaml.safe_load((work / RUN / KEPT[0]).read_text(encoding="utf-8"))
    return values


def score(work: Path, when: str, *words: str) -> None:
    """Have a result scored: ``when``.json and ``when``.jsonl, unless they are there."""
    scores = work / f"{when}.json"
    if scores.exists():
        return
    words = (*words, f"answer_pattern={PATTERN}", f"output={when}.jsonl", "json=true")
    found = roundpipe(work, "eval", *words, is_read=True)
    scores.write_text(found, encoding="utf-8")


def roundpipe(work: Path, *words: str, is_read: bool = False) -> str:
    """Run a command in ``work``; what it prints, where that is to be read."""
    print(f"==== roundpipe {' '.join(words)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "roundpipe", *words],
        cwd=work,
        check=True,
        text=True,
        stdout=subprocess.PIPE if is_read else None,
    )
    return done.stdout or ""


def write_record(work: Path) -> None:
    """Copy what is kept, and write the page."""
    RECORD.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(work / RUN / name, RECORD / name)
    for when in ("before", "after"):
        shutil.copyfile(work / f"{when}.jsonl", RECORD / f"{when}.jsonl")
    found = {
        when: json.loads((work / f"{when}.json").read_text(encoding="utf-8"))["scores"][0]
        for when in ("before", "after")
    }
    (RECORD / "README.md").write_text(page(found, seconds_of(work)), encoding="utf-8")


def seconds_of(work: Path) -> float:
    """How long the steps took, evaluations and saves aside."""
    lines = (work / RUN / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return float(sum(record.get("seconds", 0.0) for record in map(json.loads, lines)))


def page(found: dict[str, dict[str, Any]], seconds: float) -> str:
    """What the run came to."""
    rows = [
        f"| {when} | {each['loss']:.4f} | {each['perplexity']:.3f} "
        f"| {matches(each['answers'])} | {each['answers']['found']} |"
        for when, each in found.items()
    ]
    return PAGE.format(
        line=LINE,
        samples=found["before"]["samples"],
        tokens=found["before"]["trained_tokens"],
        rows="\n".join(rows),
        pattern=PATTERN,
        date=datetime.datetime.now(tz=datetime.UTC).date(),
        machine=machine(),
        versions=versions(),
        minutes=seconds / 60,
    )


def matches(answers: dict[str, Any]) -> str:
    """``7 of 200, 3.5 % (1.7 to 7.0 %)``."""
    low, high = (100 * share for share in answers["interval_95"])
    share = f"{100 * answers['share']:.1f} % ({low:.1f} to {high:.1f} %)"
    return f"{answers['matches']} of {answers['answered']}, {share}"


def machine() -> str:
    """The processor and how many cores of it there are."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return f"{os.cpu_count()} cores of {name}"


def versions() -> str:
    """Python and the libraries that compute."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in VERSIONS]
    return ", ".join([f"Python {platform.python_version()}", *found])


if __name__ == "__main__":
    sys.exit(main())
