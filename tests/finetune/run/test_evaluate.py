from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roundpipe.config import RoundPipeRunConfig
from roundpipe.errors import StepError
from roundpipe.finetune.data.collate import collate, cut_rows
from roundpipe.finetune.data.samples import Sample
from roundpipe.finetune.run.evaluate import Evaluation, evaluate
from roundpipe.optim import AdamW
from roundpipe.plan.actions import Op
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from torch import Tensor

SAMPLES = [
    Sample(list(range(length)), [-100] * masked + list(range(masked, length)))
    for length, masked in [(9, 1), (3, 2), (40, 20), (5, 5), (12, 0), (7, 3)]
]


def batches(size: int, *, packed: bool = False) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(SAMPLES), size):
        part = SAMPLES[start : start + size]
        rows = [part[:2], part[2:]] if packed and len(part) > 2 else [[each] for each in part]
        yield collate(rows, 0, packed=packed)


def run_config(rows: int) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=min(rows, 3), split_input=cut_rows)


def mean_loss(size: int, **more: Any) -> tuple[Evaluation, list[int]]:
    """Loss of a "model" whose loss on a token is the token itself."""
    seen = []

    def trainer(labels: Tensor, *, roundpipe_run_config: Any, **_: Tensor) -> Any:
        assert not torch.is_grad_enabled()
        assert roundpipe_run_config.loss_only
        seen.append(len(labels))
        kept = labels[:, 1:]
        return SimpleNamespace(loss=kept[kept != -100].double().mean())

    return evaluate(trainer, batches(size), run_config=run_config, **more), seen


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_loss_is_the_mean_over_tokens_however_the_samples_are_cut(size: int) -> None:
    tokens = [int(label) for s in SAMPLES for label in s.labels[1:] if label != -100]
    done: list[int] = []
    found, seen = mean_loss(size, tell=done.append)
    assert found.loss == pytest.approx(sum(tokens) / len(tokens), rel=1e-12)
    assert (found.tokens, found.is_whole) == (len(tokens), True)
    assert max(seen) <= size
    assert done == [*range(0, 6, size), 6]


def test_it_can_be_stopped_between_batches() -> None:
    stops = iter([False, False, True])
    found, seen = mean_loss(2, should_stop=lambda: next(stops))
    assert not found.is_whole
    assert seen == [2, 2]


def test_nothing_to_evaluate_is_not_a_number() -> None:
    found = evaluate(lambda **_: None, [], run_config=run_config)
    assert found.loss != found.loss
    assert found.tokens == 0


def test_a_batch_that_fails_for_another_reason_than_memory_ends_it() -> None:
    def trainer(**_: Any) -> Any:
        raise StepError("a layer failed")

    with pytest.raises(StepError, match="a layer failed"):
        evaluate(trainer, batches(2), run_config=run_config)


def test_no_logits_come_to_the_host_and_packing_changes_nothing(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    with torch.no_grad():
        sums = [
            (float(model(**collate([[s]], 0)).loss) * count, count)
            for s in SAMPLES
            if (count := sum(int(label) != -100 for label in s.labels[1:]))
        ]
    expected = sum(total for total, _ in sums) / sum(count for _, count in sums)
    with RoundPipe(model, devices="cpu*2") as trainer:
        trainer.eval()
        for size, packed in ((6, False), (4, False), (4, True)):
            down = trainer._engine.traffic.num_bytes[Op.ACTIVATION_OUT]
            found = evaluate(trainer, batches(size, packed=packed), run_config=run_config)
            assert found.loss == pytest.approx(expected, rel=1e-5)
            down = trainer._engine.traffic.num_bytes[Op.ACTIVATION_OUT] - down
            assert down < 260 * 4 * 76  # fewer than the logits of so many tokens


def test_a_run_at_staleness_1_is_evaluated_with_its_newest_weights_and_not_disturbed(
    tiny: ModuleType,
) -> None:
    def run(*, evaluates: bool) -> tuple[dict[str, Tensor], list[float]]:
        model, losses = tiny.tiny_model().train(), []
        with RoundPipe(model, devices="cpu*2", seed=1) as trainer:
            optimizer = AdamW(trainer.optim_parameters(), lr=1e-2)
            for _ in range(3):
                trainer.forward_backward(input_kwargs=collate([[s] for s in SAMPLES], 0))
                trainer.step(optimizer, is_async=True)
                if evaluates:
                    trainer.eval()
                    found = evaluate(trainer, batches(3), run_config=run_config)
                    losses.append(found.loss)
                    newest = {n: v.clone() for n, v in trainer.newest_weights().items()}
                    other = tiny.tiny_model()
                    other.load_state_dict(newest, strict=False)
                    other.tie_weights()
                    with torch.no_grad():
                        expected = float(other(**collate([[s] for s in SAMPLES], 0)).loss)
                    assert found.loss == pytest.approx(expected, rel=1e-5)
                    trainer.train()
            return {n: v.clone() for n, v in trainer.newest_weights().items()}, losses

    undisturbed, _ = run(evaluates=False)
    found, losses = run(evaluates=True)
    assert losses == sorted(losses, reverse=True)
    assert all(torch.equal(found[name], undisturbed[name]) for name in undisturbed)
