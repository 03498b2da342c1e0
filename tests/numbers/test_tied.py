"""A tied embedding has one master, one sum of both uses' gradients, one update."""

from __future__ import annotations

import pytest
import torch

import roundpipe

TIED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_both_uses_give_one_gradient_and_see_one_update(
    num_devices, is_async, batches, tiny_llama, plain, wrap, train_lm, close_to
):
    """To 1e-6: the sums of the two uses run in another order than in one graph."""
    reference = plain(tiny_llama(tied=True))
    plain_sgd = torch.optim.SGD(reference.model.parameters(), lr=0.1)
    wrapped = wrap(tiny_llama(tied=True), num_devices)
    sgd = torch.optim.SGD(wrapped.optim_parameters(), lr=0.1)
    late = {}
    for seed in range(4):
        batch = batches.sequences([9, 14, 5, 7], seed=seed)
        expected = reference.forward_backward(batch, 4)
        found = train_lm(wrapped, batch, 4)
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        if seed == 0:
            close_to(wrapped.gradients(), reference.sums)
        if is_async:
            late, reference.sums = reference.sums, late
        if reference.sums:
            reference.step(plain_sgd)
        wrapped.step(sgd, is_async=is_async)
    reference.sums = late
    if late:
        reference.step(plain_sgd)

    state = wrapped.state_dict()
    close_to(state, reference.model.state_dict())
    assert state[TIED[0]] is state[TIED[1]]


def test_it_is_held_once(tiny_llama, wrap):
    model = tiny_llama(tied=True)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    rounding = 256 * sum(1 for _ in (*model.parameters(), *model.buffers()))
    wrapped = wrap(model)

    held = sum(layer.weights.buffer.numel() for layer in wrapped._layers)

    assert parameters <= held <= parameters + rounding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = [name for name, _ in wrapped.optim_named_parameters()]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert TIED[1] not in names


def test_it_is_still_tied_after_save_and_load(tmp_path, batches, tiny_llama, wrap, train_lm):
    from transformers import LlamaForCausalLM

    from roundpipe.finetune.model.from_transformers import quiet_transformers

    model = tiny_llama(tied=True)
    wrapped = wrap(model, 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)
    batch = batches.sequences([9, 14, 5, 7])
    train_lm(wrapped, batch, 4)
    wrapped.step(adamw)
    state = wrapped.state_dict()
    assert set(TIED) <= set(state)
    with quiet_transformers():
        model.save_pretrained(tmp_path, state_dict=dict(state))
        again = LlamaForCausalLM.from_pretrained(tmp_path)

    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again.lm_head.weight, state[TIED[0]])
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert on_disk < sum(p.numel() * 4 for p in model.parameters()) + 8192
    loss = again.eval()(**batch).loss
    with torch.no_grad():
        assert torch.equal(wrapped(**batch).loss, wrapped(**batch).loss)
        assert wrapped(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_master_of_bf16_weights_is_shared_too(batches, tiny_llama, wrap, train_lm):
    wrapped = wrap(tiny_llama(tied=True, dtype=torch.bfloat16), 2)
    adamw = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-2)

    for seed in range(2):
        train_lm(wrapped, batches.sequences([9, 14, 5, 7], seed=seed), 4)
        wrapped.step(adamw)

    state = wrapped.state_dict()
    masters = dict(wrapped.optim_named_parameters())
    assert torch.equal(state[TIED[1]], masters[TIED[0]].detach().bfloat16())
