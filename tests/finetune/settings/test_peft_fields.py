"""Starts that give another model when the adapter is loaded, or no start at all, are refused."""

from __future__ import annotations

from typing import Any

import pytest

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.config import make_config
from roundpipe.finetune.settings.peft_fields import why_not_loaded, why_not_trained

TRAINED = (
    ({"init_lora_weights": "pissa_niter_4"}, "drawn anew each time.*\nhint: .*: pissa takes"),
    ({"init_lora_weights": "eva"}, "starts from data that peft has to see"),
    ({"init_lora_weights": "lora_ga"}, "starts from data that peft has to see"),
    ({"init_lora_weights": "corda"}, "starts from data that peft has to see"),
    ({"init_lora_weights": "mica"}, "freezes a half of the adapter"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: the adapter would have no part"),
)


@pytest.mark.parametrize(("fields", "told"), TRAINED)
def test_what_would_silently_be_another_adapter_is_not_trained(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=f"peft: (init_lora_weights: .*)?{told}"):
        make_config({"model_name_or_path": "tiny", "dataset": "data.jsonl", "peft": fields})


@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", "pissa", "olora", None])
def test_starts_that_can_be_made_again_are_trained_and_loaded(start: Any) -> None:
    assert why_not_trained({"init_lora_weights": start}) is None
    assert why_not_loaded({"init_lora_weights": start, "alora_invocation_tokens": None}) is None


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"init_lora_weights": "pissa_niter_16"}, "over another base than the files hold"),
        ({"init_lora_weights": "lora_ga"}, "over another base than the files hold"),
        ({"alora_invocation_tokens": [5]}, "no part in any token here\nhint: use it with peft"),
    ],
)
def test_an_adapter_whose_base_nobody_can_make_again_is_not_loaded(
    fields: dict[str, Any], told: str
) -> None:
    assert told in str(why_not_loaded(fields))
    # its half that comes from data is in the files, and the base is as it was
    assert why_not_loaded({"init_lora_weights": "eva"}) is None
    assert why_not_loaded({"init_lora_weights": "mica"}) is None
