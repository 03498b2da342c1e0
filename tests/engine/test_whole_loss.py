"""Losses of microbatches become the batch's."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from roundpipe.engine.whole_loss import weigh_losses


def test_a_loss_over_samples_is_weighed_by_them():
    outputs = [torch.tensor(1.0), torch.tensor(4.0)]
    weigh_losses(outputs, [3, 1])
    assert torch.stack(outputs).mean() == (3 * 1.0 + 4.0) / 4


def test_only_what_has_no_dimension_is_weighed_and_nothing_where_sizes_are_even():
    outputs = [(torch.ones(3), torch.tensor(2), torch.tensor(1.0)), (torch.ones(1), 2, 1.0)]
    weigh_losses(outputs, [3, 1])
    assert torch.equal(outputs[0][0], torch.ones(3))
    assert outputs[0][1] == 2
    assert outputs[0][2] == 1.5
    even = [torch.tensor(1.0), torch.tensor(4.0)]
    weigh_losses(even, [2, 2])
    assert even == [torch.tensor(1.0), torch.tensor(4.0)]


def _with_labels(losses, labels, **settings):
    outputs = [SimpleNamespace(loss=torch.tensor(loss)) for loss in losses]
    weigh_losses(outputs, [2] * len(losses), labels, **settings)
    assert len({output.loss.item() for output in outputs}) == 1
    return outputs[0].loss.item()


def test_a_loss_over_tokens_is_weighed_by_those_that_are_trained():
    labels = [torch.tensor([[5, 6, -100]]), torch.tensor([[7, -100, -100]])]
    assert _with_labels([1.0, 4.0], labels) == (2 * 1.0 + 4.0) / 3
    assert _with_labels([1.0, float("nan")], labels, is_shifted=True) == 1.0


def test_labels_that_are_numbers_count_by_sample():
    labels = [torch.zeros(3), torch.zeros(1)]
    assert _with_labels([1.0, 5.0], labels) == 2.0
