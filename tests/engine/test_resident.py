"""Resident memory of training processes: flat over steps and saves, and what the planner says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FLAT = """
import gc, json, mmap, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from torch import nn
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.optim import AdamW

torch.set_num_threads(1)
torch.manual_seed(0)
folder = Path(sys.argv[1])

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
model[3].register_buffer("ballast", torch.zeros(1 << 20))  # saved, and in the way of nothing
plan = ModelExecutePlan([range(3), range(3, 6)], [range(6, 8), range(3, 6), range(3)])  # for good
config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
x, y = torch.randn(2, 64, 256)
with RoundPipe(model, devices="cpu*2") as pipe:
    optimizer = AdamW(pipe.optim_parameters(), lr=1e-4)
    def step():
        pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss, run_config=config)
        pipe.step(optimizer)
    seen = []
    for _ in range(5):
        for _ in range(40):
            step()
        save_file(pipe.state_dict(), folder / "weights")
        seen.append(resident())
print(json.dumps(seen))
"""

PLAN = """
import gc, json, mmap, sys
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.models.estimate import Job
from roundpipe.models.estimate.costs import Host
from roundpipe.models.estimate.sizes import layer_sizes
from roundpipe.optim import AdamW
from roundpipe.plan.host_bytes import host_bytes

torch.set_num_threads(1)
torch.manual_seed(0)
config = RoundPipeRunConfig(num_microbatch=1)

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

def train(width):
    model = nn.Sequential(*(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(8)))
    x, y = torch.randn(2, 8, width).to(torch.bfloat16)
    pipe = RoundPipe(model, devices="cpu", schedule="round_robin")
    optimizer = AdamW(pipe.optim_parameters(), lr=1e-4)
    for _ in range(3):
        pipe.forward_backward((x,), label=y, loss_fn=nn.functional.mse_loss, run_config=config)
        pipe.step(optimizer)
    pipe.synchronize()
    return pipe, optimizer

train(16)[0].close()  # what libraries allocate once does not count
before = resident()
pipe, optimizer = train(1408)
grown = resident() - before
tensors = [layer.tensors for layer in pipe._spec.layers]
hosts = [Host(sizes, Job(dtype="bf16", length=1)) for sizes in layer_sizes(tensors, packed=set())]
costs = pipe.planner.costs
costs = replace(costs, layers=tuple(
    replace(layer, pinned_bytes=host.pinned_bytes, pageable_bytes=host.pageable_bytes)
    for layer, host in zip(costs.layers, hosts, strict=True)
))
planned = host_bytes(costs, pipe._chain._last.program.schedule.visits)
print(json.dumps({
    "grown": grown,
    "host": planned.total,
    "devices": sum(device.allocated_bytes for device in pipe._pool.devices),
}))
pipe.close()
"""

# One process for both: to start one takes longer than what they do.
BOTH = """
import sys
for code in (sys.argv.pop(), sys.argv.pop()):
    exec(code, {})
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process says that runs ``PLAN`` and then ``FLAT``."""
    # glibc keeps what it has not mapped: threads' activations would count as growth.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(tmp_path_factory.mktemp("saves")), FLAT, PLAN],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow  # a process that imports torch and trains
def test_200_steps_and_5_saves_do_not_grow(found):
    _, seen = found
    # Three saves that stayed would be 19 MB, a boundary of each of the last 120 steps 4.
    assert max(seen[2:]) - min(seen[:2]) < 2e6, seen


@pytest.mark.slow
def test_what_a_process_grows_by_is_what_the_plan_says_within_5_percent(found):
    said, _ = found
    planned = said["host"] + said["devices"]
    assert planned > 250e6
    assert abs(planned / said["grown"] - 1) < 0.05, said
