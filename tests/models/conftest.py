"""Runs a spec's layers one after another: the smallest thing that an engine does with them."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from roundpipe.models.spec import Inputs

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def as_leaf(tensor):
    leaf = tensor.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


class Chain:
    """Shells of every layer, bound to clones of the model's tensors; gradients add up by name."""

    def __init__(self, spec):
        self.spec = spec
        self.tensors = {}
        for layer in spec.layers:
            for name, tensor in layer.tensors.items():
                self.tensors.setdefault(name, tensor.detach().clone())
        self.shells = [layer.make_shell(CPU) for layer in spec.layers]
        self.context = spec.make_context(CPU)
        self.grads = {}
        self.bind()

    def bind(self):
        for shell in self.shells:
            shell.bind(self.tensors)

    def sync_mode(self):
        for shell in (*self.shells, self.context):
            shell.sync_mode()

    def forward(self, inputs):
        """The model's output, without gradients."""
        boundary = None
        with torch.no_grad():
            context = self.context(inputs, range(len(self.shells)))
            for shell in self.shells:
                boundary = shell(boundary, inputs, context)
        return boundary

    def forward_backward(self, inputs, loss_of):
        """One microbatch: every layer forward, then every layer backward; returns its loss."""
        context = self.context(inputs, range(len(self.shells)))
        boundary, entries, exits = None, [], []
        for shell in self.shells:
            entries.append(boundary)
            output = shell(boundary, inputs, context)
            exits.append(output)
            boundary = pytree.tree_map_only(torch.Tensor, as_leaf, output)
        loss = loss_of(output)
        exits[-1], gradients = loss, [None]
        for entry, result, shell in zip(
            reversed(entries), reversed(exits), reversed(self.shells), strict=True
        ):
            tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            pairs = zip(tensors, gradients, strict=True)
            known = [(t, g) for t, g in pairs if t.requires_grad and (g is not None or t is loss)]
            if known:
                torch.autograd.backward(*zip(*known, strict=True))
            leaves = [t for t in pytree.tree_leaves(entry) if isinstance(t, torch.Tensor)]
            gradients = [leaf.grad for leaf in leaves]
            self._collect(shell)
        return loss.detach()

    def _collect(self, shell):
        for name, leaf in shell.parameters.items():
            if leaf.grad is not None:
                self.grads[name] = self.grads[name] + leaf.grad if name in self.grads else leaf.grad
                leaf.grad = None


def plain_gradients(model, microbatches, loss_of):
    """Losses and gradients of an ordinary loop over the same microbatches."""
    model.zero_grad(set_to_none=True)
    losses = []
    for inputs in microbatches:
        more = {} if "input_ids" not in (inputs.kwargs or {}) else {"use_cache": False}
        loss = loss_of(model(*inputs.args, **(inputs.kwargs or {}), **more))
        loss.backward()
        losses.append(loss.detach())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return losses, grads


class TinyModels:
    """Tiny causal LMs of any type that transformers knows, with fixed weights."""

    def make(self, kind, **settings):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = type(AutoConfig.for_model(kind))(**{**SIZES, **settings})
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()

    def inputs(self, lengths=(9, 13, 6), seed=0):
        """A microbatch of two sequences for each length, the first one padded on the left."""
        generator = torch.Generator().manual_seed(seed)
        microbatches = []
        for length in lengths:
            ids = torch.randint(3, 96, (2, length), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, :3] = 0
            labels = ids.masked_fill(mask == 0, -100)
            kwargs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
            microbatches.append(Inputs((), kwargs))
        return microbatches


@pytest.fixture(scope="session")
def tiny():
    return TinyModels()


@pytest.fixture(scope="session")
def chain_of():
    return Chain


@pytest.fixture(scope="session")
def plain():
    return plain_gradients
