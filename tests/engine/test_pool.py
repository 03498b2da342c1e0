from __future__ import annotations

import gc
import threading
import weakref

import pytest

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.fake import FakeDevice
from roundpipe.engine import pool as pool_module
from roundpipe.engine.pool import RESULTS, DevicePool
from roundpipe.engine.program import HOST
from roundpipe.errors import DeviceError


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
