from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from roundpipe.finetune.data.collate import collate, cut_rows, cut_rows_evenly, split_of, tokens_in
from roundpipe.finetune.data.samples import Sample

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def sample(length: int, *, seed: int = 0, prompt: int = 1) -> Sample:
    ids = np.random.RandomState(100 * seed + length).randint(3, 250, length)
    return Sample(ids, np.where(np.arange(length) < prompt, -100, ids))


def parts_of(batch: dict[str, Tensor], count: int, *, evenly: bool = False) -> list[Any]:
    return (cut_rows_evenly if evenly else cut_rows)((), batch, count)[1]


def test_samples_are_padded_on_the_right_to_the_longest() -> None:
    batch = collate([Sample([5, 6], [-100, 6]), Sample([7, 2, 2], [-100, 2, 2])], pad_token_id=2)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100], [-100, 2, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert tokens_in(batch) == 5


def test_an_end_token_that_equals_the_padding_stays_trained() -> None:
    batch = collate([Sample([5, 0], [-100, 0]), Sample([5, 6, 0], [-100, 6, 0])], pad_token_id=0)
    assert (batch["labels"] == 0).sum() == 2
    assert batch["attention_mask"].sum() == 5


def test_packed_samples_count_from_zero_each_and_their_first_token_is_no_label() -> None:
    rows = [[Sample([5, 6], [5, 6]), Sample([7, 8, 9], [7, 8, 9])], [Sample([3, 4], [-100, 4])]]
    batch = collate(rows, pad_token_id=0, packed=True)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9], [-100, 4, -100, -100, -100]]
    assert "attention_mask" not in batch  # with one no model looks at the positions
    assert tokens_in(batch) == 7


@given(lengths=LENGTHS, count=st.integers(1, 12), packed=st.booleans(), evenly=st.booleans())
@settings(max_examples=60)
def test_every_row_is_in_one_microbatch_without_the_padding_that_it_does_not_need(
    lengths: list[int], count: int, packed: bool, evenly: bool
) -> None:
    rows = [[sample(n, seed=i) for i in range(1 + (n % 3 if packed else 0))] for n in lengths]
    batch = collate(rows, pad_token_id=1, packed=packed)
    parts = parts_of(batch, count, evenly=evenly)
    assert len(parts) == min(count, len(rows))  # never another number: results would hang on it
    beside = "position_ids" if packed else "attention_mask"
    found = []
    for part in parts:
        assert set(part) == set(batch)
        width = part["input_ids"].shape[1]
        totals = [
            tokens_in({name: row[None] for name, row in _row(part, i).items()})
            for i in range(len(part["input_ids"]))
        ]
        assert max(totals) == width
        for i, total in enumerate(totals):
            row = _row(part, i)
            found.append((row["input_ids"][:total].tolist(), row["labels"][:total].tolist()))
            assert (row["labels"][total:] == -100).all()
            assert (row[beside][total:] == 0).all()
    whole = [
        (row["input_ids"][:total].tolist(), row["labels"][:total].tolist())
        for row, total in ((_row(batch, i), sum(map(len, r))) for i, r in enumerate(rows))
    ]
    assert sorted(found) == sorted(whole)


def _row(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    return {name: tensor[i] for name, tensor in batch.items()}


@given(lengths=LENGTHS, count=st.integers(1, 8))
@settings(max_examples=60)
def test_no_cut_into_neighbours_costs_less(lengths: list[int], count: int) -> None:
    batch = collate([sample(n, seed=i) for i, n in enumerate(lengths)], pad_token_id=1)
    sizes = [part["input_ids"].numel() for part in parts_of(batch, count)]
    even = [part["input_ids"].numel() for part in parts_of(batch, count, evenly=True)]
    assert sum(size**2 for size in sizes) <= sum(size**2 for size in even)
    # What the planner counts on: rows as even as can be, all as long as the longest.
    assert max(sizes) <= max(lengths) * -(-len(lengths) // len(sizes))
    if len(lengths) <= 7:
        assert sum(size**2 for size in sizes) == _least(sorted(lengths)[::-1], len(sizes))


def _least(lengths: list[int], count: int) -> float:
    most = lengths[0] * -(-len(lengths) // count)

    def best(rest: list[int], left: int) -> float:
        if left == 0:
            return 0 if not rest else float("inf")
        costs = [
            (rest[0] * size) ** 2 + best(rest[size:], left - 1)
            for size in range(1, len(rest) + 1)
            if rest[0] * size <= most
        ]
        return min(costs, default=float("inf"))

    return best(lengths, count)


def test_rows_of_one_length_are_dealt_evenly_and_long_ones_stand_alone() -> None:
    def sizes(*lengths: int) -> list[int]:
        batch = collate([sample(n) for n in lengths], pad_token_id=1)
        return [len(part["input_ids"]) for part in parts_of(batch, 4)]

    assert sorted(sizes(*[9] * 9)) == [2, 2, 2, 3]
    assert sizes(*[9] * 8) == [2, 2, 2, 2]
    assert sizes(40, 5, 5, 5, 5, 5, 5, 5, 5) == [1, 2, 3, 3]


def test_a_microbatch_is_never_larger_than_memory_was_planned_for() -> None:
    """Squares alone would put 8 apart from 6, 6 and 2: 18 tokens, where an even cut has 16."""
    batch = collate([sample(n, seed=i) for i, n in enumerate((8, 6, 6, 2))], pad_token_id=1)
    assert [part["input_ids"].shape for part in parts_of(batch, 2)] == [(2, 8), (2, 6)]


def test_a_chosen_size_of_microbatches_is_kept() -> None:
    batch = collate([sample(n) for n in (40, 3, 3, 3, 3, 3)], pad_token_id=1)
    _, parts = split_of(2)((), batch, 3)
    assert [len(part["input_ids"]) for part in parts] == [2, 2, 2]
    assert split_of(None) is cut_rows


def test_what_is_no_batch_of_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not a batch of samples: 1 arguments.*\nhint: "):
        cut_rows((torch.zeros(2),), {}, 2)


# trained


def plain_step(model: Any, batch: dict[str, Tensor], parts: list[Any]) -> tuple[float, list[Any]]:
    tokens = (batch["labels"][:, 1:] != -100).sum()
    total = torch.zeros(())
    for part in parts:
        loss = model(**part, num_items_in_batch=tokens, use_cache=False).loss
        loss.backward()
        total += loss.detach()
    return total.item(), [p.grad for p in model.parameters()]


def rows_of_a_step() -> list[list[Sample]]:
    lengths = (21, 3, 8, 2, 33, 5, 5, 12, 9)
    return [[sample(n, seed=i, prompt=1 + i % 2)] for i, n in enumerate(lengths)]


def packed(rows: list[list[Sample]]) -> list[list[Sample]]:
    flat = [row[0] for row in rows]
    return [flat[:3], flat[3:5], flat[5:]]


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_step_has_the_bits_of_a_plain_loop_over_the_same_microbatches(
    tiny: ModuleType, is_packed: bool
) -> None:
    rows = packed(rows_of_a_step()) if is_packed else rows_of_a_step()
    batch = collate(rows, pad_token_id=258, packed=is_packed)
    loss, gradients = plain_step(tiny.tiny_model(tied=False), batch, parts_of(batch, 4))
    model = tiny.tiny_model(tied=False)
    with RoundPipe(model, devices="cpu*2") as trainer:
        config = RoundPipeRunConfig(num_microbatch=4, split_input=cut_rows)
        assert trainer.forward_backward(input_kwargs=batch, run_config=config).item() == loss
        found: dict[str, Any] = {}

        def read() -> None:
            found.update({name: p.grad.clone() for name, p in trainer.optim_named_parameters()})

        trainer.step(read)
        trainer.synchronize()
        names = [name for name, _ in tiny.tiny_model(tied=False).named_parameters()]
        for name, expected in zip(names, gradients, strict=True):
            assert torch.equal(found[name], expected), name


def test_packed_or_cut_or_whole_the_step_is_the_same(tiny: ModuleType) -> None:
    """To 1e-6: sums run in another order."""
    rows = rows_of_a_step()
    whole = collate(rows, pad_token_id=258)
    loss, gradients = plain_step(tiny.tiny_model(), whole, [whole])
    dense = collate(packed(rows), pad_token_id=258, packed=True)
    for batch, count in ((whole, 5), (dense, 1), (dense, 3)):
        other, found = plain_step(tiny.tiny_model(), batch, parts_of(batch, count))
        assert other == pytest.approx(loss, rel=1e-6)
        for ours, expected in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_changing_a_packed_sample_changes_no_logit_of_another(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    rows = packed(rows_of_a_step())
    changed = [[sample(len(rows[0][0]), seed=9), *rows[0][1:]], *rows[1:]]
    with RoundPipe(model, devices="cpu*2") as trainer, torch.no_grad():
        trainer.eval()
        one, other = (
            trainer(**collate(each, pad_token_id=258, packed=True)).logits
            for each in (rows, changed)
        )
    border = len(rows[0][0])
    assert not torch.equal(one[0, :border], other[0, :border])
    assert torch.equal(one[0, border:], other[0, border:])
    assert torch.equal(one[1:], other[1:])


def test_evaluation_takes_batches_cut_by_length(tiny: ModuleType) -> None:
    batch = collate(rows_of_a_step(), pad_token_id=258)
    expected = tiny.tiny_model()(**batch, use_cache=False).loss.item()
    config = RoundPipeRunConfig(num_microbatch=3, split_input=cut_rows, loss_only=True)
    with RoundPipe(tiny.tiny_model(), devices="cpu") as trainer, torch.no_grad():
        found = trainer(**batch, roundpipe_run_config=config)
    assert float(found.loss) == pytest.approx(expected, rel=1e-6)
