from __future__ import annotations

import gc
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from tests.engine.late_device import LateDevice

import roundpipe
from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.engine import pool as pool_module
from roundpipe.engine.pool import RESULTS, DevicePool
from roundpipe.engine.program import HOST
from roundpipe.errors import DeviceError
from roundpipe.store.pages import PAGE


def our_threads():
    return {t.name for t in threading.enumerate() if t.name.startswith("roundpipe")}


def test_a_pool_has_a_thread_for_each_device_the_host_and_the_results():
    with DevicePool("cpu*2") as pool:
        assert [device.name for device in pool.devices] == ["cpu:0", "cpu:1"]
        assert our_threads() == {
            f"roundpipe {name} worker" for name in ("device 0", "device 1", "host", "results")
        }
        assert pool.device(1) is pool.devices[1]
        assert pool.device(HOST) is pool.device(RESULTS) is pool.host
        assert repr(pool) == "DevicePool(['cpu:0', 'cpu:1'])"
    assert our_threads() == set()


def test_a_device_that_cannot_be_used_is_refused_before_any_thread_starts():
    with pytest.raises(DeviceError):
        DevicePool("no such device")
    assert our_threads() == set()


def test_beside_fake_devices_the_host_is_one_of_them(rig):
    def fail(_label):
        return None

    with DevicePool(rig.fakes(2, fail=fail, watch=True)) as pool:
        assert isinstance(pool.host, FakeDevice)
        assert pool.host.ledger is pool.devices[0].ledger
        assert pool.host.fail is fail
        assert pool.host.watch_storage


def test_beside_cpu_devices_the_host_computes_with_one_thread():
    with DevicePool([CpuDevice("a", threads=3)]) as pool:
        assert pool.host.threads == 1


def test_beside_cards_the_host_has_cores_of_its_own_whatever_the_launcher_set(monkeypatch):
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 12)
    card = SimpleNamespace(torch_device=torch.device("cuda:0"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        host = pool_module._host_for([card])
        seen = []
        host.launch("x", lambda: seen.append(torch.get_num_threads()))
        host.close()
        assert seen == [10]
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_pool_page_locks_host_memory_up_to_its_limit_and_unlocks_it_at_the_end():
    device = FakeDevice(pinned_bytes=1 << 40)
    with DevicePool([device], pinned_memory_limit=2 * PAGE) as pool:
        kept = [pool.pages.allocate(PAGE, urgent=True) for _ in range(3)]
        assert [pool.pages.is_locked(each) for each in kept] == [True, True, False]
    assert device.registered == {}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such call")
def test_the_thread_of_a_card_stays_on_the_cores_near_it(monkeypatch):
    cores = os.sched_getaffinity(0)
    near, seen = {max(cores)}, {}
    monkeypatch.setattr(pool_module, "CudaDevice", CpuDevice)
    monkeypatch.setattr(pool_module, "card_facts", lambda device: SimpleNamespace(bus="a place"))
    monkeypatch.setattr(
        pool_module, "cores_near", lambda bus: frozenset(near) if bus == "a place" else frozenset()
    )
    with DevicePool("cpu") as pool:
        for name in (0, HOST):
            pool.worker(name).put(lambda name=name: seen.update({name: os.sched_getaffinity(0)}))
    assert seen == {0: near, HOST: cores}


def test_what_was_put_before_the_end_is_run():
    ran = []
    with DevicePool("cpu") as pool:
        for name in (0, HOST, RESULTS):
            pool.worker(name).put(lambda name=name: ran.append(name))
            pool.device(name).launch("x", lambda name=name: ran.append(name))
    assert sorted(ran) == sorted([0, HOST, RESULTS] * 2)


def test_closing_twice_is_closing_once():
    pool = DevicePool("cpu")
    assert not pool.is_closed
    pool.close()
    assert pool.is_closed
    pool.close()
    with pytest.raises(DeviceError, match="device is closed"):
        pool.devices[0].launch("compute", lambda: None)


def test_a_pool_that_is_dropped_ends_its_threads():
    pool = DevicePool("cpu*2")
    pool.devices[0].launch("compute", lambda: None)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert our_threads() == set()


def test_what_hangs_is_left_behind_after_one_time_for_all_of_it(monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "_CLOSE_SECONDS", 0.2)
    pool, gate = DevicePool("cpu*3"), threading.Event()
    for device in pool.devices:
        device.launch("compute", gate.wait, label="F0.0")
    for name in (0, 1, 2, HOST):
        pool.worker(name).put(gate.wait)
    timer = threading.Timer(30, gate.set)  # so that a failure of this test ends, too
    timer.start()
    pool.close()
    assert not gate.is_set()
    assert "left behind at close: roundpipe cpu:0 compute" in caplog.text
    gate.set()
    timer.cancel()


def test_a_device_that_fails_to_end_does_not_keep_the_others_from_ending():
    def fails():
        raise ZeroDivisionError("nobody was told")

    pool = DevicePool("cpu*2", pinned_memory_limit=0)
    for device in pool.devices:
        device.launch("x", fails)
    with pytest.raises(ZeroDivisionError):
        pool.close()
    assert our_threads() == set()
    for device in pool.devices:
        with pytest.raises(DeviceError):
            device.launch("x", fails)


def test_a_closed_model_leaves_only_its_weights_locked_in_a_pool_that_goes_on():
    device = LateDevice()
    locked = device.registrar.registered
    with DevicePool([device]) as pool:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        ours = roundpipe.RoundPipe(model, pool=pool)
        device.passing = ours._engine.models[0].staging._passing
        x = torch.randn(4, 8)
        ours.forward_backward((x,), label=x, loss_fn=torch.nn.functional.mse_loss)
        ours.synchronize()
        stays = {layer.weights.buffer.data_ptr() for layer in ours._layers}
        stays |= {layer.gradients(partial_sums=False).buffer.data_ptr() for layer in ours._layers}
        assert set(locked) > stays
        (run,) = ours._chain.making.runs
        held = {loss.untyped_storage().data_ptr() for loss in run.losses}
        ours.close()
        assert set(locked) == stays | held
