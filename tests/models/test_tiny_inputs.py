"""The input on which a model is learned holds nothing that means more than a word."""

from __future__ import annotations

import torch

from roundpipe.models.tiny_inputs import special_ids, tiny_inputs


class Within:
    def __init__(self, **values):
        self.__dict__.update(values)

    def to_diff_dict(self):
        return vars(self)


class Model:
    def __init__(self, config):
        self.config = config


class Plain:
    vocab_size = 32
    pad_token_id = 5


def test_it_is_padded_and_holds_no_padding_token_elsewhere():
    inputs = tiny_inputs(Model(Plain())).kwargs
    assert inputs["attention_mask"].min() == 0
    assert inputs["attention_mask"].sum(1).min() > 0
    assert (inputs["input_ids"] != Plain.pad_token_id).all()
    assert ((inputs["labels"] == -100) == (inputs["attention_mask"] == 0)).all()


def test_special_ids_are_found_in_every_config_within():
    text = Within(pad_token_id=0, eos_token_id=[1, 106], vocab_size=64)
    config = Within(image_token_id=7, boi_token_index=None, text_config=text, token_ids_seen=9)
    assert special_ids(config) == {0, 1, 106, 7}


def test_no_special_id_is_in_it_however_many_there_are():
    config = Within(vocab_size=8, image_token_id=5, eos_token_id=[0, 1, 2, 3, 4], video_token_id=6)
    assert set(tiny_inputs(Model(config)).kwargs["input_ids"].flatten().tolist()) == {7}


def test_a_vocabulary_of_nothing_but_special_ids_still_gives_an_input():
    config = Within(vocab_size=2, pad_token_id=0, eos_token_id=1)
    assert tiny_inputs(Model(config)).kwargs["input_ids"].shape == torch.Size((2, 8))
