from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe.finetune.data.encode import Sample
from roundpipe.finetune.run.evaluate import evaluation_loss

SAMPLES = [
    Sample(list(range(length)), [-100] * masked + list(range(masked, length)))
    for length, masked in [(9, 1), (3, 2), (40, 20), (5, 5), (12, 0), (7, 3)]
]


def mean_loss(batch_size: int, **more: Any) -> tuple[float, list[tuple[int, int]]]:
    """Loss of a "model" whose loss on a token is the token itself."""
    shapes = []

    def forward(input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        shapes.append(tuple(input_ids.shape))
        kept = labels[:, 1:]
        return SimpleNamespace(loss=kept[kept != -100].double().mean())

    return evaluation_loss(forward, SAMPLES, batch_size=batch_size, pad_token_id=0, **more), shapes


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6, 100])
def test_the_loss_is_the_mean_over_tokens_however_the_samples_are_cut(batch_size: int) -> None:
    tokens = [label for sample in SAMPLES for label in sample.labels[1:] if label != -100]
    loss, shapes = mean_loss(batch_size)
    assert loss == pytest.approx(sum(tokens) / len(tokens), rel=1e-12)
    assert max(rows for rows, _ in shapes) <= batch_size


def test_calls_are_smaller_where_their_logits_would_be_too_many() -> None:
    loss, shapes = mean_loss(6, vocabulary=(1 << 28) // 20)  # room for 20 tokens
    assert loss == pytest.approx(mean_loss(6)[0], rel=1e-12)
    assert all(rows == 1 or rows * length <= 20 for rows, length in shapes)
    assert (1, 40) in shapes  # one sample is always taken


def test_nothing_to_evaluate_is_not_a_number() -> None:
    loss = evaluation_loss(lambda **_: None, [], batch_size=2, pad_token_id=0)
    assert loss != loss  # noqa: PLR0124
