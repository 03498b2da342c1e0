"""Text from a wrapped causal LM: its own ``generate``, over weights that stay or come as used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roundpipe.calling import Calling
from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.generation import generate
from roundpipe.engine.microbatch import config_of_call
from roundpipe.engine.outlook import outlook

if TYPE_CHECKING:
    from roundpipe.engine.outlook import Outlook
    from roundpipe.plan.machine import Machine
    from roundpipe.planner import Planner


class Generating(Calling):
    """A wrapper that generates text where its model does."""

    planner: Planner

    def generate(
        self,
        *args: Any,
        roundpipe_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
        use_adapter: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Continue prompts by a causal LM's own ``generate``, of which all other arguments are.

        In evaluation mode on the first device, with the newest weights: those stay there until it
        is done if there is room for them and for the cache, else blocks come up as they are used.
        ``use_adapter=False``: the base model, without the adapters of ``peft``.
        The tokens are those that the plain model would make. Returns what that returns (token ids
        [sequences, length], int64, unless asked for more), on ``output_device`` (the host). Blocks
        until then, and before for what is under way; training may go on afterwards.

        Raises ModelError for a model that does not generate text, ConfigError for prompts with
        images, DeviceError where no room is.
        """
        self._ready()
        config = config_of_call(roundpipe_run_config, self._config)
        self._text_only.check(args[:1], kwargs)
        self._settle()
        return generate(
            self._engine,
            args,
            kwargs,
            device_bytes=self.planner.device_bytes,
            newest=self._chain.staleness == 1,
            output_device=torch.device(config.output_device or "cpu"),
            use_adapter=use_adapter,
        )

    def generation_outlook(
        self, rows: int, prompt: int, new_tokens: int, machine: Machine | None = None
    ) -> Outlook:
        """Say what ``generate`` will do with ``rows`` prompts of ``prompt`` tokens; runs nothing.

        ``machine``: whose rates count; None: data sheets'. Raises ModelError as ``generate``.
        """
        self._ready()
        size = {"rows": rows, "prompt": prompt, "new_tokens": new_tokens}
        at = machine or self.planner.machine
        return outlook(self._engine, at, device_bytes=self.planner.device_bytes, **size)
