"""What a forecast says of itself, in words and in JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe.report.forecast import (
    Cell,
    Duration,
    Forecast,
    Hint,
    ModelTable,
    Need,
    Pace,
    Reasons,
)
from roundpipe.report.forecast_text import (
    duration_text,
    forecast_lines,
    number,
    seconds_text,
    short_length,
    table_lines,
)

GB = 10**9
PACE = Pace(
    tokens_per_second=4873.2,
    step_seconds=53.79,
    busy=0.992,
    bound="compute (bf16, fp32 accumulate)",
    schedule="round_robin",
    micro_batch_size=2,
    microbatches=64,
    rounds=1,
    stages_forward=(range(4), range(4, 8), range(8, 10)),
    stages_fused=range(10, 12),
    stages_backward=(range(9, 10), range(5, 9), range(5)),
    alternatives=(("hybrid", 54.5), ("replicated", 60.0)),
)
FITS = Forecast(
    title="Qwen3-32B · full fine-tuning",
    needs=(
        Need("gpu", "device memory", 19 * GB, 24 * GB, "largest: head"),
        Need("host", "host memory", 500 * GB, 512 * GB, "16 B per parameter"),
        Need("disk", "disk", 1400 * GB, None, "result 65 GB"),
    ),
    bytes={"device": 1, "pinned_host": 2, "pageable_host": 3, "disk": 4},
    longest=31_700,
    longest_known=40_960,
    pace=PACE,
    duration=Duration(1240, 66_600, "3 epochs of my.jsonl", "13,226 samples"),
)
LACKS = replace(
    FITS,
    needs=(FITS.needs[0], replace(FITS.needs[1], needs=524 * GB)),
    hints=(Hint("finetuning_type=lora", "71 GB"), Hint("batch_size=64")),
)


def test_one_screen_with_the_figures_in_columns() -> None:
    assert forecast_lines(FITS) == [
        "Qwen3-32B · full fine-tuning",
        "",
        "                 needs      has",
        "  gpu            19 GB      24 GB      ok        largest: head",
        "  host           500 GB     512 GB     ok        16 B per parameter",
        "  disk           1.4 TB     ?          ?         result 65 GB",
        "",
        "  speed          4,870 tokens/s · 53.8 s per step · busy 99 % · bound by compute "
        "(bf16, fp32 accumulate)",
        "  plan           64 microbatches: micro_batch_size=2 · round-robin, 3 stages forward, "
        "4 backward",
        "  your job       1,240 steps · 3 epochs of my.jsonl · 18 h 30 min (13,226 samples)",
        "  longest        31,700 tokens at one sequence per microbatch",
    ]


def test_the_verdict_comes_last_with_ready_hints() -> None:
    assert forecast_lines(LACKS)[-2:] == [
        "does not fit: host memory, 524 of 512 GB",
        "  hint: finetuning_type=lora (71 GB), or batch_size=64",
    ]
    assert (LACKS.fits, LACKS.limit) == (False, "host memory")
    assert (FITS.fits, FITS.limit) == (True, PACE.bound)


def test_two_units_are_told_apart_and_three_digits_never_hide_a_lack() -> None:
    needs = (
        replace(FITS.needs[0], needs=2240 * GB, has=512 * GB),
        replace(FITS.needs[1], needs=512 * GB + 10**7, has=512 * GB),
    )
    assert forecast_lines(replace(FITS, needs=needs))[-1] == (
        "does not fit: device memory, 2.24 TB of 512 GB · host memory, 512.01 of 512.00 GB"
    )


def test_a_job_that_no_device_holds_has_no_pace() -> None:
    needs = (replace(FITS.needs[0], needs=30 * GB),)
    lines = forecast_lines(replace(FITS, needs=needs, pace=None, longest=0), why=True)
    assert not any(line.startswith("  speed") for line in lines)
    assert "  longest        no sequence fits" in lines
    assert replace(FITS, needs=needs, pace=None).limit == "device memory"


def test_a_length_beyond_the_models_own_is_said() -> None:
    lines = forecast_lines(replace(FITS, longest=50_000))
    assert lines[-1].endswith("per microbatch (the model was made for 40,960)")


def test_why_adds_stages_schedules_bubble_and_critical_path() -> None:
    reasons = Reasons(4900.0, {"transfers": 0.006, "Python": 0.0}, {"forward": 0.75, "fused": 0.25})
    text = "\n".join(forecast_lines(replace(FITS, reasons=reasons), why=True))
    assert "forward   layers 0–7 as 2 × 4, 8–9" in text
    assert "fused     layers 10–11: forward, loss and backward in one" in text
    assert "backward  layers 9, 5–8, 0–4" in text
    assert "(0 is the embedding, 11 the head)" in text
    assert "round-robin 53.8 s · hybrid 54.5 s (+1 %) · replicated 60 s (+12 %)" in text
    assert "bubble         0.8 % of device time, waiting for transfers 0.6 %\n" in text
    assert "critical path  forward 75.0 % · fused 25.0 %" in text
    assert "ceiling        4,900 tokens/s" in text


def test_replicas_are_said_in_few_words() -> None:
    def copies(*count: int) -> str:
        pace = replace(PACE, replicas=count)
        lines = forecast_lines(replace(FITS, pace=pace), why=True)
        return next(line for line in lines if "the embedding" in line).partition("head)")[2]

    assert copies(1, 1, 1) == ""
    assert copies(8, 8, 8) == "; every stage on 8 devices at once"
    assert copies(4, 8, 2) == "; devices at once: forward 4, fused 8, backward 2"


def test_notes_stand_first() -> None:
    assert forecast_lines(replace(FITS, notes=("a note",)))[0] == "· a note"


def test_json_has_exactly_the_promised_keys() -> None:
    values = FITS.as_values()
    assert list(values) == [
        "fits",
        "tokens_per_second",
        "step_seconds",
        "bubble_percent",
        "max_length",
        "schedule",
        "microbatches",
        "rounds",
        "stages_forward",
        "stages_backward",
        "bytes",
        "limit",
        "alternatives",
    ]
    assert values["bubble_percent"] == pytest.approx(0.8)
    assert values["stages_forward"] == [[0, 3], [4, 7], [8, 9]]
    assert values["stages_backward"] == [[10, 11], [9, 9], [5, 8], [0, 4]]
    assert values["alternatives"][0] == {"schedule": "hybrid", "step_seconds": 54.5}
    nothing = replace(FITS, pace=None).as_values()
    assert list(nothing) == list(values)
    assert nothing["tokens_per_second"] is None


def test_a_table_is_aligned_and_says_what_is_missing() -> None:
    table = ModelTable(
        "2 × RTX 3090",
        2048,
        ("full", "LoRA"),
        (
            ("SmolLM2-135M", (Cell(35_000, 209_000.0), Cell(900, 12.34))),
            ("Qwen3-32B", (Cell(missing=(("host", 12 * GB), ("gpu", GB))), Cell(9800, 3880))),
        ),
    )
    assert table_lines(table)[:5] == [
        "2 × RTX 3090",
        "",
        "                 full            LoRA",
        "  SmolLM2-135M   35k · 209,000   900 · 12.3",
        "  Qwen3-32B      +12 GB host     9.8k · 3,880",
    ]
    first, *_, last = table.as_values()["models"]
    assert first["max_length"] == 35_000
    assert (last["method"], last["fits"], last["missing"]) == ("LoRA", True, {})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "1 s"),
        (59.6, "1 min"),
        (66_600, "18 h 30 min"),
        (3600, "1 h"),
        (90_000, "1 d 1 h"),
        (86_400 * 400, "400 d"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (4873.2, 209_432, 412.3, 8.886, 0.123456)] == [
        "4,870",
        "209,000",
        "412",
        "8.89",
        "0.123",
    ]
    assert [seconds_text(value) for value in (53.79, 191.2, 0.0068)] == [
        "53.8 s",
        "191 s",
        "6.8 ms",
    ]
    assert [short_length(value) for value in (950, 9_807, 34_842)] == ["950", "9.8k", "35k"]
