"""Fields of peft's LoraConfig that would silently make something else here than they say.

A start that takes a part out of the base leaves another base. What loads the adapter must take out
the same part: that of ``pissa`` and ``olora`` is always the same, that of ``pissa_niter_N`` is
drawn anew each time, that of ``lora_ga`` hangs on data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_DATA = ("eva", "corda", "lora_ga")
_AGAIN = (
    "hint: have the program that trained it save a plain adapter: save_pretrained with "
    "path_initial_model_for_weight_conversion, or pissa_convert: true"
)
_NO_ALORA = "alora_invocation_tokens: the adapter would have no part in any token here"


def why_not_trained(fields: Mapping[str, Any]) -> str | None:
    """What stands against training an adapter with these fields, with a way out; None: nothing."""
    start = str(fields.get("init_lora_weights")).lower()
    said = f"init_lora_weights: {start}"
    if start.startswith("pissa_niter"):
        return (
            f"{said} takes a part out of the base that is drawn anew each time the adapter is "
            "loaded: the result would be another model"
            "\nhint: init_lora_weights: pissa takes out the exact part"
        )
    if start in _OF_DATA:
        return f"{said} starts from data that peft has to see before\nhint: leave it out"
    if start == "mica":
        return f"{said} freezes a half of the adapter, which no result would hold\nhint: pissa"
    if fields.get("alora_invocation_tokens"):
        return f"{_NO_ALORA}\nhint: leave it out, which trains an adapter for all tokens"
    return None


def why_not_loaded(fields: Mapping[str, Any]) -> str | None:
    """What stands against loading an adapter with these fields, with a way out; None: nothing."""
    start = str(fields.get("init_lora_weights")).lower()
    if start.startswith("pissa_niter") or start == "lora_ga":
        return (
            f"init_lora_weights: {start} has trained it over another base than the files hold, "
            f"which nobody can make again\n{_AGAIN}"
        )
    if fields.get("alora_invocation_tokens"):
        return f"{_NO_ALORA}\nhint: use it with peft as it is"
    return None
