"""This library, as a user would call it: an ``nn.Sequential``, devices by name, nothing tuned."""

from __future__ import annotations

from _decoder import MICROBATCHES, build_batch, build_layers, microbatch_loss
from torch import nn

import roundpipe


class LibrarySubject:
    """One RoundPipe over ``num_devices`` CPU devices of one thread each."""

    def __init__(self, num_devices: int, schedule: str) -> None:
        self._layers = build_layers()
        self._tokens, self._labels = build_batch()
        self._pipe = roundpipe.RoundPipe(
            nn.Sequential(*self._layers), devices=["cpu"] * num_devices, schedule=schedule
        )
        self._config = roundpipe.RoundPipeRunConfig(num_microbatch=MICROBATCHES)

    def step(self, variant: str) -> float | None:
        """Run one step until every gradient is on the host; there is only one variant."""
        del variant
        loss = self._pipe.forward_backward(
            input_args=(self._tokens,),
            label=self._labels,
            loss_fn=microbatch_loss,
            run_config=self._config,
        )
        self._pipe.synchronize()
        return float(loss)

    def gradient_square(self) -> float:
        """Return the sum of squares of the gradients that the last step left."""
        return sum(float(g.double().square().sum()) for g in self._pipe.gradients().values())

    def clear(self) -> None:
        """Drop the gradients."""
        self._pipe.zero_grad()

    def close(self) -> None:
        """End the devices' threads."""
        self._pipe.close()
