"""A run as an ordinary PyTorch loop over the same microbatches, of one sample each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.finetune.data.collate import collate
from roundpipe.finetune.data.dataset import load_dataset
from roundpipe.finetune.data.length import RunLength, sample_order
from roundpipe.finetune.model.adapters import add_adapter
from roundpipe.finetune.model.from_transformers import load_model, load_tokenizer
from roundpipe.finetune.model.source import locate_model
from roundpipe.finetune.run.schedule import rate_factor, warmup_step_count

if TYPE_CHECKING:
    from roundpipe.finetune.settings.config import TrainConfig


def plain_run(
    config: TrainConfig, base: Any = None
) -> tuple[list[dict[str, float]], torch.nn.Module]:
    """The records of every step, and the model. ``base``: in place of the config's, as loaded."""
    source = locate_model(config.model_name_or_path)
    tokenizer = load_tokenizer(source)
    samples = load_dataset(config, tokenizer).samples
    model: Any = load_model(source, dtype=torch.float32) if base is None else base
    if config.finetuning_type != "full":
        model = add_adapter(model, config, source, seed=config.seed)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        foreach=False,
    )
    length = RunLength.of(config, len(samples))
    factor = rate_factor(
        config.lr_scheduler_type,
        num_warmup_steps=warmup_step_count(config.warmup_steps, length.total_steps),
        total_steps=length.total_steps,
    )
    records = []
    for step, indices in enumerate(sample_order(config, length)):
        batch = collate([samples[i] for i in indices], tokenizer.pad_token_id)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        total = 0.0
        for i in range(len(indices)):
            part = {name: tensor[i : i + 1] for name, tensor in batch.items()}
            loss = model(**part, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor(step)
        optimizer.step()
        optimizer.zero_grad()
        records.append({"loss": total, "grad_norm": norm.item(), "lr": group["lr"]})
    return records, model
