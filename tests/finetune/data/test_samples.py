from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from roundpipe.finetune.data.samples import Sample, Samples, part_of
from roundpipe.finetune.data.tokens import TokenWriter, map_folder

if TYPE_CHECKING:
    from pathlib import Path


def make(count: int, first: int = 0) -> list[Sample]:
    """Samples of 1, 2, 3, … tokens; all but the first token of each are trained."""
    return [
        Sample(range(i, i + n), [-100, *range(i + 1, i + n)])
        for n, i in enumerate(range(first, first + count), start=1)
    ]


def test_a_sample_is_int32_and_equal_by_content() -> None:
    sample = Sample([1, 2], [-100, 2])
    assert sample.input_ids.dtype == sample.labels.dtype == np.int32
    assert sample == Sample(np.array([1, 2]), np.array([-100, 2]))
    assert sample != Sample([1, 2], [-100, -100])
    assert sample != Sample([1], [-100])
    assert len({sample, Sample([1, 2], [-100, 2])}) == 1
    assert (len(sample), sample.num_trained) == (2, 1)


def test_parts_are_one_sequence() -> None:
    first, second = make(3), make(2, first=50)
    samples = Samples([part_of(first), part_of([]), part_of(second)])
    assert list(samples) == first + second
    assert len(samples) == 5
    assert samples[-1] == second[-1]
    assert list(samples[1:4]) == (first + second)[1:4]
    assert samples.lengths.tolist() == [1, 2, 3, 1, 2]
    assert samples.num_trained.tolist() == [0, 1, 2, 0, 1]
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            samples[wrong]


def test_some_of_the_samples_are_samples_again() -> None:
    whole = make(4) + make(4, first=20)
    samples = Samples([part_of(whole[:4]), part_of(whole[4:])])
    some = samples.take([1, 3, 4, 7])
    assert list(some) == [whole[i] for i in (1, 3, 4, 7)]
    assert list(some.take([0, 2])) == [whole[1], whole[4]]
    assert some.lengths.tolist() == [2, 4, 1, 4]
    assert list(samples.take([])) == []
    assert len(Samples()) == len(Samples().lengths) == 0


def test_the_digest_changes_with_any_token_label_length_or_order() -> None:
    samples = [Sample([1, 2, 3], [-100, 2, 3]), Sample([4], [-100]), Sample([5, 6], [-100, 6])]
    digest = Samples.of(samples).digest
    assert Samples.of(list(samples)).digest == digest
    others = [
        [Sample([1, 2, 9], [-100, 2, 3]), *samples[1:]],
        [Sample([1, 2, 3], [-100, 2, -100]), *samples[1:]],
        [Sample([1, 2], [-100, 2]), Sample([3, 4], [3, -100]), samples[2]],
        samples[::-1],
        samples[:2],
    ]
    found = {Samples.of(other).digest for other in others}
    found |= {Samples.of(samples).take([0, 1]).digest, Samples.of(samples).take([0, 2]).digest}
    assert len(found | {digest}) == len(others) + 3


def test_what_is_written_is_what_is_mapped(tmp_path: Path) -> None:
    samples = [*make(3), Sample([], []), Sample([2**31 - 1], [-100])]
    with TokenWriter(tmp_path) as writer:
        writer.add(samples[:2], [0, 1])
        writer.add([], [])
        writer.add(samples[2:], range(2, len(samples)))
        hashes = writer.finish()
    part = map_folder(tmp_path, hashes)
    assert list(Samples([part])) == samples
    assert part.digest == part_of(samples).digest


def test_files_without_a_name_leave_nothing_behind(tmp_path: Path) -> None:
    with TokenWriter(None, near=tmp_path) as writer:
        writer.add(make(3), range(3))
        part = writer.mapped()
    assert list(tmp_path.iterdir()) == []
    assert list(Samples([part])) == make(3)
    assert part.digest == part_of(make(3)).digest


def test_no_samples_at_all_can_be_written_and_read(tmp_path: Path) -> None:
    with TokenWriter(tmp_path) as writer:
        hashes = writer.finish()
    assert list(Samples([map_folder(tmp_path, hashes)])) == []


def test_samples_that_were_read_may_be_changed(tmp_path: Path) -> None:
    with TokenWriter(tmp_path) as writer:
        writer.add(make(3), range(3))
        samples = Samples([map_folder(tmp_path, writer.finish())])
    samples[2].input_ids[:] = 7
    samples[2].labels[:] = 7
    assert samples[2] == make(3)[2]
