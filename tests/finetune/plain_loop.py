"""A run as an ordinary PyTorch loop over the same microbatches, of one sample each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.finetune.data.collate import collate, cut_rows_evenly
from roundpipe.finetune.data.dataset import load_dataset
from roundpipe.finetune.data.order import Order
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
    dataset = load_dataset(config, tokenizer)
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
    order = Order.of(config, dataset)
    factor = rate_factor(
        config.lr_scheduler_type,
        num_warmup_steps=warmup_step_count(config.warmup_steps, order.total_steps),
        total_steps=order.total_steps,
    )
    records = []
    for step in range(order.total_steps):
        rows = [[dataset.samples[i] for i in row] for row in order.rows(step + 1)]
        batch = collate(rows, tokenizer.pad_token_id, packed=config.packing)
        tokens = (batch["labels"][:, 1:] != -100).sum()
        total = 0.0
        for part in cut_rows_evenly((), batch, len(rows))[1]:
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
