"""Every causal LM of transformers, and multimodal ones on text, equal the plain model."""

from __future__ import annotations

import pytest
import torch

import roundpipe

# What transformers itself warns of: old names, kernels that are not installed.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def _one_thread():
    """The same sums whatever runs them: each CPU device gets one thread, the plain loop too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_an_architecture_equals_the_plain_model_or_is_refused(
    row, tiny_models, comparing, found_before, record, request
):
    model = tiny_models.make_model(row)
    if row.refused:
        with pytest.raises(roundpipe.RoundPipeError, match=type(model).__name__) as refusal:
            comparing.wrap(model, 1)
        said = str(refusal.value)
        assert row.refused in said
        assert "\nhint: " in said
        entry = {"class": type(model).__name__, "refused": row.refused}
    else:
        found = comparing.compare(row, tiny_models.make_model, tiny_models.make_batch())
        told = {"bits", "close", None, *row.skip.values()}
        assert {name: result for name, result in found.items() if result not in told} == {}
        entry = {
            "class": type(model).__name__,
            "tied": sorted(comparing.shared_by_several(model)),
            "compared": found,
        }
    record(row.name, entry)
    if not request.config.getoption("--update-golden"):
        assert found_before.get(row.name) == entry, "what is compared changed: --update-golden"
