"""Data larger than memory: what reading it takes does not grow with it, and is not done twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.accept

_CHILD = """
import importlib.util, json, sys, threading, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("tiny", sys.argv[1])
tiny = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny)
from roundpipe.finetune.data.dataset import load_dataset
from roundpipe.finetune.settings.config import make_config

def own_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

peak, done = 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, own_bytes())
where = {"dataset": sys.argv[2], "dataset_prepared_path": sys.argv[3]}
config, _ = make_config({"model": "m", **where})
tokenizer = tiny.make()
before = own_bytes()
threading.Thread(target=watch).start()
started = time.process_time()
data = load_dataset(config, tokenizer)
seconds = time.process_time() - started
some = sum(len(data.samples[i]) for i in range(0, len(data.samples), 3))
done.set()
print(json.dumps({
    "bytes": peak - before, "seconds": seconds, "samples": len(data.samples),
    "tokens": data.stats.tokens, "digest": data.samples.digest, "some": some,
}))
"""


def write(path: Path, num_bytes: int) -> None:
    """Rows of about a kilobyte, of a kind told by the suffix."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(300)]
    written = 0
    is_array = path.suffix == ".json"
    with path.open("w") as file:
        file.write("[" if is_array else "")
        while written < num_bytes:
            text = " ".join(draw.choices(words, k=100))
            row = json.dumps({"question": text, "answer": " ".join(draw.choices(words, k=40))})
            file.write((",\n" if written and is_array else "") + row + ("" if is_array else "\n"))
            written += len(row)
        file.write("]" if is_array else "")


def load(data: Path, kept: Path) -> dict[str, Any]:
    tokenizer = Path(__file__).parents[1] / "finetune" / "tiny_tokenizer.py"
    told = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tokenizer), str(data), str(kept)],
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_memory_does_not_grow_with_the_data(suffix: str, tmp_path: Path) -> None:
    small, large = tmp_path / f"small.{suffix}", tmp_path / f"large.{suffix}"
    write(small, 1 << 20)
    write(large, 11 << 20)
    few = load(small, tmp_path / "kept")
    many = load(large, tmp_path / "kept")
    tokens = 8 * (many["tokens"] - few["tokens"])
    grown = many["bytes"] - few["bytes"]
    print(f"{suffix}: {grown >> 20} MB more for {tokens >> 20} MB of tokens more")  # noqa: T201 - the figures
    assert many["samples"] > 10 * few["samples"]
    assert grown < tokens / 6

    started = time.perf_counter()
    again = load(large, tmp_path / "kept")
    print(f"again: {again['seconds']:.2f} s, {time.perf_counter() - started:.1f} s with imports")  # noqa: T201
    assert again["digest"] == many["digest"]
    assert again["some"] == many["some"]
    assert again["seconds"] < many["seconds"] / 20
