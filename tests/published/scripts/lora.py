"""LoRA with peft: only adapters are trained, and only they have masters."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
    )
)
lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
my_model = get_peft_model(base, lora)
batches = [torch.randint(3, 64, (4, 7)) for _ in range(4)]

model = RoundPipe(my_model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
with OptimizerCtx():
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for ids in batches:
    loss = model.forward_backward(
        input_kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        label=ids,
        loss_fn=lambda outputs, labels: (
            model.loss_function(
                logits=outputs.logits, labels=labels, vocab_size=model.config.vocab_size
            )
            / 2
        ),
    )
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    losses.append(loss.item())
num_masters = len(list(model.optim_parameters()))
model.synchronize()
weights = {name: w for name, w in model.state_dict().items() if "lora_" in name}
