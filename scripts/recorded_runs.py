"""Train SmolLM2 on GSM8K at staleness 0 and 1, three seeds each, and write docs/runs.

    python scripts/recorded_runs.py                 data from the hub
    python scripts/recorded_runs.py --data FOLDER   which holds train.jsonl and test.jsonl

Of each run its resolved config, log and plot are kept; beside them a plot and a table of all.
A run that is there already is not made again, so an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "docs" / "runs"
SEEDS = (1, 2, 3)
KEPT = ("config.yaml", "trainer_log.jsonl", "training_loss.png")
LINE = "python scripts/recorded_runs.py"


def main() -> int:
    """Make the runs that are missing, then plot and table."""
    parser = argparse.ArgumentParser(description="Train the runs of docs/runs.")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("keys", nargs="*", help="key=value, for a trial: nothing is written then")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        if given.data is not None:
            (place / "gsm8k").symlink_to(given.data.resolve(), target_is_directory=True)
        for staleness in (0, 1):
            for seed in SEEDS:
                name = f"staleness-{staleness}-seed-{seed}"
                if (RUNS / name / KEPT[1]).exists() and not given.keys:
                    continue
                train(place, name, [f"staleness={staleness}", f"seed={seed}", *given.keys],
                      is_local=given.data is not None, is_kept=not given.keys)  # fmt: skip
    if not given.keys:
        write_page({path.name: records(path) for path in sorted(RUNS.glob("staleness-*"))})
    return 0


def train(place: Path, name: str, keys: list[str], *, is_local: bool, is_kept: bool) -> None:
    """One run, in ``place``; what is kept of it goes to docs/runs."""
    if is_local:  # a path that means the same on any machine
        keys = [
            "dataset=gsm8k/train.jsonl",
            "eval_dataset={path: gsm8k/test.jsonl, max_samples: 32}",
            *keys,
        ]
    config = ROOT / "examples" / "gsm8k.yaml"
    command = [sys.executable, "-m", "roundpipe", "train", str(config), f"output_dir={name}"]
    print(f"==== {name}", flush=True)
    subprocess.run([*command, "save_strategy=no", *keys], cwd=place, check=True)
    if is_kept:
        (RUNS / name).mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copyfile(place / name / file, RUNS / name / file)


def records(run: Path) -> list[dict[str, Any]]:
    """The records of a run's log."""
    lines = (run / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_page(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Write docs/runs/README.md and the plot that it shows."""
    draw(runs)
    steps = sorted({r["step"] for log in runs.values() for r in log if "eval_loss" in r})
    head = " | ".join(f"after step {step}" for step in steps)
    rows = [f"| staleness, seed | {head} |", "|---|" + "---|" * len(steps)]
    found: dict[str, list[list[float]]] = {}
    for name, log in runs.items():
        _, staleness, _, seed = name.split("-")
        losses = [r["eval_loss"] for r in log if "eval_loss" in r]
        found.setdefault(staleness, []).append(losses)
        shown = " | ".join(f"{loss:.4f}" for loss in losses)
        rows.append(f"| [{staleness}, {seed}]({name}/trainer_log.jsonl) | {shown} |")
    for staleness, every in found.items():
        means = " | ".join(f"{statistics.mean(column):.4f}" for column in zip(*every, strict=True))
        rows.append(f"| {staleness}, mean | {means} |")
    text = [
        "# Recorded runs: SmolLM2-135M-Instruct on GSM8K",
        "",
        "All weights trained, bf16 with fp32 masters, 20 steps of 8 samples, on two CPU devices;",
        "settings in [examples/gsm8k.yaml](../../examples/gsm8k.yaml). Staleness 0 is exact;",
        "at staleness 1 each step reads weights that are one update old. Again with one command:",
        "",
        "```sh",
        LINE,
        "```",
        "",
        "![Training and evaluation loss of the six runs](gsm8k.png)",
        "",
        "Evaluation loss, the mean over the trained tokens of 32 problems of the test split:",
        "",
        *rows,
        "",
        "Beside each log lie the resolved config and the run's own plot.",
        "",
        "What a LoRA adapter changes on problems it has never seen, answers counted:",
        "[before and after](gsm8k-lora/README.md).",
        "",
    ]
    (RUNS / "README.md").write_text("\n".join(text), encoding="utf-8")


def draw(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Both losses of every run over its steps."""
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, log in runs.items():
        _, staleness, _, seed = name.split("-")
        style = {"color": f"C{staleness}", "alpha": 0.8, "linewidth": 1}
        label = f"staleness {staleness}" if seed == str(SEEDS[0]) else None
        train_log = [r for r in log if "loss" in r]
        left.plot([r["step"] for r in train_log], [r["loss"] for r in train_log], **style)
        evaluated = [r for r in log if "eval_loss" in r]
        at = [r["step"] for r in evaluated]
        right.plot(at, [r["eval_loss"] for r in evaluated], marker="o", label=label, **style)
    for axes, title in ((left, "training loss"), (right, "evaluation loss")):
        axes.set(title=title, xlabel="optimizer step")
        axes.grid(alpha=0.3)
    right.legend()
    figure.savefig(RUNS / "gsm8k.png", dpi=110)


if __name__ == "__main__":
    sys.exit(main())
