"""Noise on embeddings: what it is, who draws it, and where it is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.integrations.neftune import neftune_post_forward_hook

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.random import layer_seed
from roundpipe.errors import ModelError
from roundpipe.finetune.model.neftune import add_neftune, noise_bound
from roundpipe.optim import AdamW
from roundpipe.roundpipe import RoundPipe

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

# peft 0.21 asks transformers 5.24 for a name that is about to go
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

SEED, ALPHA = 7, 5.0


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 256, (6, 11), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def lora(model: Any) -> Any:
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def run(
    model: Any, *, devices: str = "cpu", noise: bool = True, skip: int = 0, steps: int = 3
) -> tuple[list[float], float]:
    """The losses of steps, and that of an evaluation after them."""
    handle = add_neftune(model.train(), ALPHA) if noise else None
    losses = []
    config = RoundPipeRunConfig(num_microbatch=3)
    with RoundPipe(model, devices=devices, seed=SEED) as trainer:
        trainer._num_calls.made = skip
        optimizer = AdamW(trainer.optim_parameters(), lr=1e-2)
        for _ in range(steps - skip):
            losses.append(float(trainer.forward_backward(input_kwargs=batch(), run_config=config)))
            trainer.step(optimizer)
        trainer.eval()
        with torch.no_grad():
            held = trainer(**batch(), roundpipe_run_config=RoundPipeRunConfig(loss_only=True))
    if handle is not None:
        handle.remove()
    return losses, float(held.loss)


def plain(model: Any) -> tuple[list[float], float]:
    """The same in plain PyTorch, each microbatch with the noise of its own seed."""
    handle, losses = add_neftune(model.train(), ALPHA), []
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.01
    )
    given = batch()
    tokens = torch.tensor((given["labels"][:, 1:] != -100).sum())
    for step in range(3):
        total = 0.0
        for microbatch in range(3):
            rows = slice(2 * microbatch, 2 * microbatch + 2)
            part = {name: tensor[rows] for name, tensor in given.items()}
            torch.manual_seed(layer_seed(SEED, step, 0, microbatch))
            loss = model(**part, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        held = model.eval()(**given).loss.item()
    handle.remove()
    return losses, held


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_any_number_of_devices_trains_as_plain_pytorch_does_with_the_same_noise(
    tiny: ModuleType, kind: str
) -> None:
    def make() -> Any:
        model = tiny.tiny_model(tied=kind != "untied")
        return lora(model) if kind == "lora" else model

    losses, held = run(make(), devices="cpu*3" if kind == "tied" else "cpu*2")
    expected, expected_held = plain(make())
    assert losses == pytest.approx(expected, rel=1e-6)
    assert held == pytest.approx(expected_held, rel=1e-5)
    if kind == "tied":
        assert run(make()) == (losses, held)
        assert losses[:1] != run(make(), noise=False, steps=1)[0]


def test_noise_hangs_on_the_step_so_that_a_resumed_run_draws_the_same(tiny: ModuleType) -> None:
    (last,), _ = run(tiny.tiny_model(), skip=2)
    (other,), _ = run(tiny.tiny_model(), skip=1, steps=2)
    assert last != other  # the same weights, another step's noise


def test_it_is_the_noise_of_transformers(tiny: ModuleType) -> None:
    model, ids = tiny.tiny_model().train(), batch()["input_ids"]
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = ALPHA
    theirs = embedding.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(3)
    expected = embedding(ids)
    theirs.remove()
    ours = add_neftune(model, ALPHA)
    torch.manual_seed(3)
    found = embedding(ids)
    ours.remove()
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)
    noise = found - embedding(ids)
    assert noise_bound(found, ALPHA) == ALPHA / math.sqrt(11 * 32)
    assert noise.abs().max() <= noise_bound(found, ALPHA)
    assert noise.abs().max() > 0.9 * noise_bound(found, ALPHA)


def test_nothing_is_left_of_it_in_evaluation_nor_once_it_is_removed(tiny: ModuleType) -> None:
    model, ids = tiny.tiny_model(), batch()["input_ids"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    quiet = model.get_input_embeddings()(ids)
    handle = add_neftune(model, ALPHA)
    assert torch.equal(model.eval().get_input_embeddings()(ids), quiet)
    handle.remove()
    assert torch.equal(model.train().get_input_embeddings()(ids), quiet)
    assert model.state_dict().keys() == before.keys()
    assert "neftune" not in model.config.to_json_string()


def test_copies_that_only_tell_arguments_draw_nothing(tiny: ModuleType) -> None:
    model = tiny.tiny_model()
    before = torch.random.get_rng_state()
    run(model, skip=2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_that_does_not_say_what_embeds_is_refused() -> None:
    with pytest.raises(ModelError, match="neftune_noise_alpha: Linear does not say"):
        add_neftune(torch.nn.Linear(2, 2), ALPHA)
