"""The job that every subject of the benchmark does: one small decoder, one batch, one loss.

Ten layers in a row: embedding, eight equal pre-norm blocks, final norm + head. With a vocabulary
of 16,000 the head costs as much as five to six blocks, so no cut between two devices is even: it
is the small picture of a language model with a large vocabulary. Everything comes from one seed,
so each process builds the same weights and the same tokens without exchanging any.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 256
BLOCKS = 8
HEADS = 4
VOCABULARY = 16_384
SEQUENCE = 128
MICROBATCHES = 6
SEED = 0


class Block(nn.Module):
    """Causal attention and a four times wider MLP, each behind a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, width)`` to the same shape."""
        batch, sequence, _ = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        query, key, value = mixed.view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(seen.transpose(1, 2).reshape(batch, sequence, WIDTH))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Head(nn.Module):
    """Final norm and the projection onto the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, sequence, width)`` to logits ``(batch, sequence, vocabulary)``."""
        return self.projection(self.norm(hidden))


def build_layers() -> list[nn.Module]:
    """Return the ten layers with the weights of the one seed, in order."""
    torch.manual_seed(SEED)
    return [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(BLOCKS)), Head()]


def build_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens that follow them, both ``(microbatches, sequence)`` int64."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def microbatch_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return one microbatch's share of the step's loss: the sum of all shares is the mean."""
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss / MICROBATCHES


def gradient_square(layers: list[nn.Module]) -> float:
    """Return the sum of the squares of all gradients of ``layers``, added up in double."""
    gradients = (p.grad for layer in layers for p in layer.parameters() if p.grad is not None)
    return sum(float(gradient.double().square().sum()) for gradient in gradients)
