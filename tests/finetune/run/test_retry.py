"""Steps that did not fit: what becomes of the weights, of the number, and of what is said."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from roundpipe.config import RoundPipeRunConfig
from roundpipe.device.cpu import CpuDevice
from roundpipe.errors import ConfigError, DeviceError, NoRoomError, RoundPipeError, StepError
from roundpipe.finetune.data.collate import cut_rows
from roundpipe.finetune.model.neftune import add_neftune
from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.evaluate import evaluate
from roundpipe.finetune.run.loop import train
from roundpipe.finetune.run.retry import Splitting, lost_memory
from roundpipe.finetune.run.signals import Stop, Stopped
from roundpipe.finetune.run.training import Training
from roundpipe.optim import AdamW
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor


def batch_of(step: int, rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (rows, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class Loop:
    """Steps as a run makes them: what is lost is given again in smaller microbatches."""

    def __init__(self, trainer: RoundPipe, splitting: Splitting, *, is_async: bool = False) -> None:
        self.trainer, self.splitting, self.is_async = trainer, splitting, is_async
        self.optimizer = AdamW(trainer.optim_parameters(), lr=1e-2)
        self.given: list[tuple[int, Any]] = []  # steps under way
        self.said: list[str] = []
        self.counts: list[int | None] = []

    def run(self, total: int, split_at: Callable[[int], None] = lambda _: None) -> None:
        step = 0
        while step < total or self.given:
            try:
                if step < total:
                    split_at(step)
                    self.make(step)
                    step += 1
                if len(self.given) > 1 or step == total:
                    self.given[0][1].skipped  # noqa: B018 - waits for it
                    self.given.pop(0)
            except (RoundPipeError, torch.OutOfMemoryError) as error:
                step = self.first_lost(step)
                if not lost_memory(error):
                    raise
                self.splitting.halve(error, 8, say=self.said.append)
                self.trainer.plan_again()

    def make(self, step: int) -> None:
        count = self.splitting.count(8)
        self.trainer.forward_backward(
            input_kwargs=batch_of(step), run_config=RoundPipeRunConfig(num_microbatch=count)
        )
        self.counts.append(count)
        self.given.append((step, self.trainer.step(self.optimizer, is_async=self.is_async)))

    def first_lost(self, step: int) -> int:
        given, self.given = self.given, []
        for number, result in given:
            try:
                result.skipped  # noqa: B018
            except StepError:
                return int(number)
        return step

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.trainer.newest_weights().items()}


class ShortOf:
    """A pre-hook of a layer: no memory for more than so many rows, from a call of it on."""

    def __init__(self, most_rows: int, *, after: int = 0) -> None:
        self.most_rows, self.left = most_rows, after
        self.is_on = False
        self.seen: list[weakref.ref[Tensor]] = []

    def __deepcopy__(self, _: object) -> ShortOf:
        return self

    def __call__(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if self.is_on and (torch.is_grad_enabled() or not module.training):
            self.left -= 1
            if self.left < 0 and given[0].shape[0] > self.most_rows:
                held = torch.empty(64)
                self.seen.append(weakref.ref(held))
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Of "
                    "the allocated memory 3.00 GiB is allocated by PyTorch."
                )


def trained(
    model: Any,
    short: ShortOf | None = None,
    *,
    devices: Any = "cpu*2",
    split_at: Callable[[Loop, int], None] | None = None,
    is_async: bool = False,
    **settings: Any,
) -> tuple[dict[str, Tensor], Loop]:
    model.train()
    noise = add_neftune(model, 5.0)
    short = short or ShortOf(99)
    model.model.layers[1].mlp.register_forward_pre_hook(short)
    with RoundPipe(model, devices=devices, seed=3, schedule="round_robin", **settings) as trainer:
        loop = Loop(trainer, Splitting(2), is_async=is_async)
        short.is_on = True
        loop.run(3, lambda step: split_at and split_at(loop, step))
        found = loop.weights()
    noise.remove()
    return found, loop


@pytest.mark.parametrize(("after", "is_async"), [(0, False), (5, False), (5, True)])
def test_a_step_without_room_leaves_the_bits_of_a_run_that_was_split_then(
    tiny: ModuleType, after: int, is_async: bool
) -> None:
    short = ShortOf(2, after=after)
    found, loop = trained(tiny.tiny_model(), short, is_async=is_async)
    assert loop.splitting.factor == 2
    assert loop.said == [
        "out of device memory: the step is made again with 4 microbatches in place of 2 "
        "(CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.)"
    ]
    gc.collect()
    assert not any(held() is not None for held in short.seen)
    at = 3 - loop.counts.count(4)  # the first step that was given again

    def split_at(loop: Loop, step: int) -> None:
        loop.splitting.factor = 2 if step >= at else 1
        if step == at and is_async:  # what was dropped is given again with the newest weights
            loop.trainer.synchronize()
            loop.trainer._chain.catch_up()

    expected, _ = trained(tiny.tiny_model(), split_at=split_at, is_async=is_async)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_goes_on_in_smaller_microbatches_and_is_gone_on_with_in_these(
    config_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, make_step = LlamaMLP.forward, Training.make_step
    most_rows, stop_after, counts = 99, 99, []
    stop = Stop()

    def forward(self: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.shape[0] > most_rows:
            raise torch.OutOfMemoryError("no room")
        return plain(self, x)

    def make(self: Training, step: int) -> None:
        nonlocal most_rows
        most_rows = 1
        make_step(self, step)
        counts.append(self.splitting.count(5))
        if step == stop_after:
            stop.asked = 15

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    monkeypatch.setattr(Training, "make_step", make)

    def run(**changes: Any) -> tuple[list[float], str]:
        nonlocal most_rows, stop
        most_rows, stop, stream = 99, Stop(), io.StringIO()
        config = config_of(num_microbatch=2, max_steps=2, **changes)
        with contextlib.suppress(Stopped):
            result = train(config, terminal=Terminal(stream), environment={}, stop=stop)
            assert result is not None
            return [record["loss"] for record in result.history], stream.getvalue()
        return [], stream.getvalue()

    stop_after = 1
    _, shown = run()
    assert shown.count("out of device memory") == 2  # 3 rows at most, then 2, then 1
    assert "made again with 5 microbatches in place of 4 (no room)" in shown
    counts.clear()
    losses, shown = run()
    assert "out of device memory" not in shown
    assert counts == [5]
    assert len(losses) == 2


def test_what_cannot_be_split_says_what_was_needed_what_there_was_and_what_helps(
    tiny: ModuleType,
) -> None:
    with pytest.raises(
        DeviceError, match=r"(?s)for one row: CUDA out.*2.00 GiB.*hint: recompute_grain=layer"
    ):
        trained(tiny.tiny_model(), ShortOf(0))


def test_weights_that_do_not_fit_are_told_once_splitting_has_not_helped(tiny: ModuleType) -> None:
    with pytest.raises(DeviceError, match=r"one row: out of memory on small: [\d,]+ bytes asked"):
        trained(tiny.tiny_model(), devices=[CpuDevice("small", capacity_bytes=9000)])


def test_an_error_of_another_kind_is_no_lack_of_memory() -> None:
    assert not lost_memory(StepError("a layer failed"))
    assert not lost_memory(ConfigError("out of memory"))
    error = StepError("a layer failed")
    error.__cause__ = torch.OutOfMemoryError("no room")
    assert lost_memory(error)
    assert lost_memory(NoRoomError("layer 0 does not fit on the device: 9 bytes of 8"))


@pytest.mark.parametrize(
    ("given", "factor", "rows", "expected"),
    [(None, 1, 16, None), (None, 2, 16, 16), (None, 2, 12, 12), (3, 2, 16, 6), (3, 8, 16, 16)],
)
def test_microbatches_are_multiplied_up_to_one_row_each(
    given: int | None, factor: int, rows: int, expected: int | None
) -> None:
    assert Splitting(given, factor).count(rows) == expected


def test_the_size_of_microbatches_is_divided_where_that_was_given() -> None:
    splitting = Splitting()
    assert splitting.count_of_size(10, 4) == 3
    splitting.restore({"factor": 2})
    assert splitting.count_of_size(10, 4) == 6
    assert splitting.count_of_size(3, 2) == 3
    assert splitting.state() == {"factor": 2}


def test_an_evaluation_without_room_is_split_too_and_comes_to_the_same(tiny: ModuleType) -> None:
    def run(most_rows: int) -> tuple[float, Splitting]:
        model = tiny.tiny_model()
        short = ShortOf(most_rows)
        model.model.layers[1].mlp.register_forward_pre_hook(short)
        own = Splitting()
        with RoundPipe(model, devices="cpu*2") as trainer:
            trainer.eval()
            short.is_on = True
            found = evaluate(
                trainer,
                [batch_of(1), batch_of(2, rows=3)],
                run_config=lambda _: RoundPipeRunConfig(num_microbatch=2, split_input=cut_rows),
                splitting=own,
            )
        return found.loss, own

    whole, _ = run(99)
    split, own = run(1)
    assert own.factor == 4
    assert split == pytest.approx(whole, rel=1e-6)
