"""Every causal LM of transformers that generates gives the plain model's tokens."""

from __future__ import annotations

import copy

import pytest
import torch

import roundpipe
from roundpipe.engine.generation import generate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.accept]

NEW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def prompts():
    """Three prompts, two of them padded left."""
    ids = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, :1] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def test_an_architecture_generates_the_plain_models_tokens(row, tiny_models):
    if row.refused:
        pytest.skip(f"cannot be wrapped: {row.refused}")
    model = tiny_models.make_model(row)
    plain = copy.deepcopy(model).eval()
    try:
        expected = plain.generate(**prompts(), **NEW)
    except Exception as error:
        pytest.skip(f"the plain model does not generate: {type(error).__name__}: {error}")
    with roundpipe.RoundPipe(model, devices="cpu") as pipe:
        resident = pipe.generate(**prompts(), **NEW)
        streamed = generate(
            pipe._engine,
            (),
            {**prompts(), **NEW},
            device_bytes=0,
            newest=False,
            output_device=torch.device("cpu"),
        )
        assert pipe._pool.devices[0].allocated_bytes == 0
    assert torch.equal(resident, expected)
    assert torch.equal(streamed, expected)
