"""The class that wrote a checkpoint's files, if transformers has it and it makes text.

transformers maps a config to a class for each task, and to another than the checkpoint's own where
it has a choice: a Llama 4 or a Qwen 3.5 opens as its text backbone alone, and a model saved of that
has lost its vision tower. What `config.architectures` says comes first here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


_OTHER_TASKS = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "RewardModel",
)


def class_for(config: Any) -> Any:
    """The class of transformers whose ``_from_config`` and ``from_pretrained`` suit ``config``.

    The checkpoint's own, where it makes text; else that of the first of the tasks "causal LM",
    "image, text to text", "multimodal LM" that has one. No class of a checkpoint's own code is
    ever returned. Raises ConfigError where there is none, for an encoder with a decoder, and for a
    model that was made for something else than to go on with a text.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"an encoder and a decoder, which is not trained on text alone: {config.model_type}\n"
            "hint: give a causal language model"
        )
    found = {kind.__name__: kind for kind in _classes(config)}
    for name in getattr(config, "architectures", None) or ():
        if name in found:
            return found[name]
        if str(name).endswith(_OTHER_TASKS):
            raise ConfigError(
                f"not a causal language model: {name}\n"
                "hint: give a model that goes on with a text (…ForCausalLM)"
            )
    if not found:
        raise ConfigError(
            f"not a causal language model of transformers: {type(config).__name__}\n"
            "hint: give a causal language model; code that comes with the files is never run"
        )
    return next(iter(found.values()))


def name_to_load(model: Any) -> str:
    """The name in transformers whose ``from_pretrained`` gives a model of this class."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 (imports late)

    kind, auto = type(model), AutoModelForCausalLM
    known: Any = auto._model_mapping
    mapped = known.get(type(model.config), None)  # its default must be said
    return auto.__name__ if mapped is kind else kind.__name__


def config_of(kind: Any, config: Any) -> Any:
    """The config that the class takes: ``config``, or the text config within it."""
    text = config.get_text_config()
    return text if text is not config and type(text) is kind.config_class else config


def _classes(config: Any) -> Iterator[Any]:
    from transformers import (  # noqa: PLC0415 (imports late)
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    )

    autos: tuple[Any, ...] = (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
    )
    for auto in autos:
        if type(config) in auto._model_mapping:
            kinds = auto._model_mapping[type(config)]
            for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
                if kind.__module__.startswith("transformers."):
                    yield kind
