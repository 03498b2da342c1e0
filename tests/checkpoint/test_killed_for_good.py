"""The same with a process that really ends, and what a save of hundreds of megabytes takes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.checkpoint.find import drop_old, manifest_of, newest_whole

pytestmark = pytest.mark.accept


class _Exits:
    """What monkeypatch does, in a process that will not need it undone."""

    @staticmethod
    def setattr(target, name, value=None):
        if value is None:
            target, _, attribute = target.rpartition(".")
            setattr(importlib.import_module(target), attribute, name)
        else:
            setattr(target, name, value)


def _disk(root):
    place = Path(__file__).with_name("failing_disk.py")
    spec = importlib.util.spec_from_file_location("failing_disk_for_good", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    disk = module.Disk(_Exits, root)
    disk.kill = lambda _: os._exit(9)
    return disk


def _child(make_training, parent, number, is_async):
    """Go on from what is there by one step and save; die at operation ``number``."""
    status = 1
    try:
        with make_training(devices=1) as made:
            made.load(newest_whole(parent)[0])
            made.step()
            disk = _disk(parent)
            disk.restart(killed_at=number)
            saved = made.save(parent / f"checkpoint-{made.num_steps}", is_async=is_async)
            saved.wait()
            drop_old(parent, 2)
            status = 0
    finally:
        os._exit(status)


def test_a_child_is_killed_at_every_operation_and_goes_on_to_the_same_bits(
    make_training, never_stopped, same_bits, tmp_path
):
    expected, _ = never_stopped()
    parent = tmp_path / "runs"
    with make_training(devices=1) as made:
        for _ in range(2):
            made.step()
            made.save(parent / f"checkpoint-{made.num_steps}")
    number, at = 0, set()
    while True:
        child = os.fork()
        if child == 0:
            _child(make_training, parent, number, number % 2 == 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), f"operation {number}: the child ended with {status}"
        newest, reasons = newest_whole(parent)
        assert not reasons
        at.add(newest.name)
        with make_training(devices=2 if number % 5 == 0 else 1, seed=7) as made:
            made.load(newest)
            same_bits(made.step(4 - made.num_steps).outcome(), expected)
        if newest.name == "checkpoint-3":  # the next child begins where this one did
            (newest / "manifest.json").unlink()
            with make_training(devices=1) as made:
                for step in (1, 2):
                    made.step()
                    made.save(parent / f"checkpoint-{step}")
            drop = [path for path in parent.iterdir() if path.name == "checkpoint-3"]
            for path in drop:
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
        if status == 0:
            break
        number += 1
    assert at == {"checkpoint-2", "checkpoint-3"}
    assert number > 40


def _status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if key in x)
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_takes_the_memory_of_less_than_a_layer(is_async, tmp_path):
    torch.manual_seed(0)
    width, count = 2048, 10
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    with contextlib.closing(roundpipe.RoundPipe(model.to(torch.bfloat16), devices=1)) as pipe:
        optimizer = roundpipe.optim.AdamW(pipe.optim_parameters())
        x = torch.randn(8, width).to(torch.bfloat16)

        def step():
            pipe.forward_backward((x,), label=x, loss_fn=lambda o, y: (o - y).square().mean())
            pipe.step(optimizer)

        def peak(*works):
            """How much more memory there is at most than when these begin."""
            pipe.synchronize()
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            for work in works:
                work()
            pipe.synchronize()
            return _status("VmHWM") - before

        def save():
            saves.append(pipe.save_checkpoint(folder, optimizer, is_async=is_async))

        def wait():
            saves[-1].wait()

        for _ in range(3):
            step()
        saves, folder = [], tmp_path / "checkpoint-3"
        works = (step,) if is_async else ()
        # What the C library keeps for itself differs from time to time, by more than a save takes.
        alone = max(peak(*works) for _ in range(2))
        more = min(peak(save, *works, wait) for _ in range(2)) - alone
    layer = width * width * 12  # a master and two moments
    written = sum(each.num_bytes for each in manifest_of(folder).files.values())
    assert written > count * (layer + 2 * width * width)
    assert more < layer + (16 << 20), f"{written >> 20} MiB saved: {more >> 20} MiB more memory"
