from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe.device.accumulation import adds_up_in_fp16, fp16_accumulation
from roundpipe.device.cpu import CpuDevice
from roundpipe.engine.ground import Ground
from roundpipe.errors import ConfigError
from roundpipe.plan.machine_text import parse_machine


def card() -> Any:
    return SimpleNamespace(torch_device=torch.device("cuda", 0), name="cuda:0")


@pytest.mark.parametrize("before", [False, True])
def test_the_switch_is_on_for_the_run_and_as_before_after_it(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    matmul = SimpleNamespace(allow_fp16_accumulation=before)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)

    def run() -> None:
        with fp16_accumulation([card()], torch.float16):
            assert matmul.allow_fp16_accumulation
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert matmul.allow_fp16_accumulation is before


def test_another_dtype_and_devices_without_such_sums_are_refused_by_name() -> None:
    cpu = CpuDevice("cpu:1")
    with (
        pytest.raises(ConfigError, match=r"fp16_accumulation is of NVIDIA.*cpu:1\nhint: fp16"),
        fp16_accumulation([cpu], torch.float16),
    ):
        pass
    cpu.close()
    with (
        pytest.raises(ConfigError, match="not of bfloat16\nhint: dtype=fp16"),
        fp16_accumulation([card()], torch.bfloat16),
    ):
        pass
    assert not adds_up_in_fp16()


def test_amds_cards_have_no_such_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ConfigError, match="NVIDIA"), fp16_accumulation([card()], torch.float16):
        pass


def test_first_plans_are_made_by_the_rate_that_such_sums_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ground = Ground(parse_machine("1x4090,64GB"))
    usual = ground.flops
    matmul = SimpleNamespace(allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert ground.flops > 1.5 * usual
