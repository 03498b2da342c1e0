"""Put LoRA adapters (peft) on a base model, and count what is trained.

Adapters are made in the model's own dtype, not in fp32 as peft does by default: the optimizer keeps
fp32 masters of every trained weight, so that a second fp32 copy on the device would only cost time.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.finetune.model.peft_quietly import (
    LoraConfig,
    convert_peft_config_for_transformers,
    get_peft_model,
)
from roundpipe.finetune.settings.peft_fields import why_not_trained
from roundpipe.models.estimate.method import ALL_LINEAR
from roundpipe.models.routed import ROUTED, is_routed
from roundpipe.models.text_only import other_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

    from roundpipe.finetune.model.source import ModelSource
    from roundpipe.finetune.settings.config import TrainConfig

# As peft 0.21 has them, in a function of its own
_STATE_SPACE = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_READ_BY_KERNELS = r"(?:.*\.)?(?:out_proj|conv1d)"


@dataclass(frozen=True)
class ParameterCounts:
    """How many weights a model has and how many are trained; a tied weight counts once."""

    trained: int
    total: int

    def __str__(self) -> str:
        return f"{short_count(self.trained)} of {short_count(self.total)} trained"


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of ``model``, each shared one once."""
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return ParameterCounts(trained=trained, total=sum(p.numel() for p in parameters))


def add_adapter(
    model: PreTrainedModel,
    config: TrainConfig,
    source: ModelSource,
    *,
    seed: int,
    lora: LoraConfig | None = None,
) -> PeftModel:
    """Wrap ``model`` with the LoRA adapter that ``config`` describes; freezes the base in place.

    ``lora``: peft's own settings in place of the config's; they stay as they are.

    The random start depends on ``seed`` alone; the caller's random state stays as it is. Raises
    ConfigError where peft refuses the settings.
    """
    lora = lora_config(config) if lora is None else copy.deepcopy(lora)
    against = why_not_trained(vars(lora))
    if against is not None:
        raise ConfigError(f"peft: {against}")
    lora.task_type = lora.task_type or "CAUSAL_LM"  # by which AutoPeftModelForCausalLM opens it
    _require_named(lora, model)
    _leave_out_routed(lora, model)
    _leave_out_unread(lora, model)
    _leave_out_fused(lora, model)
    try:
        with torch.random.fork_rng(devices=[]), quiet_peft():
            torch.manual_seed(seed)
            wrapped = get_peft_model(model, lora, autocast_adapter_dtype=False)
    except (ValueError, NotImplementedError, TypeError, ImportError) as error:
        raise ConfigError(f"{error}\nhint: {_hint(config, model, str(error))}") from error
    if getattr(lora, "target_modules_to_tie", None):
        raise ConfigError(
            "peft: ensure_weight_tying ties adapters of embedding and head, which is not supported"
            "\nhint: modules_to_save=embed_tokens trains the weight itself, and the two stay tied"
        )
    set_base(wrapped, source)
    return wrapped  # type: ignore[no-any-return, unused-ignore]


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence what peft warns of while it makes an adapter.

    It asks transformers for names that are about to go (0.21), and says of tied weights at length
    what `roundpipe.finetune.model.methods` says in a line.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        yield


def lora_config(config: TrainConfig) -> LoraConfig:
    """Translate our keys to a ``LoraConfig``; ``config.peft`` passes any other field of it."""
    fields: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": config.lora_r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": _plain(config.target_modules),
        "target_parameters": _plain(config.target_parameters),
        "modules_to_save": _plain(config.modules_to_save),
        "use_dora": config.use_dora,
        "use_rslora": config.use_rslora,
    }
    try:
        return LoraConfig(**{**fields, **(config.peft or {})})
    except (TypeError, ValueError) as error:
        hint = "the keys under peft are the fields of LoraConfig of peft"
        if config.target_modules == ALL_LINEAR and "`target_modules`" in str(error):
            hint = "target_modules=q_proj,v_proj names them; all-linear is not for this field"
        raise ConfigError(f"peft: {error}\nhint: {hint}") from error


def _require_named(lora: LoraConfig, model: nn.Module) -> None:
    """Raise ConfigError for a name in a list that names no module: peft passes over all but all.

    A misspelt module would go untrained for a whole run. Not where peft renames what the user said
    (experts that were modules once).
    """
    read = copy.deepcopy(lora)
    with quiet_peft():
        convert_peft_config_for_transformers(read, model, None)
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key, names in (
        ("target_modules", modules),
        ("modules_to_save", modules),
        ("target_parameters", weights),
    ):
        asked = getattr(read, key)
        if asked is None or isinstance(asked, str) or asked != _same(getattr(lora, key), asked):
            continue
        absent = [a for a in asked if not any(n == a or n.endswith(f".{a}") for n in names)]
        if absent:
            raise ConfigError(
                f"{key}: nothing in the model is called like that: {absent[0]}\n"
                f"hint: {_instead(key, sorted(asked), absent, names)}"
            )


def _instead(key: str, asked: list[str], absent: list[str], names: list[str]) -> str:
    """The list as it was meant, where that can be guessed; else what there is."""
    depth = max(name.count(".") for name in absent) + 1
    kinds = sorted({".".join(n.split(".")[-depth:]) for n in names if n and not n[-1].isdigit()})
    near = {name: difflib.get_close_matches(name, kinds, n=1, cutoff=0.5) for name in absent}
    if all(near.values()):
        meant = [near[name][0] if name in near else name for name in asked]
        return f"{key}={', '.join(dict.fromkeys(meant))}"
    return f"{key}: names end in {', '.join(kinds[:12])}"


def _same(given: Any, like: Any) -> Any:
    return type(like)(given) if given is not None else None


def _leave_out_routed(lora: LoraConfig, model: nn.Module) -> None:
    """Keep ``all-linear`` off routers and routed experts, unless the user said what to exclude.

    Experts that are stacks of weights are no linear modules, but peft (0.21) reads ``all-linear``
    as them and the router too, in models whose experts were modules once. What it leaves of linear
    modules then is named instead. Shared experts of such a model cannot be named to peft: it takes
    their names for those of the routed ones.
    """
    if lora.target_modules != ALL_LINEAR or lora.exclude_modules:
        return
    named = model.named_modules()
    if any(is_routed(name) and isinstance(module, torch.nn.Linear) for name, module in named):
        lora.exclude_modules = ROUTED
    read = copy.deepcopy(lora)
    convert_peft_config_for_transformers(read, model, None)
    if read.target_parameters != lora.target_parameters:
        lora.target_modules = read.target_modules


def _leave_out_unread(lora: LoraConfig, model: PreTrainedModel) -> None:
    """Keep adapters off what text does not reach (vision towers), whose parts have the same names.

    Not where the user said himself, in a list of names, what to leave out.
    """
    others = other_parts(model)
    if not others or isinstance(lora.exclude_modules, (list, set, tuple)):
        return
    towers = rf"({'|'.join(map(re.escape, others))})(\..*)?"
    said = lora.exclude_modules
    lora.exclude_modules = f"(?:{said})|{towers}" if said else towers


def _leave_out_fused(lora: LoraConfig, model: PreTrainedModel) -> None:
    """Keep ``all-linear`` off what a state-space model's fused kernels read past the adapter.

    peft (0.21) refuses the whole adapter instead. Not where the user said what to leave out.
    """
    if lora.target_modules != ALL_LINEAR or lora.exclude_modules:
        return
    if model.config.model_type in _STATE_SPACE:
        lora.exclude_modules = _READ_BY_KERNELS


def refuse_packed(model: nn.Module) -> None:
    """Raise ConfigError for a weight in 4 bits that is to be trained itself.

    ``model`` has stand-ins for such weights: what peft made of one is a copy of no number.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.detach().flatten()[:1].isnan().any():
            raise ConfigError(
                f"weights in 4 bits cannot be trained: {name}\n"
                "hint: modules_to_save and unfrozen_parameters can name what is outside the "
                "blocks; else the model in 16 bits with finetuning_type=lora"
            )


def _plain(names: Any) -> Any:
    """Lists for tuples: peft writes them to JSON and compares them with lists."""
    return list(names) if isinstance(names, (tuple, set, frozenset)) else names


def set_base(wrapped: PeftModel, source: ModelSource) -> None:
    """Say in the adapter what it was trained on as the user said it, never as a cache path.

    peft overwrites the field with the folder that the model was loaded from.
    """
    for adapter in wrapped.peft_config.values():
        adapter.base_model_name_or_path = source.hub_id or source.given
        adapter.revision = source.revision if source.is_hub else None


def _hint(config: TrainConfig, model: PreTrainedModel, message: str) -> str:
    if "not found in the base model" in message or "target_modules" in message:
        kinds = sorted(
            {
                name.rpartition(".")[2]
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear)
            }
        )
        return f"target_modules=all-linear, or some of: {', '.join(kinds)}"
    return f"target_modules={config.target_modules} and the keys under peft are what peft was given"


def short_count(count: int) -> str:
    """``4.88 M``: a count in three digits."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            value = count / size
            return f"{value:.3g} {unit}"
    return str(count)
