"""What a Trainer was told, read: settings, and how its rows become samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import TrainingArguments

    from roundpipe.finetune.settings.config import TrainConfig

IN_MEMORY = "in memory"  # the path of a dataset that is no file
NO_LIMIT = 1 << 30  # max_length where nothing is cut


@dataclass(frozen=True)
class Preparation:
    """How rows become samples.

    ``is_theirs``: as TRL's SFTTrainer reads rows, else as our commands do. ``cuts_tokens``: rows
    that are tokenised already are cut at ``max_length`` too. ``takes_as_is``: rows are what a model
    or a collator is given.
    """

    is_theirs: bool = False
    text_column: str = "text"
    answers_only: bool = False  # of conversations
    completion_only: bool | None = None  # None: of rows with a prompt and a completion
    packing_strategy: str = "bfd"
    takes_as_is: bool = False
    cuts_tokens: bool = True
    removes_columns: bool = True


@dataclass(frozen=True)
class Told:
    """What `arguments.read_arguments` came to.

    ``config`` is final but for what rows decide (`datasets.Data.config`). ``arguments`` are what
    callbacks see. ``notes``: lines to be said of what became another. ``adds_router_loss``: to a
    mixture's loss, as TRL does.
    """

    config: TrainConfig
    arguments: TrainingArguments
    notes: list[str] = field(default_factory=list)
    preparation: Preparation = field(default_factory=Preparation)
    adds_router_loss: bool = False

    @property
    def is_theirs(self) -> bool:
        """Whether transformers' or TRL's arguments were given, or none at all."""
        return self.preparation.is_theirs


@dataclass(frozen=True)
class About:
    """What a Trainer is given beside its arguments, as far as a config hangs on it.

    ``dtype``: of the weights of a model that is loaded (``is_loaded``); ``is_adapter``: it is under
    peft. ``num_devices``: of a model that is on devices already.
    """

    model_name: str
    peft_config: Any = None
    quantization_config: Any = None
    is_loaded: bool = False
    dtype: torch.dtype | None = None
    is_adapter: bool = False
    num_devices: int | None = None
    train_dataset: Any = None
    eval_dataset: Any = None
    environment: Mapping[str, str] | None = None
