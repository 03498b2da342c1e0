"""The yardstick: one thread that does the whole step, recomputing every layer below the head.

Per microbatch: forward without graph, keeping each layer's input; the head's forward, the loss and
their backward in one go, so the head is never recomputed; then each layer from the top down, its
forward again from the kept input and its backward. That is the least work a step with per-layer
recompute can be, without any schedule around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from _decoder import build_batch, build_layers, gradient_square, microbatch_loss

if TYPE_CHECKING:
    from torch import Tensor


class SerialSubject:
    """One decoder, stepped by the calling thread."""

    def __init__(self) -> None:
        self._layers = build_layers()
        self._tokens, self._labels = build_batch()

    def step(self, variant: str) -> float | None:
        """Run one step to the last gradient and return its loss; there is only one variant."""
        del variant
        pairs = zip(self._tokens.split(1), self._labels.split(1), strict=True)
        return sum(self._microbatch(tokens, labels) for tokens, labels in pairs)

    def gradient_square(self) -> float:
        """Return the sum of squares of the gradients that the last step left."""
        return gradient_square(self._layers)

    def clear(self) -> None:
        """Drop the gradients."""
        for layer in self._layers:
            layer.zero_grad()

    def close(self) -> None:
        """Nothing to end."""

    def _microbatch(self, tokens: Tensor, labels: Tensor) -> float:
        *body, head = self._layers
        inputs = [tokens]
        with torch.no_grad():
            for layer in body:
                inputs.append(layer(inputs[-1]))
        hidden = inputs.pop().requires_grad_()
        loss = microbatch_loss(head(hidden), labels)
        loss.backward()
        gradient = hidden.grad
        for layer in reversed(body):
            hidden = inputs.pop()
            if hidden.is_floating_point():
                hidden.requires_grad_()
            layer(hidden).backward(gradient)
            gradient = hidden.grad
        return loss.item()
