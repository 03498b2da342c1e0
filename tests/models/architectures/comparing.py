"""Compares a wrapped model with the plain one: the same microbatches, loss, logits, gradients."""

from __future__ import annotations

import copy
import inspect

import torch

import roundpipe

NUM_MICROBATCHES = 2
CLOSE = 1e-6  # of a tensor's largest value
TRAINING, POSITIONS, NO_LABELS, LAST_LOGITS, TOKENS, ROUTER = CHECKS = (
    "training on 1, 2, 3 devices",
    "position_ids",
    "no labels",
    "logits_to_keep",
    "num_items_in_batch",
    "router loss",
)


def compare(row, make_model, batch):
    """Make every comparison that the architecture has: each one's name and what came of it.

    "bits": loss, logits and every gradient are the same bits; "close": the row says why not;
    None: the model knows no such thing; all else tells what differs.
    """
    model = make_model(row)
    plain = Plain(row, model)
    found = dict.fromkeys(CHECKS)
    found.update(row.skip)
    for num_devices in (1, 2, 3):
        with wrap(model, num_devices) as wrapped:
            if TRAINING not in row.skip and found[TRAINING] in (None, "bits", "close"):
                found[TRAINING] = trained(wrapped, plain, batch)
            if num_devices == 1 and plain.takes("logits_to_keep"):
                put(found, LAST_LOGITS, seen, wrapped, plain, batch, logits_to_keep=2)
            if num_devices == 2 and plain.takes("position_ids"):
                put(found, POSITIONS, trained, wrapped, plain, batch, **positions(batch))
            if num_devices == 2 and plain.divides:
                put(found, TOKENS, trained, wrapped, plain, batch, num_items_in_batch=50)
            if num_devices == 3:
                put(found, NO_LABELS, seen, wrapped, plain, batch)
    if has_router_loss(model.config):
        put(found, ROUTER, router_loss, row, make_model, batch)
    return found


def put(found, name, check, *args, **more):
    if found[name] is None:
        try:
            found[name] = check(*args, **more)
        except roundpipe.RoundPipeError as error:
            found[name] = str(error)


def router_loss(row, make_model, batch):
    """A training call with the auxiliary loss on."""
    model = make_model(row, output_router_logits=True)
    with wrap(model, 2) as wrapped:
        return trained(wrapped, Plain(row, model), batch)


def wrap(model, num_devices):
    return roundpipe.RoundPipe(copy.deepcopy(model), devices=["cpu"] * num_devices)


def positions(batch):
    """Positions counted from the first token that is no padding, and a gap."""
    counted = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {"position_ids": counted + (counted > 6)}


def has_router_loss(config):
    """Whether the text part of a model knows an auxiliary loss of its router."""
    text = config.get_text_config()
    named = ("router_aux_loss_coef", "aux_loss_coef")
    return hasattr(text, "output_router_logits") and any(hasattr(text, name) for name in named)


def trained(wrapped, plain, batch, **more):
    """One training call against the loop: loss, logits and every gradient."""
    expected, logits, gradients = plain.train(batch, more)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
    inputs = {**batch, **more}
    loss, outputs = wrapped.forward_backward(
        input_kwargs=inputs, return_outputs=True, run_config=config
    )
    found = {name: gradient.clone() for name, gradient in wrapped.gradients().items()}
    wrapped.zero_grad()
    if found.keys() != gradients.keys():
        return f"gradients of other parameters: {sorted(found.keys() ^ gradients.keys())}"
    pairs = {"loss": (loss, expected), "logits": (outputs.logits, logits)}
    pairs |= {name: (found[name], gradient) for name, gradient in gradients.items()}
    return verdict(pairs, plain)


def seen(wrapped, plain, batch, **more):
    """The logits of a call without labels, in evaluation."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    config = roundpipe.RoundPipeRunConfig(num_microbatch=NUM_MICROBATCHES)
    plain.model.eval()
    wrapped.eval()
    with torch.no_grad():
        parts = [plain.model(**part, **plain.quiet, **more) for part in pieces(inputs)]
        found = wrapped(**inputs, **more, roundpipe_run_config=config)
    plain.model.train()
    wrapped.train()
    if found.get("loss") is not None:
        return "a loss without labels"
    return verdict({"logits": (found.logits, torch.cat([p.logits for p in parts]))}, plain)


def verdict(pairs, plain):
    """What differs, by name and by how much of the largest value; "bits" or "close" if nothing."""
    differing = {}
    for name, (found, expected) in pairs.items():
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{name}: {found.dtype} {list(found.shape)}, not {list(expected.shape)}"
        if not torch.equal(found, expected):
            scale = max(expected.abs().max().item(), 1e-3)
            differing[name] = (found - expected).abs().max().item() / scale
    far = {n: f"{d:.1e}" for n, d in differing.items() if not d <= CLOSE}
    if not plain.is_close:
        far |= {n: f"{d:.1e}" for n, d in differing.items() if n not in plain.shared}
    if far:
        return f"differ: {dict(sorted(far.items())[:4])} and {max(0, len(far) - 4)} more"
    return "close" if plain.is_close else "bits"


def pieces(batch):
    """A batch as its microbatches: as even as can be, larger ones first."""
    cut = {name: tensor.tensor_split(NUM_MICROBATCHES) for name, tensor in batch.items()}
    return [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]


class Plain:
    """A model and the loop one would write for it."""

    def __init__(self, row, model):
        self.row, self.model = row, copy.deepcopy(model)
        self.is_close = bool(row.close)
        self.quiet = {"use_cache": False} if self.takes("use_cache") else {}
        self.divides = self._divides()  # by the number of items it is given
        self.shared = shared_by_several(model)

    def takes(self, argument):
        return argument in inspect.signature(self.model.forward).parameters

    def count(self, labels):
        used = labels if self.row.all_labels else labels[..., 1:]
        return int((used != -100).sum())

    def train(self, batch, more):
        """The step's loss, all logits, and the gradients by name; None stays out."""
        total = self.count(batch["labels"])
        per_sample = {name: v for name, v in more.items() if isinstance(v, torch.Tensor)}
        others = {name: v for name, v in more.items() if name not in per_sample}
        if self.divides:
            others.setdefault("num_items_in_batch", total)
        losses, logits = [], []
        for part in pieces({**batch, **per_sample}):
            output = self.model(**part, **others, **self.quiet)
            loss = output.loss
            if not self.divides:
                loss = loss * (self.count(part["labels"]) / total)
            loss.backward()
            losses.append(loss.detach())
            logits.append(output.logits.detach())
        named = self.model.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return sum(losses[1:], losses[0]), torch.cat(logits), gradients

    def _divides(self):
        part = pieces(BATCH_OF_ONE)[0]
        with torch.no_grad():
            output = self.model(**part, **self.quiet)
            if getattr(output, "aux_loss", None) is not None:
                return False  # its weight would grow with the number of microbatches
            mean = output.loss
            try:
                half = self.model(**part, **self.quiet, num_items_in_batch=14).loss
            except TypeError:
                return False
        return torch.allclose(2 * half, mean, rtol=1e-3)


def shared_by_several(model):
    """Parameters that hang in more than one place, by their first name.

    Their uses may be in different layers: the sums of their gradients then run in another order.
    """
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {places[0] for places in names.values() if len(places) > 1}


_IDS = torch.arange(5, 21).view(2, 8)
BATCH_OF_ONE = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS), "labels": _IDS}
