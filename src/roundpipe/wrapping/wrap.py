"""Wraps any model: as one chain where that is exact, else each of its heavy submodules by itself.

A model that is no chain (an encoder and a decoder, two towers, a U-Net) becomes an `AutoRoundPipe`.
Its heavy submodules, the *parts*, run on devices, one part at a time, all microbatches together;
the code that calls them runs on the host, under the caller's autograd, for each microbatch by
itself. So a batch is cut once, at the root, and whatever happens between parts sees one whole
microbatch: it may add, concatenate or branch as it likes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from roundpipe.config import RoundPipeRunConfig
from roundpipe.engine.pool import DevicePool
from roundpipe.errors import ConfigError, ModelError
from roundpipe.models.choose import is_causal_lm, is_of_transformers
from roundpipe.models.parts import Rules, find_parts, is_part, num_bytes
from roundpipe.roundpipe import RoundPipe
from roundpipe.wrapping.auto import AutoRoundPipe

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import nn

    from roundpipe.models.parts import Part

logger = logging.getLogger(__name__)

_SHARES = (
    9  # of a model; a submodule of one share is not looked into, see `wrap_model_to_roundpipe`
)


class _NoChainError(ModelError, NotImplementedError):
    """This model is no chain; scripts that try that first fall back on a `NotImplementedError`."""


def wrap_model_to_roundpipe(  # noqa: PLR0913, PLR0917 - the published signature
    model: nn.Module,
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Container[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] | None = None,
    model_run_config: RoundPipeRunConfig = RoundPipeRunConfig(),  # noqa: B008 - frozen
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe | AutoRoundPipe | nn.Module:
    """Wrap a model whole if it is a chain of layers, else its heavy submodules one by one.

    ``use_sequential_preset``: True insists on one chain (a Hugging Face causal LM, split by its
    structure), False never tries. Otherwise a walk from the root down wraps an ``nn.Sequential``
    as a chain, and as one layer: a module whose own parameters take ``lower_threshold`` bytes, one
    that takes ``upper_threshold`` bytes in all at most (default: a ninth of the model, whatever the
    devices, so that results do not hang on them), one that holds no others, and each element of an
    ``nn.ModuleList``. ``skip_modules`` and what holds them run on the host. ``override_config``: of
    submodules, as far as it says how a part runs; how a batch is cut and put together is
    ``model_run_config``'s alone. The rest as for ``RoundPipe``.

    Returns a ``RoundPipe``, or an ``AutoRoundPipe`` where the model itself is no part, or ``model``
    if that is to be skipped. Raises ModelError for what cannot be run exactly, ConfigError for
    settings that need one chain where the model is none (``optim_state_dir``, ``commit="eager"``).
    """
    if model in skip_modules:
        return model
    chain = {"name": name, "model_run_config": model_run_config, **roundpipe_kwargs}
    is_chain = is_causal_lm(model)
    if use_sequential_preset and not is_chain:
        raise _NoChainError(
            f"no causal LM, so it is not split by structure: {type(model).__name__}\n"
            "hint: use_sequential_preset=None"
        )
    if use_sequential_preset is not False and is_chain:
        try:
            return RoundPipe(model, **chain)
        except ModelError as error:
            if use_sequential_preset:
                raise
            reason = str(error).partition("\n")[0]
            logger.warning("wrapped part by part, because as a chain it is refused: %s", reason)
    # By default the model itself is never small enough: the limit is a share of it.
    rules = Rules(lower_threshold, -1 if upper_threshold is None else upper_threshold, skip_modules)
    if is_part(model, rules) and (is_chain or not is_of_transformers(model)):
        config = (override_config or {}).get(model, RoundPipeRunConfig()).over(model_run_config)
        return RoundPipe(model, **{**chain, "model_run_config": config})
    return _wrapped_in_parts(model, rules, upper_threshold, override_config or {}, chain)


def _wrapped_in_parts(
    model: nn.Module,
    rules: Rules,
    upper_threshold: int | None,
    override_config: Mapping[nn.Module, RoundPipeRunConfig],
    settings: dict[str, Any],
) -> AutoRoundPipe:
    for word in ("optim_state_dir", "bases"):
        if settings.pop(word, None) is not None:
            raise ConfigError(
                f"not for a model that is wrapped part by part: {word}\nhint: leave it out"
            )
    if settings.pop("commit", "whole") != "whole":
        raise ConfigError(
            "commit='eager' is not for a model that is wrapped part by part\nhint: leave it out"
        )
    given: DevicePool | None = settings.pop("pool", None)
    devices = settings.pop("devices", "auto")
    limit = settings.pop("pinned_memory_limit", None)
    pool = given or DevicePool(devices, pinned_memory_limit=limit)
    try:
        if upper_threshold is None:
            rules = Rules(rules.lower_bytes, num_bytes(model) // _SHARES, rules.skipped)
        parts = _required(find_parts(model, rules), model)
        return AutoRoundPipe(
            model, parts, pool, owns_pool=given is None, overrides=override_config, **settings
        )
    except BaseException:
        if given is None:
            pool.close()
        raise


def _required(parts: list[Part], model: nn.Module) -> list[Part]:
    if not parts:
        raise ModelError(
            f"nothing to run on a device: {type(model).__name__}\n"
            "hint: skip_modules=(), and parameters in at least one submodule"
        )
    return parts
