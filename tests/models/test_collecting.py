"""What hooks collect in blocks reaches the model's own forward, which runs elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from roundpipe.models.causal_lm import causal_lm_spec
from roundpipe.models.spec import Inputs

ROUTER = {"num_local_experts": 4, "router_aux_loss_coef": 0.5}
ASKED = {
    "mixtral": [
        {"output_router_logits": True},
        {"output_hidden_states": True},
        {"output_attentions": True, "output_hidden_states": [1, -1]},
        {"output_hidden_states": True, "output_router_logits": True},
    ],
    "gemma2": [{"output_hidden_states": True}],
}
CASES = [(kind, asked) for kind, each in ASKED.items() for asked in each]


def make(tiny, kind, **more):
    settings = ROUTER if kind == "mixtral" else {}
    return tiny.make(kind, attn_implementation="eager", **settings, **more)


def loss_of(output):
    return output.loss


def asking(microbatches, asked):
    return [Inputs((), {**inputs.kwargs, **asked}) for inputs in microbatches]


def same_gradients(chain, grads, tied=()):
    assert chain.grads.keys() == grads.keys()
    for name, gradient in grads.items():
        if name in tied:
            torch.testing.assert_close(chain.grads[name], gradient, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(chain.grads[name], gradient), name


@pytest.mark.parametrize(("kind", "asked"), CASES, ids=str)
def test_outputs_of_blocks_are_those_of_the_plain_model(kind, asked, tiny, chain_of):
    model = make(tiny, kind)
    chain = chain_of(causal_lm_spec(model))
    for inputs in asking(tiny.inputs((9, 6)), asked):
        ours = chain.forward(inputs)
        with torch.no_grad():
            plain = model(**inputs.kwargs, use_cache=False)
        assert ours.keys() == plain.keys()
        pairs = zip(pytree.tree_leaves(dict(ours)), pytree.tree_leaves(dict(plain)), strict=True)
        assert all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("by", ["argument", "config"])
def test_gradients_of_the_auxiliary_loss_are_those_of_the_plain_model(by, tiny, chain_of, plain):
    asked = {"output_router_logits": True}
    model = make(tiny, "mixtral", **(asked if by == "config" else {}))
    microbatches = asking(tiny.inputs((9, 6)), asked if by == "argument" else {})
    losses, grads = plain(model, microbatches, loss_of)
    spec = causal_lm_spec(model)
    assert spec.takes_num_items == (by == "argument"), "learned without the auxiliary loss, or with"
    chain = chain_of(spec)
    ours = [chain.forward_backward(inputs, loss_of) for inputs in microbatches]
    assert all(map(torch.equal, losses, ours))
    same_gradients(chain, grads)
    without = [
        chain.forward(Inputs((), {**m.kwargs, "output_router_logits": False})).loss
        for m in microbatches
    ]
    assert all(loss > other for loss, other in zip(ours, without, strict=True))


def test_a_loss_of_collected_hidden_states_reaches_all_blocks(tiny, chain_of, plain):
    def far(output):
        return output.loss + sum(hidden.square().mean() for hidden in output.hidden_states)

    model = make(tiny, "gemma2")
    name = "model.embed_tokens.weight"
    microbatches = asking(tiny.inputs((9,)), {"output_hidden_states": True})
    losses, grads = plain(model, microbatches, far)
    chain = chain_of(causal_lm_spec(model))
    ours = [chain.forward_backward(inputs, far) for inputs in microbatches]
    assert all(map(torch.equal, losses, ours))
    assert chain.grads.keys() == grads.keys()
    for key, gradient in grads.items():  # a hidden state has two uses, in another order
        torch.testing.assert_close(chain.grads[key], gradient, rtol=1e-4, atol=1e-6)
    assert name in grads


def test_a_model_that_has_collected_before_collects_once(tiny, chain_of):
    model = make(tiny, "mixtral")
    inputs = asking(tiny.inputs((9,)), {"output_router_logits": True})[0]
    with torch.no_grad():
        plain = model(**inputs.kwargs, use_cache=False)  # installs hooks on the user's modules
    ours = chain_of(causal_lm_spec(model)).forward(inputs)
    assert len(ours.router_logits) == 4
    assert torch.equal(ours.loss, plain.loss)


def test_a_plain_run_that_collects_is_no_change_to_the_model(tiny, chain_of):
    model = make(tiny, "mixtral")
    spec = causal_lm_spec(model)
    inputs = asking(tiny.inputs((9,)), {"output_router_logits": True})[0]
    with torch.no_grad():
        plain = model(**inputs.kwargs, use_cache=False)
    assert spec.changed_since_wrapping() is None
    ours = chain_of(spec).forward(inputs)  # shells made now have the hooks from the user's modules
    assert all(map(torch.equal, ours.router_logits, plain.router_logits))
    model.model.layers[1].register_forward_hook(lambda *_: None)
    assert spec.changed_since_wrapping() == "forward hook added to model.layers.1"


def test_a_routers_loss_that_is_turned_on_later_is_no_mean_over_tokens(tiny):
    spec = causal_lm_spec(make(tiny, "mixtral"))
    assert spec.takes_num_items
    spec.module.config.output_router_logits = True
    assert not spec.takes_num_items
