import time

import pytest

from roundpipe.finetune.run.busy import BusyMeter
from roundpipe.plan.timeline import Span


def test_it_is_the_share_of_the_time_since_it_was_last_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    spans = [(99.0, 101.0), (102.0, 103.0), (103.5, 109.0)]

    def timeline() -> list[Span]:
        return [Span("0.compute", None, start, end) for start, end in spans]  # type: ignore[arg-type]

    meter = BusyMeter(timeline, num_devices=2)
    assert meter.share() is None
    now[0] = 104.0  # 1 s of the first, all of the second, 0.5 s of the third, on two devices
    assert meter.share() == pytest.approx(2.5 / 8)
    now[0] = 104.1
    assert meter.share() == pytest.approx(2.5 / 8)  # too little time to say anything new
    meter.skip()
    now[0] = 105.1
    assert meter.share() == pytest.approx(0.5)
