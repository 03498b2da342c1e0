"""Routers and attention indexers of transformers choose in recompute what they chose in forward."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe.engine.layer_run import LayerRuns

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
}
SPARSE = {
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
}
# By name: what the configuration has of its own, and the modules that choose.
MODELS = {
    "qwen3_moe": (
        {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        ("gate",),
    ),
    "deepseek_v32": (SPARSE, ("gate", "indexer")),
}
EACH = roundpipe.ModelExecutePlan(
    fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(2, 4), range(1, 2), range(1)]
)


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **SMALL, **MODELS[name][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()


class Watch:
    """Disturbs what choosing modules are called with in recompute, and notes what they return."""

    def __init__(self, model, kinds):
        self.noise = torch.randn(32, generator=torch.Generator().manual_seed(0))
        self.forward, self.again = {}, {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in kinds:
                module.register_forward_pre_hook(self.disturb)
                module.register_forward_hook(lambda _m, _a, out, name=name: self.note(name, out))

    def disturb(self, _module, args):
        if not roundpipe.doing_recompute():
            return None
        return (args[0] + self.noise, *args[1:])

    def note(self, name, out):
        found = self.again if roundpipe.doing_recompute() else self.forward
        chosen = out[-1] if isinstance(out, tuple) else out
        found.setdefault(name, []).append(chosen.detach().clone())

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("is_replayed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_disturbed_recompute_chooses_the_same(name, is_replayed, wrap, batches, monkeypatch):
    if not is_replayed:
        monkeypatch.setattr(LayerRuns, "_kept", lambda *_: {})
    model = model_of(name)
    watch = Watch(model, MODELS[name][1])
    wrapped = wrap(model, 1)
    watch.forward.clear()  # of the runs by which the model was taken apart
    wrapped.forward_backward(
        input_kwargs=batches.sequences([12, 9, 12, 12]),
        run_config=roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=EACH),
    )
    wrapped.synchronize()

    assert len(watch.forward) >= 2
    assert watch.again.keys() == watch.forward.keys()
    same = [
        torch.equal(one, other)
        for kind in watch.forward
        for one, other in zip(watch.forward[kind], watch.again[kind], strict=True)
    ]
    assert all(same) is is_replayed
