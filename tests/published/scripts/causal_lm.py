"""A causal LM in fp16, its own loss function, decoding by hand, and saving."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from roundpipe import GradScaler, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import Adam

NUM_MICROBATCH = 3
FOLDER = "fine-tuned"
torch.manual_seed(0)
raw_model = Qwen3ForCausalLM(
    Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        use_cache=False,
    )
).to(torch.float16)
batches = [torch.randint(3, 64, (6, 9)) for _ in range(3)]

model = wrap_model_to_roundpipe(
    raw_model,
    model_run_config=RoundPipeRunConfig(num_microbatch=NUM_MICROBATCH),
    optim_dtype=torch.float32,
)
optim = Adam(model.optim_parameters(), lr=1e-3)
scaler = GradScaler(init_scale=256.0)
model.config.use_cache = False


@torch.no_grad()
def generate(input_ids, max_new_tokens=3):
    model.synchronize()
    model.eval()
    for _ in range(max_new_tokens):
        outputs = model(
            input_ids=input_ids.to(torch.long),
            attention_mask=torch.ones_like(input_ids),
            roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1),
        )
        next_id = outputs.logits[:, -1, :].argmax(dim=-1, keepdim=True)
        input_ids = torch.cat([input_ids, next_id], dim=-1)
    model.train()
    return input_ids


def optimizer_step():
    scaler.step(optim)
    optim.zero_grad()


before = generate(batches[0][:1, :4])
losses = []
for labels in batches:
    loss = model.forward_backward(
        input_kwargs={"input_ids": labels, "attention_mask": torch.ones_like(labels)},
        label=labels,
        loss_fn=lambda outputs, labels: scaler.scale(
            model.loss_function(logits=outputs.logits, labels=labels, vocab_size=model.vocab_size)
            / NUM_MICROBATCH
        ),
    )
    losses.append(loss.item() / scaler.get_scale())
    model.step(optimizer_step)
    scaler.update()
after = generate(batches[0][:1, :4])
model.synchronize()
model.save_pretrained(FOLDER)
