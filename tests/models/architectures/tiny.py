"""The catalogue of architectures, and tiny models made from its rows.

A row of ``catalogue.yaml`` holds what is special to one architecture. All others of its sizes come
from the tables ``small`` and ``small_tower`` there: whichever of their fields a configuration has.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import torch
import yaml

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One architecture: how its tiny model is made, and what is expected of it."""

    name: str
    group: str
    type: str = ""  # model_type of transformers, if it is not the name
    settings: dict = dataclasses.field(default_factory=dict)
    multimodal: bool = False
    shows: str = ""  # what is special about it
    spread: bool = False  # part of every test run
    refused: str = ""  # what the refusal says
    skip: dict = dataclasses.field(default_factory=dict)  # a comparison -> why it is not made
    close: str = ""  # why no more than close, where bits are not to be had
    all_labels: bool = False  # the loss reads the first label too: nothing is shifted

    @property
    def model_type(self):
        return self.type or self.name


@cache
def catalogue():
    """The tables and the rows, by name."""
    read = yaml.safe_load((FOLDER / "catalogue.yaml").read_text())
    rows = {}
    for group, members in read["groups"].items():
        for name, given in members.items():
            assert name not in rows, name
            rows[name] = Row(name, group, **(given or {}))
    return read, rows


def make_model(row, **more):
    """The tiny model of a row with fixed weights, in training mode."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = make_config(CONFIG_MAPPING[row.model_type], {**row.settings, **more}, "small")
    stand_in_for_missing(row)
    maker = AutoModelForImageTextToText if row.multimodal else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return maker.from_config(config).train()


def stand_in_for_missing(row):
    """Let transformers build, and run on text, what it cannot as it is.

    A tower that needs the timm library, which no test has: text never reaches it. An output that
    Llama 4 asks its text model for, and that this one has not (transformers 5.24).
    """
    if row.name == "gemma3n":
        from transformers import AutoModel, Gemma3nVisionConfig

        AutoModel.register(Gemma3nVisionConfig, tower_of(Gemma3nVisionConfig), exist_ok=True)
    if row.name == "llama4":
        from transformers.modeling_outputs import MoeCausalLMOutputWithPast

        MoeCausalLMOutputWithPast.image_outputs = None


def tower_of(config_class):
    """A model class with one matrix."""
    from transformers import PreTrainedModel

    class Tower(PreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.only = torch.nn.Linear(4, config.hidden_size)
            self.post_init()

    Tower.config_class = config_class
    return Tower


def make_config(kind, settings, table):
    """A configuration of class ``kind``; ``settings`` may hold dicts for the parts of it.

    A part without ``model_type`` is of the class that it is by default; a setting of ``null``
    leaves the part out, one of ``default`` leaves the field as its class has it.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    parts = getattr(kind, "sub_configs", {})
    given = {name: v for name, v in catalogue()[0][table].items() if name in known}
    given |= {name: value for name, value in settings.items() if name not in parts}
    given = {name: value for name, value in given.items() if value != "default"}
    for name, declared in parts.items():
        wanted = settings.get(name, {})
        part = None if wanted is None else class_of_part(kind, name, declared, wanted)
        if part is not None:
            inner = {key: value for key, value in wanted.items() if key != "model_type"}
            is_text = name in ("text_config", "decoder")
            given[name] = make_config(part, inner, "small" if is_text else "small_tower")
    return kind(**given)


def class_of_part(kind, name, part, wanted):
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "model_type" in wanted:
        return CONFIG_MAPPING[wanted["model_type"]]
    if part is not AutoConfig:
        return part
    default = getattr(kind(), name, None)
    return None if default is None else type(default)


def make_batch(size=5, length=13):
    """Padded on the left, on the right, and not at all; some tokens are not trained."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 60, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[3, -3:] = 0
    off = torch.rand(ids.shape, generator=generator) < 0.2
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(off | (mask == 0), -100),
    }
