"""What is used of peft, imported without what bitsandbytes, which it imports, says on the way."""

from __future__ import annotations

from roundpipe.store.packed import quiet_bitsandbytes

with quiet_bitsandbytes():
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

__all__ = ["LoraConfig", "PeftModel", "get_peft_model", "get_peft_model_state_dict"]
