"""What is used of peft, imported without what bitsandbytes, which it imports, says on the way."""

from __future__ import annotations

from roundpipe.store.packed import quiet_bitsandbytes

with quiet_bitsandbytes():
    from peft import (
        LoraConfig,
        PeftModel,
        PeftModelForCausalLM,
        get_peft_model,
        get_peft_model_state_dict,
    )
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

__all__ = [
    "LoraConfig",
    "PeftModel",
    "PeftModelForCausalLM",
    "convert_peft_config_for_transformers",
    "get_peft_model",
    "get_peft_model_state_dict",
]
