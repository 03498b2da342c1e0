"""What other tools cannot do with an adapter, and why: one sentence each, as data.

Found in their sources: vLLM 0.26 (``vllm/lora/peft_helper.py``, ``vllm/config/lora.py``), llama.cpp
of 2026 (``convert_lora_to_gguf.py``), ollama 0.21 (``runner/ollamarunner``). A tool that would take
a result and compute something else with it counts as one that cannot: that is the worse failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from roundpipe.finetune.model.source import ModelSource

    Fields = Mapping[str, Any]  # of adapter_config.json

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank may be; 1 as well
_READS_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Limit:
    """``tools`` cannot use an adapter that ``holds`` is true of; ``why`` goes on "… it first:"."""

    tools: tuple[str, ...]
    holds: Callable[[Fields], bool]
    why: str


_BOTH = ("vllm", "llama.cpp")
LIMITS = (
    Limit(("ollama",), lambda _: True, "its engine does not run adapters"),
    Limit(_BOTH, lambda peft: bool(peft.get("use_dora")), "it does not know DoRA (use_dora)"),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("modules_to_save")),
        "it takes no weights that were trained whole (modules_to_save)",
    ),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("trainable_token_indices")),
        "it takes no rows of an embedding that were trained (trainable_token_indices)",
    ),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("lora_bias")) or peft.get("bias", "none") != "none",
        "it takes no biases of an adapter (bias, lora_bias)",
    ),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("target_parameters")),
        "it does not read adapters on stacked experts (target_parameters), or not in every version",
    ),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("layer_replication")),
        "it does not repeat layers (layer_replication)",
    ),
    Limit(
        _BOTH,
        lambda peft: str(peft.get("init_lora_weights")).lower().startswith(_READS_BASE),
        "such a start changes the base's weights, which peft alone does again (init_lora_weights)",
    ),
    Limit(
        ("vllm",),
        lambda peft: bool(peft.get("rank_pattern")),
        "it reads one rank for all modules (rank_pattern)",
    ),
    Limit(
        _BOTH,
        lambda peft: bool(peft.get("alpha_pattern")),
        "it reads one lora_alpha for all modules (alpha_pattern)",
    ),
    Limit(
        ("llama.cpp",),
        lambda peft: bool(peft.get("use_rslora")),
        "it scales by lora_alpha / r, whatever use_rslora says",
    ),
    Limit(
        ("vllm",),
        lambda peft: vllm_rank(peft) is None,
        f"it takes ranks up to {RANKS[-1]} (lora_r)",
    ),
)


def reasons_against(
    tool: str, peft: Fields | None, source: ModelSource, *, is_tied: bool
) -> Iterator[str]:
    """Why ``tool`` cannot use an adapter as it is; nothing for one it can, or a whole model.

    ``peft``: the fields of ``adapter_config.json``, ``source``: its base.
    """
    if peft is None:
        return
    yield from (limit.why for limit in LIMITS if tool in limit.tools and limit.holds(peft))
    if tool not in _BOTH:
        return
    if source.gguf_file is not None or source.package is not None:
        yield "it does not open such a base (GGUF, or inside a Python package)"
    if tool == "llama.cpp" and is_tied and _has_head(peft):
        yield "it has no adapter for a head that is one with the embedding (lm_head)"


def vllm_rank(peft: Fields) -> int | None:
    """The least ``--max-lora-rank`` that takes the adapter; None where none does."""
    rank = int(peft.get("r", RANKS[0]))
    return next((allowed for allowed in RANKS if allowed >= rank), None)


def _has_head(peft: Fields) -> bool:
    targets = peft.get("target_modules") or ()
    return "lm_head" in targets
