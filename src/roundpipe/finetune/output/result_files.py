"""Write what was trained so that stock transformers and stock peft load it.

Weights come from the trainer as a mapping of names to host tensors, and are asked for one after
another: see `roundpipe.models.saving`. What stands beside a checkpoint of a model that also sees or
hears (how its images are cut and scaled) is copied from the base model's folder, so that the result
opens wherever that did.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from roundpipe.finetune.model.from_transformers import quiet_transformers
from roundpipe.finetune.model.peft_quietly import PeftModel
from roundpipe.models.saving import save

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

_PROCESSORS = (
    "processor_config.json",
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
)


def save_result(
    folder: Path,
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_folder: Path | None = None,
) -> None:
    """Write model or adapter, tokenizer, chat template and generation settings into ``folder``.

    ``weights`` are the newest weights by the names of ``model``; those in ``model`` itself are not
    read. An adapter is written alone, without its base model. ``base_folder``: whose image
    processor and the like come with a whole model.
    """
    with quiet_transformers():
        save(folder, model, weights)
    save_tokenizer(tokenizer, folder)
    if base_folder is not None and not isinstance(model, PeftModel):
        for name in _PROCESSORS:
            if (base_folder / name).is_file():
                shutil.copyfile(base_folder / name, folder / name)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer and chat template into ``folder``. Raises OSError where the disk fails.

    The tokenizers library (0.22) raises a bare Exception there, whose text has the number.
    """
    try:
        with quiet_transformers():
            tokenizer.save_pretrained(folder)
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def tokenizer_bytes(tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of the files of a tokenizer, which a result and every checkpoint hold; near enough."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return 0 if inner is None else len(inner.to_str(pretty=True).encode())


def base_of(model: nn.Module) -> Any:
    """The model of transformers, below peft where that is."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapter_fields(model: nn.Module) -> dict[str, Any] | None:
    """What ``adapter_config.json`` says of the adapter on ``model``; None where there is none."""
    if not isinstance(model, PeftModel):
        return None
    fields: dict[str, Any] = model.peft_config[model.active_adapter].to_dict()
    return fields
