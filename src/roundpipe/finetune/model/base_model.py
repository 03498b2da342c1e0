"""The base model of a run: its weights straight from files into host segments, where that can be.

Our own loader reads safetensors, takes the model's memory once and packs it to 4 bits on the way.
What it does not read (GGUF, and whatever it refuses, which the log says) goes through transformers,
so that all that trains there trains here, and errors are those that people know.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, RoundPipeError
from roundpipe.finetune.model.from_transformers import load_model, quiet_transformers
from roundpipe.models.loading.distrust import config_fields
from roundpipe.models.loading.load import open_causal_lm
from roundpipe.models.loading.pack_model import pack_model
from roundpipe.store.packed import quiet_bitsandbytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from roundpipe.finetune.model.hub import Shows
    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.models.loading.load import OpenedModel
    from roundpipe.store.frozen import Base

logger = logging.getLogger(__name__)

_NO_SDPA = "does not support an attention implementation through torch"  # transformers' words


@dataclass
class BaseModel:
    """A model in evaluation mode, and the segments that its weights lie in already.

    ``bases`` is for `RoundPipe`, which empties it. ``is_packed``: some weights are in 4 bits; the
    parameters are stand-ins then and the model cannot run by itself. ``folder``: where its files
    lie, if our loader read them.
    """

    model: Any
    bases: list[Base] = field(default_factory=list)
    is_packed: bool = False
    folder: Path | None = None


def load_base(
    source: ModelSource,
    method: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str = "sdpa",
    terminal: Shows | None = None,
    is_frozen: bool = False,
) -> BaseModel:
    """Load the base model onto the host in ``dtype`` for a ``finetuning_type``.

    ``qlora`` packs the matrices of its blocks. Reads or downloads files, and shows on ``terminal``
    how far it is. An architecture without code for ``sdpa`` (Gemma 2) runs its own, which is said.
    ``is_frozen``: nothing of it will be trained, so weights that memory has no room for are mapped
    from files. Raises ConfigError for what `load_model` refuses, for weights in 4 bits that are to
    be trained in full, and where ``qlora`` cannot pack.
    """
    how = (source, method, dtype)
    try:
        return _load_base(*how, attn_implementation, terminal, is_frozen=is_frozen)
    except ConfigError as error:  # raised before any weight is read
        if attn_implementation != "sdpa" or _NO_SDPA not in str(error):
            raise
    if terminal is not None:
        terminal.line("attn_implementation: eager; the model's class has no code for sdpa")
    return _load_base(*how, "eager", terminal, is_frozen=is_frozen)


def _load_base(
    source: ModelSource,
    method: str,
    dtype: torch.dtype,
    attn_implementation: str,
    terminal: Shows | None,
    *,
    is_frozen: bool,
) -> BaseModel:
    if source.gguf_file is not None:
        with _waiting(terminal, f"unpacking {source.name} from GGUF"):
            return _unpacked(source, method, dtype, attn_implementation)
    try:
        with quiet_transformers(), quiet_bitsandbytes():
            opened = open_causal_lm(
                source.location,
                dtype=dtype,
                quantization="nf4" if method == "qlora" else None,
                attn_implementation=attn_implementation,
                revision=source.revision,
            )
    except ConfigError as error:
        if method == "qlora":
            raise ConfigError(
                f"model_name_or_path: cannot load {source.given} in 4 bits: {error}"
            ) from error
        if _is_quantized(source):  # its own library's layers are no matrices that we know
            raise ConfigError(f"model_name_or_path: cannot load {source.given}: {error}") from error
        logger.info("transformers loads the model: %s", str(error).partition("\n")[0])
        with _waiting(terminal, f"loading {source.name}"):
            model = load_model(source, dtype=dtype, attn_implementation=attn_implementation)
        return BaseModel(model)
    if opened.is_packed and method == "full":
        raise ConfigError(
            f"model_name_or_path: weights in 4 bits cannot be trained in full: {source.given}\n"
            "hint: finetuning_type=qlora, or the model in 16 bits as its authors published it"
        )
    return _loaded(opened, source, terminal, is_mapped=is_frozen and not opened.fits_memory)


def _is_quantized(source: ModelSource) -> bool:
    fields = config_fields(Path(source.location)) if source.is_here else {}
    texts = [fields, *(inner for inner in fields.values() if isinstance(inner, dict))]
    return any(inner.get("quantization_config") for inner in texts)


def _loaded(
    opened: OpenedModel, source: ModelSource, terminal: Shows | None, *, is_mapped: bool
) -> BaseModel:
    is_packed = opened.is_packed
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        stack.enter_context(quiet_bitsandbytes())
        progress = None
        if terminal is not None:
            counting = terminal.counting(f"loading {source.name}", opened.num_file_bytes)
            show = stack.enter_context(counting)
            progress = lambda done, total: show(done)  # noqa: E731
        load = opened.load_mapped if is_mapped else opened.load
        loaded = load(progress=progress)
    return BaseModel(loaded.model, loaded.bases, is_packed, loaded.folder)


def _waiting(terminal: Shows | None, what: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if terminal is None else terminal.waiting(what)


def _unpacked(
    source: ModelSource, method: str, dtype: torch.dtype, attn_implementation: str
) -> BaseModel:
    """A model unpacked from GGUF, and packed again if it is to be."""
    base = BaseModel(load_model(source, dtype=dtype, attn_implementation=attn_implementation))
    if method != "qlora":
        return base
    try:
        with quiet_bitsandbytes():
            base.bases = pack_model(base.model)
    except RoundPipeError as error:
        raise ConfigError(
            f"model_name_or_path: cannot pack {source.given} into 4 bits: {error}"
        ) from error
    base.is_packed = bool(base.bases)
    return base
