"""The table of cards: figures against each other, and names as people and drivers write them."""

from __future__ import annotations

import pytest

from roundpipe.errors import ConfigError
from roundpipe.plan.card_table import Kind
from roundpipe.plan.cards import card_models, card_named, find_card, guessed_card, nearest_cards

GIB = 2**30


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("4090-48gb", "RTX 4090 48GB"),
        ("3060", "RTX 3060 12GB"),
        ("3060-8GB", "RTX 3060 8GB"),
        ("3080ti", "RTX 3080 Ti"),
        ("2080 Ti", "RTX 2080 Ti"),
        ("4060ti16gb", "RTX 4060 Ti 16GB"),
        ("4060 ti 16 GB", "RTX 4060 Ti 16GB"),
        ("a100", "A100 80GB"),
        ("a100-80", "A100 80GB"),
        ("a100-40", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A800-SXM4-80GB", "A800 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h100 sxm", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("rtxa6000", "RTX A6000"),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 8000", "Quadro RTX 8000"),
        ("NVIDIA TITAN RTX", "Titan RTX"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            "RTX PRO 6000 Blackwell Max-Q",
        ),
        ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("7900xt", "RX 7900 XT"),
    ],
)
def test_a_card_is_known_by_what_people_and_drivers_call_it(written: str, meant: str) -> None:
    assert card_named(written).name == meant


@pytest.mark.parametrize("model", list(card_models()), ids=lambda model: model.name)
def test_every_card_is_found_by_its_own_name_and_by_the_name_in_hints(model) -> None:
    assert find_card(model.name) == model
    assert any(find_card(near) == model for near in nearest_cards(model.name))


def test_the_memory_a_driver_tells_decides_between_variants() -> None:
    found = find_card("NVIDIA GeForce RTX 4060 Ti", memory_bytes=int(15.6 * GIB))
    assert found is not None
    assert found.name == "RTX 4060 Ti 16GB"
    found = find_card("NVIDIA GeForce RTX 4090", memory_bytes=int(47.5 * GIB))
    assert found is not None
    assert found.memory_gib == 48


@pytest.mark.parametrize(
    ("written", "near"),
    [("4095", "4090"), ("a100-60", "a100-80gb"), ("6000", "6000-ada"), ("h110", "h100")],
)
def test_an_unknown_card_names_the_nearest_ones(written: str, near: str) -> None:
    with pytest.raises(ConfigError, match="unknown card") as told:
        card_named(written)
    message, hint = str(told.value).split("\nhint: ")
    assert written in message
    assert near in hint.split(", ")
    for each in hint.split(", "):
        card_named(each)  # what is offered works


def test_words_that_are_no_card_are_none() -> None:
    assert find_card("") is None
    assert find_card("GeForce") is None
    assert find_card("Microsoft Basic Render Driver") is None


def test_a_4090_is_twice_as_fast_when_it_adds_in_fp16() -> None:
    sheet = card_named("4090").tflops
    assert sheet["bf16"] == sheet["fp16"] == pytest.approx(165, rel=0.01)
    assert sheet["fp16_fp16"] == pytest.approx(330, rel=0.01)
    work = card_named("4090").at_work().flops
    assert 1.4 < work["fp16_fp16"] / work["bf16"] < 2  # at the power limit it is not twice


def test_cards_of_data_centres_do_not_care_how_products_are_added() -> None:
    for name in ("a100", "h100", "h200", "a6000", "t4"):
        flops = card_named(name).at_work().flops
        assert flops["fp16"] == flops["fp16_fp16"]


def test_cards_have_the_arithmetics_of_their_generation() -> None:
    for model in card_models():
        before_ampere = model.kind in (Kind.TURING, Kind.TURING_PRO, Kind.VOLTA)
        assert ("bf16" in model.tflops) is not before_ampere, model
        assert ("tf32" in model.tflops) is (not before_ampere and model.kind is not Kind.AMD), model
        assert {"fp32", "fp16", "fp16_fp16"} <= model.tflops.keys()


def test_work_gets_less_than_the_sheet_says() -> None:
    for model in card_models():
        card = model.at_work()
        assert 0.85 * model.memory_gib * GIB < card.memory_bytes < model.memory_gib * GIB
        assert card.flops.keys() == model.tflops.keys()
        for key, rate in card.flops.items():
            assert 0.5 < rate / model.tflops[key] / 1e12 < 1, (model, key)
        assert 0.7 < card.bandwidth / model.gigabytes_per_second / 1e9 < 1


def test_the_memory_of_a_card_is_what_tensors_have_of_it() -> None:
    # A 4090 tells 23.6 GiB of its 24, an H200 140.4 of its 141; a context takes about half a GiB.
    assert 22.9 * GIB < card_named("4090").usable_bytes < 23.3 * GIB
    assert 137 * GIB < card_named("h200").usable_bytes < 140 * GIB


def test_every_row_is_of_a_size_that_cards_have() -> None:
    """A slipped digit or column shows here."""
    for model in card_models():
        assert 4 <= model.memory_gib <= 192, model
        assert 150 <= model.gigabytes_per_second <= 8000, model
        assert model.pcie in (3, 4, 5), model
        assert model.lanes in (8, 16), model
        assert 1 <= model.tflops["fp16_fp16"] / model.tflops["fp32"] <= 30, model
        # Operations a byte of memory: what makes a card balanced has not changed much.
        assert 30 < model.tflops["fp16"] * 1e3 / model.gigabytes_per_second < 500, model


def test_a_card_that_no_table_has_is_guessed_from_its_size() -> None:
    known = card_named("4090").at_work()
    guess = guessed_card("RTX 9090", memory_bytes=24 * GIB, multiprocessors=128)
    assert guess.memory_bytes == 24 * GIB
    assert guess.flops["bf16"] == pytest.approx(known.flops["bf16"], rel=0.5)
