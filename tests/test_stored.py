"""Masters, by name and in place of the working weights where an optimizer is made."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import roundpipe


@pytest.fixture
def wrapped():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    with roundpipe.RoundPipe(model, devices="cpu") as ours:
        yield ours


def test_inside_an_optimizer_context_parameters_are_the_masters(wrapped):
    masters = wrapped.optim_parameters()
    with roundpipe.OptimizerCtx() as context:
        with context, roundpipe.OptimizerCtx():
            pass
        inside = list(wrapped.parameters())
        named = dict(wrapped.named_parameters())
        assert next(iter(wrapped.named_parameters("a")))[0] == "a.0.weight"
    assert all(one is other for one, other in zip(inside, masters, strict=True))
    assert named.keys() == dict(wrapped.named_parameters()).keys()
    assert {p.dtype for p in inside} == {torch.float32}
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
    assert roundpipe.optim.AdamW(inside).param_groups[0]["params"] == masters


def test_names_of_masters_take_a_prefix(wrapped):
    names = [name for name, _ in wrapped.optim_named_parameters("model")]
    assert names == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]


# ---- gradients in sight


def tower(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


def squares(outputs, _):
    return outputs.float().square().sum()


@pytest.fixture
def wrap():
    made = []

    def of(model, devices="cpu*2"):
        made.append(roundpipe.RoundPipe(model, devices=devices))
        return made[-1]

    yield of
    for each in made:
        each.close()


def call(wrapped, x, num_microbatch=3):
    config = roundpipe.RoundPipeRunConfig(num_microbatch=num_microbatch)
    return wrapped.forward_backward((x,), loss_fn=squares, run_config=config)


def gradients(model, *batches):
    for x in batches:
        squares(model(x), None).backward()
    return [p.grad for p in model.parameters()]


def test_gradients_are_in_grad_between_a_call_and_its_step(wrap):
    wrapped = wrap(tower())
    call(wrapped, X)
    call(wrapped, X.flip(1))
    torch.testing.assert_close(
        [p.grad for p in wrapped.parameters()], gradients(tower(), X, X.flip(1))
    )
    wrapped.step(torch.optim.SGD(wrapped.optim_parameters(), lr=0.0))
    assert all(p.grad is None for p in wrapped.parameters())
    call(wrapped, X)
    torch.testing.assert_close([p.grad for p in wrapped.parameters()], gradients(tower(), X))
    wrapped.zero_grad()
    assert all(p.grad is None for p in wrapped.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_clipping_what_is_in_grad_clips_what_the_step_uses(wrap, dtype, num_calls):
    steps = []
    for clips_itself in (True, False):
        wrapped = wrap(tower(dtype))
        optimizer = torch.optim.SGD(wrapped.optim_parameters(), lr=1.0)
        for at in range(num_calls):
            call(wrapped, X.to(dtype).roll(at, 0))
        if clips_itself:
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.25)
            assert norm > 0.25
            wrapped.step(optimizer)
        else:
            wrapped.step(optimizer, max_grad_norm=0.25)
        wrapped.synchronize()
        steps.append([p.detach().clone() for p in wrapped.optim_parameters()])
    # the norm of 16-bit gradients is rounded where torch takes it
    torch.testing.assert_close(*steps, rtol=2e-2, atol=2e-4)


def test_a_loop_may_go_on_after_a_look_at_the_gradients(wrap):
    wrapped, plain = wrap(tower()), tower()
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (wrapped.optim_parameters(),
                                                       plain.parameters())]  # fmt: skip
    for at in range(3):
        call(wrapped, X.roll(at, 0))
        wrapped.synchronize()
        call(wrapped, X.roll(at, 1))
        assert len(list(wrapped.parameters())) == 4
        wrapped.step(optimizers[0])
        gradients(plain, X.roll(at, 0), X.roll(at, 1))
        optimizers[1].step()
        optimizers[1].zero_grad()
    torch.testing.assert_close(wrapped.state_dict(), plain.state_dict())


class Late(torch.optim.SGD):
    """Updates when it may."""

    may = threading.Event()

    def step(self, closure=None):
        self.may.wait(10)
        return super().step(closure)


@pytest.mark.parametrize("look", ["parameters", "modules"])
def test_whoever_asks_for_weights_after_a_step_finds_the_updated_ones(wrap, look):
    wrapped = wrap(tower())
    call(wrapped, X)
    Late.may.clear()
    wrapped.step(Late(wrapped.optim_parameters(), lr=0.1))
    timer = threading.Timer(0.05, Late.may.set)  # while it is asked
    timer.start()
    if look == "parameters":
        found = [p.detach().clone() for p in wrapped.parameters()]
    else:
        found = [p.detach().clone() for m in wrapped.modules() if isinstance(m, nn.Linear)
                 for p in m.parameters()]  # fmt: skip
    wrapped.synchronize()
    timer.join()
    assert all(torch.equal(p, q) for p, q in zip(found, wrapped.parameters(), strict=True))
    assert not torch.equal(found[0], next(tower().parameters()))


def test_a_closed_model_keeps_no_gradient_of_ours(wrap):
    wrapped = wrap(tower(torch.bfloat16))
    call(wrapped, X.bfloat16())
    call(wrapped, X.bfloat16())
    assert {p.grad.dtype for p in wrapped.parameters()} == {torch.float32}
    wrapped.close()
    gradients(wrapped.model, X.bfloat16())
    assert {p.grad.dtype for p in wrapped.model.parameters()} == {torch.bfloat16}


def test_freezing_needs_no_word_to_the_wrapper(wrap):
    wrapped, plain = wrap(tower()), tower()
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (wrapped.optim_parameters(),
                                                       plain.parameters())]  # fmt: skip
    for frozen in ([], [0], [0, 2], [2], []):
        for model in (wrapped, plain):
            for at in (0, 2):
                model[at].requires_grad_(at not in frozen)
        if len(frozen) < 2:
            call(wrapped, X)
            wrapped.step(optimizers[0])
            gradients(plain, X)
            optimizers[1].step()
            optimizers[1].zero_grad()
    wrapped.requires_grad_(False)
    assert not any(p.requires_grad for p in wrapped.parameters())
    wrapped.synchronize()
    torch.testing.assert_close(wrapped.state_dict(), plain.state_dict())


def test_loaded_buffers_reach_what_rebuilds_the_arguments_of_blocks(wrap):
    """The frequencies of a rotary table, here saved with the model: no layer but all contexts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, vocab_size=32)).eval()
    plain.model.rotary_emb._non_persistent_buffers_set.discard("inv_freq")
    ours = wrap(copy.deepcopy(plain))
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    state["model.rotary_emb.inv_freq"] *= 0.5
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        before = ours(input_ids=ids).logits
        for model in (plain, ours):
            model.load_state_dict(state)
        found = ours(input_ids=ids).logits
        torch.testing.assert_close(found, plain(ids, use_cache=False).logits)
    assert not torch.allclose(before, found)
