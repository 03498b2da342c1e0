from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.finetune.data.collate import batches, collate
from roundpipe.finetune.data.encode import Sample


def test_samples_are_padded_on_the_right_to_the_longest() -> None:
    batch = collate([Sample([5, 6], [-100, 6]), Sample([7, 2, 2], [-100, 2, 2])], pad_token_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 2, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_an_end_token_that_equals_the_padding_stays_trained() -> None:
    batch = collate([Sample([5, 0], [-100, 0]), Sample([5, 6, 0], [-100, 6, 0])], pad_token_id=0)
    assert (batch["labels"] == 0).sum() == 2
    assert batch["attention_mask"].sum() == 5


@given(
    num_samples=st.integers(1, 60), batch_size=st.integers(1, 20), seed=st.integers(0, 2**63 - 1)
)
def test_an_epoch_holds_every_sample_once_in_full_batches_but_the_last(
    num_samples: int, batch_size: int, seed: int
) -> None:
    order = batches(num_samples, batch_size, seed, epoch=0)
    assert sorted(i for batch in order for i in batch) == list(range(num_samples))
    sizes = [len(batch) for batch in order]
    assert sizes[:-1] == [batch_size] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= batch_size


def test_the_order_hangs_on_seed_and_epoch_alone() -> None:
    first = batches(50, 8, seed=42, epoch=0)
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate()
    assert batches(50, 8, seed=42, epoch=0) == first
    assert random.getstate() == before
    assert batches(50, 8, seed=42, epoch=1) != first
    assert batches(50, 8, seed=43, epoch=0) != first
    assert [i for b in first for i in b] == [i for b in batches(50, 7, 42, 0) for i in b]


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert batches(8, 3, seed=42, epoch=1) == [[4, 0, 7], [1, 2, 6], [3, 5]]
