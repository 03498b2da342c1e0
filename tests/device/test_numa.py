"""Memory nodes, read from invented files of the kernel; the call itself on this machine's."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from roundpipe.device.numa import cores_near, interleave, node_mask, nodes_to_spread_over, stay_on

if TYPE_CHECKING:
    from pathlib import Path

BUS = "0000:41:00.0"


def node(root: Path, index: int, cores: str, kilobytes: int = 1024) -> None:
    folder = root / f"sys/devices/system/node/node{index}"
    folder.mkdir(parents=True)
    (folder / "meminfo").write_text(f"Node {index} MemTotal:       {kilobytes} kB\n")
    (folder / "cpulist").write_text(cores + "\n")


def card(root: Path, at_node: int) -> None:
    folder = root / "sys/bus/pci/devices" / BUS
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{at_node}\n")


def test_memory_is_spread_over_all_nodes_that_have_some(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3")
    node(tmp_path, 2, "", kilobytes=0)
    node(tmp_path, 3, "4-7")
    assert nodes_to_spread_over(tmp_path) == (0, 3)


@pytest.mark.parametrize("count", [0, 1])
def test_on_one_node_or_none_there_is_nothing_to_spread_over(tmp_path: Path, count: int) -> None:
    for index in range(count):
        node(tmp_path, index, "0-3")
    assert nodes_to_spread_over(tmp_path) == ()
    assert not interleave(0, mmap.PAGESIZE, ())


def test_a_mask_has_one_bit_a_node_in_words_of_the_kernel() -> None:
    assert node_mask([0, 3]) == [0b1001]
    assert node_mask([1, 64, 130]) == [2, 1, 4]


def test_the_kernel_takes_the_mask_and_keeps_what_is_written() -> None:
    mapping = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    tensor.fill_(5)
    for nodes in ([0], [0, 999]):  # one there is, and one more there is not
        interleave(tensor.data_ptr(), tensor.numel(), nodes)
        assert bool((tensor == 5).all())
    assert not interleave(tensor.data_ptr() + 1, mmap.PAGESIZE, [0])  # not a page


def test_threads_stay_on_the_cores_of_the_cards_node(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3")
    node(tmp_path, 1, "4-7,12")
    card(tmp_path, 1)
    assert cores_near(BUS, tmp_path) == {4, 5, 6, 7, 12}
    assert cores_near("0000:99:00.0", tmp_path) == frozenset()


def test_on_one_node_every_core_is_near(tmp_path: Path) -> None:
    node(tmp_path, 0, "0-3")
    card(tmp_path, 0)
    assert cores_near(BUS, tmp_path) == frozenset()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such call")
def test_only_the_calling_thread_stays_and_only_where_it_may_be() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    seen = []

    def move() -> None:
        seen.append((stay_on({one, 10**5}), os.sched_getaffinity(0)))
        seen.append((stay_on({10**5}), os.sched_getaffinity(0)))
        seen.append((stay_on(set()), os.sched_getaffinity(0)))

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert seen == [(True, {one}), (False, {one}), (False, {one})]
    assert os.sched_getaffinity(0) == allowed
