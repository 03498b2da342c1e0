"""Everything that only a card can show, in one run of under six minutes and one table.

    python benchmarks/gpu_check.py --json gpu.json          # cuda:0
    python benchmarks/gpu_check.py --device cpu --tiny      # does it all still run?

No network, no files but the one asked for. Each check runs in a process of its own under a time
limit, so one that fails or hangs costs its own rows alone. Exits 1 if an aim was missed, 2 if a
check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMITS = {  # seconds
    "exactness": 60,
    "sanitizer": 60,
    "link": 40,
    "train_full": 90,
    "train_lora": 90,
    "longest": 90,
    "miniature": 90,
    "graph": 60,
    "fsdp": 90,
}
TOTAL_SECONDS = 350


def main() -> int:
    arguments = _arguments()
    if arguments.section:
        return _run_one(arguments)
    begin = time.monotonic()
    results: dict[str, Any] = {"machine": _machine(arguments), "sections": {}}
    print(f"{results['machine']}\n")
    for name in arguments.only or LIMITS:
        left = TOTAL_SECONDS - (time.monotonic() - begin)
        results["sections"][name] = _section(name, arguments, min(LIMITS[name], left))
        _print(name, results["sections"][name])
    results["seconds"] = time.monotonic() - begin
    print(f"\n{results['seconds']:.0f} s in all")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    failed = any("error" in each for each in results["sections"].values())
    rows = [row for each in results["sections"].values() for row in each.get("rows", ())]
    return 2 if failed else int(any(row["met"] is False for row in rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny models: only that it runs")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=LIMITS, help="these checks alone")
    parser.add_argument("--section", choices=LIMITS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _section(name: str, arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run one check in a process of its own."""
    if limit < 5:
        return {"error": "no time was left for it"}
    command = [sys.executable, __file__, "--section", name, "--device", arguments.device]
    command += ["--tiny"] if arguments.tiny else []
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env={**os.environ, **_environment(name, arguments)},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {limit:.0f} s"}
    seconds = time.monotonic() - begin
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        return {"error": tail or f"exit code {done.returncode}", "seconds": seconds}
    return {"rows": json.loads(lines[-1]), "seconds": seconds}


def _environment(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    if name == "sanitizer" and arguments.device.startswith("cuda"):
        return {"TORCH_CUDA_SANITIZER": "1"}  # read when torch is imported
    return {"OMP_NUM_THREADS": "1"} if arguments.tiny else {}


def _run_one(arguments: argparse.Namespace) -> int:
    """In the process of one check: the last line printed is its rows."""
    import torch  # noqa: PLC0415 (the parent needs none of it)
    from _gpu_sections import SECTIONS, Rig  # noqa: PLC0415

    rig = Rig(torch.device(arguments.device), arguments.tiny)
    SECTIONS[arguments.section](rig)
    print(json.dumps(rig.to_json()))
    return 0


def _machine(arguments: argparse.Namespace) -> str:
    code = (
        "import torch, sys; d = torch.device(sys.argv[1]); "
        "n = torch.cuda.get_device_name(d) if d.type == 'cuda' else 'CPU'; "
        "print(n, '· torch', torch.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, arguments.device], capture_output=True, text=True, check=False
    )
    what = done.stdout.strip() or done.stderr.strip().splitlines()[-1]
    return f"{what} · {os.cpu_count()} cores · {platform.platform()}"


def _print(name: str, result: dict[str, Any]) -> None:
    seconds = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    print(f"{name}  {seconds}")
    if "error" in result:
        print("  FAILED " + result["error"].replace("\n", "\n         "))
    for row in result.get("rows", ()):
        value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4g}"
        verdict = {None: "", True: "ok", False: "MISSED"}[row["met"]]
        aim = f"({row['aim']})" if row["aim"] else ""
        print(f"  {row['what']:<52} {value:>14} {row['unit']:<9} {aim:<14} {verdict}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
