"""A model that is packed in memory is the one that loading packs, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tests.models.loading_cases import save
from transformers.utils import logging as transformers_logging

from roundpipe import RoundPipe
from roundpipe.errors import ModelError
from roundpipe.models.loading.load import open_causal_lm
from roundpipe.models.loading.pack_model import pack_model
from roundpipe.store.frozen import packed_in


@pytest.fixture(autouse=True)
def _no_bars():
    """Bars run a thread that outlives a test."""
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_it_is_packed_as_files_are(tmp_path, kind):
    save(tmp_path, kind)
    loaded = open_causal_lm(tmp_path, quantization="nf4").load()
    model = open_causal_lm(tmp_path).load().model
    bases = pack_model(model)
    expected = packed_by_name(loaded.model, loaded.bases)
    found = packed_by_name(model, bases)
    assert len(bases) == 2
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].unpack(), expected[name].unpack()) for name in expected)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name not in found)
        if name in found:
            assert parameter.untyped_storage().nbytes() == parameter.element_size()


def packed_by_name(model, bases):
    packed = packed_in(bases)
    return {name: packed[p] for name, p in model.named_parameters() if p in packed}


def test_what_is_packed_runs(tmp_path):
    save(tmp_path, "llama")
    loaded = open_causal_lm(tmp_path, quantization="nf4").load()
    model = open_causal_lm(tmp_path).load().model.requires_grad_(False)
    ids = torch.arange(8)[None] + 3
    outputs = []
    for each, bases in ((loaded.model, loaded.bases), (model, pack_model(model))):
        with RoundPipe(each.requires_grad_(False), devices="cpu", bases=bases) as pipe:
            outputs.append(pipe(input_ids=ids).logits)
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(*outputs)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError):
        pack_model(torch.nn.Linear(64, 64))
