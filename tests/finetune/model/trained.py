"""A model as a run prepares it, trained for some steps by the engine and by plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe import RoundPipe
from roundpipe.finetune.model.base_model import load_base
from roundpipe.finetune.model.methods import prepare_method
from roundpipe.finetune.model.source import locate_model
from roundpipe.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundpipe.finetune.model.base_model import BaseModel

RATE = 1e-2


def prepared(config: Any, lines: list[str] | None = None) -> tuple[BaseModel, Any]:
    """The base of a config, and what is trained of it."""
    source = locate_model(config.model_name_or_path)
    base = load_base(source, config.finetuning_type, dtype=torch.float32)
    said = [] if lines is None else lines
    return base, prepare_method(base, config, source, say=said.append)


def batches(count: int, vocabulary: int = 256) -> Iterator[torch.Tensor]:
    """Two batches in turn, so that something can be learned."""
    for index in range(count):
        generator = torch.Generator().manual_seed(index % 2)
        yield torch.randint(0, vocabulary, (4, 12), generator=generator)


def train_plainly(model: Any, steps: int, *, rate: float = RATE) -> list[float]:
    """An ordinary loop; the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for ids in batches(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(
    base: BaseModel, model: Any, steps: int, *, rate: float = RATE
) -> tuple[list[float], Any]:
    """The same by the engine: the losses, and the newest weights by name."""
    losses = []
    with RoundPipe(model, devices=["cpu"], bases=base.bases) as trainer:
        optimizer = AdamW(trainer.optim_parameters(), lr=rate, weight_decay=0.0)
        for ids in batches(steps):
            loss = trainer.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
            trainer.step(optimizer)
            losses.append(loss.item())
        trainer.synchronize()
        newest = {
            name: parameter
            for name, parameter in trainer.state_dict().items()
            if not base.is_packed or "lora" in name or "modules_to_save" in name
        }
    return losses, newest
