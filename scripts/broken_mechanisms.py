"""Break one mechanism at a time, and compare a small step with what plain PyTorch gives.

Each mechanism hands something on that nobody sees: a gradient beside the hidden state, what forward
keeps for its recompute, a weight that the next token needs. Without it a step goes on all the same
and trains something else, so each must show in numbers; each experiment is also run as it is.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, doing_recompute
from roundpipe.device.fake import FakeDevice
from roundpipe.engine import call, graph
from roundpipe.engine.choices import Replaying
from roundpipe.engine.layer_run import LayerRuns, Role
from roundpipe.engine.random import Undrawn
from roundpipe.engine.residence import Residence
from roundpipe.engine.run import KeptData
from roundpipe.engine.state import BufferState
from roundpipe.errors import RoundPipeError
from roundpipe.models import causal_layers
from roundpipe.models.packet import Flow
from roundpipe.optim import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Experiment = Callable[[], str | None]  # what differs from plain PyTorch, if anything

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PER_LAYER = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 48,
    "num_kv_shared_layers": 2,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
}
ROUTED = {"num_hidden_layers": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.5}
BART = {
    "d_model": 16,
    "decoder_layers": 2,
    "decoder_ffn_dim": 24,
    "decoder_attention_heads": 2,
    "vocab_size": 48,
    "dropout": 0.0,
}
EACH = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(1, 2), range(1)])
WIDTH, MICROBATCHES = 6, 3
IN_STAGES = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=EACH)


# ---- experiments


def made(kind: str, **settings: Any) -> Any:
    """A tiny causal LM, in training mode."""
    import transformers  # noqa: PLC0415 (imports late)

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma4' else ''}Config")(**settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).train()


def of_a_causal_lm(
    kind: str, settings: dict[str, Any], *, shifts: bool = True, **asked: Any
) -> Experiment:
    """Loss and gradients of one call on two devices, each microbatch weighed by its tokens."""

    def compare() -> str | None:
        model = made(kind, **settings)
        ids = torch.randint(3, 48, (4, 7), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[0, 1:4] = -100
        labels[3, 0] = -100
        batch = {"input_ids": ids, "labels": labels}
        plain = copy.deepcopy(model)
        counts = [int((part[:, int(shifts) :] != -100).sum()) for part in labels.chunk(2)]
        losses = []
        for rows, count in zip((slice(0, 2), slice(2, 4)), counts, strict=True):
            part = {name: tensor[rows] for name, tensor in batch.items()}
            loss = plain(**part, **asked, use_cache=False).loss
            losses.append(loss * (count / sum(counts)))
            losses[-1].backward()
        with RoundPipe(model, devices="cpu*2") as pipe:
            config = RoundPipeRunConfig(num_microbatch=2)
            loss = pipe.forward_backward(input_kwargs={**batch, **asked}, run_config=config)
            return differing(plain, pipe.gradients(), (loss, sum(losses)))

    return compare


def differing(plain: nn.Module, gradients: dict[str, Any], loss: tuple[Any, Any]) -> str | None:
    """What is not as in the plain model."""
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    if gradients.keys() != expected.keys():
        return "other gradients"
    wrong = [n for n, g in expected.items() if not torch.allclose(gradients[n], g, 1e-4, 1e-6)]
    if not torch.allclose(*map(torch.as_tensor, loss), rtol=1e-5):
        return "the loss"
    return "gradients" if wrong else None


class Averages(nn.Module):
    """Returns what hangs on a buffer that goes from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Subtract the average so far, and count ``x`` among it."""
        if x.isnan().any():
            raise ValueError("not a number")
        before = self.average.clone()
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return torch.tanh(self.linear(x - before))


class Chooses(nn.Module):
    """The two largest of each row; alone a recompute would take the smallest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let through what is chosen."""
        y = self.linear(x)
        chosen = (-y if doing_recompute() else y).topk(2).indices
        return x + torch.zeros_like(x).scatter(1, chosen, y.gather(1, chosen))


class DropsLate(nn.Module):
    """Begins to drop out at more than two rows; its result is linear in its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop out, where there are many rows, and scale."""
        return (nn.functional.dropout(x) if len(x) > 2 else x) * self.weight


def chain(first: nn.Module) -> nn.Sequential:
    """Three layers."""
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).train()


def points(seed: int = 0) -> torch.Tensor:
    """A batch of three microbatches."""
    return torch.randn(2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(pipe: RoundPipe, x: torch.Tensor) -> torch.Tensor:
    """One call in which each layer is a stage and recomputed, but for the last."""
    loss: torch.Tensor = pipe.forward_backward(
        (x,), loss_fn=lambda y, _: y.square().sum(), run_config=IN_STAGES
    )
    return loss


def of_a_chain(kind: type[nn.Module]) -> Experiment:
    """Loss and gradients of one call."""

    def compare() -> str | None:
        model, x = chain(kind()), points()
        plain, losses = copy.deepcopy(model), []
        for part in x.chunk(MICROBATCHES):
            losses.append(plain(part).square().sum())
            losses[-1].backward()
        with RoundPipe(model, devices="cpu*2") as pipe:
            loss = train(pipe, x)
            return differing(plain, pipe.gradients(), (loss, sum(losses)))

    return compare


def writes_to_its_input() -> str | None:
    """A caller who writes to what he gave before he runs backward."""
    model, x = chain(nn.Linear(WIDTH, WIDTH)), points()
    plain = copy.deepcopy(model)
    expected = plain(x).square().sum()
    expected.backward()
    with RoundPipe(model, devices="cpu*2") as pipe:
        loss = pipe(x, roundpipe_run_config=IN_STAGES).square().sum()
        x.zero_()
        loss.backward()
        return differing(plain, pipe.gradients(), (loss, expected))


def drops_late() -> str | None:
    """A call that draws nothing, then one that does: its gradient must be of what it returned."""
    model = nn.Sequential(DropsLate(), nn.Identity(), nn.Identity()).train()
    with RoundPipe(model, devices="cpu", seed=1) as pipe:
        for x in (points(), torch.cat((points(1), points(2)))):
            pipe.zero_grad()
            loss = pipe.forward_backward((x,), loss_fn=lambda y, _: y.sum(), run_config=IN_STAGES)
        total = pipe.gradients()["0.weight"].sum()  # of something linear with weights of 1
        return None if torch.allclose(total, loss, atol=1e-4) else "gradients"


def fails() -> str | None:
    """A call that fails in its last microbatch leaves buffers as they were."""
    with RoundPipe(chain(Averages()), devices="cpu*2") as pipe:
        optimizer = AdamW(pipe.optim_parameters())
        train(pipe, points())
        pipe.step(optimizer)
        before = pipe.state_dict()["0.average"].clone()
        train(pipe, points(1))  # of the step that fails
        bad = points(2)
        bad[-1] = float("nan")
        try:
            train(pipe, bad)
        except RoundPipeError:
            after = pipe.state_dict()["0.average"]
            return None if torch.equal(before, after) else "buffers"
        return "no failure"


def generates() -> str | None:
    """Tokens of a model of which two blocks fit, on a device that believes events alone."""
    from roundpipe.engine.generation import generate  # noqa: PLC0415

    model = made("Llama", num_hidden_layers=4, **TINY)
    given = {"input_ids": torch.tensor([[1, 7, 9]]), "max_new_tokens": 4, "do_sample": False}
    expected = copy.deepcopy(model).eval().generate(**given)
    where = {"device_bytes": 0, "newest": False, "output_device": torch.device("cpu")}
    with RoundPipe(model, devices=[FakeDevice()]) as pipe:
        found = generate(pipe._engine, (), given, **where)
    return None if torch.equal(found, expected) else "tokens"


CARRIES = of_a_causal_lm("Gemma4", TINY | PER_LAYER)
ROUTES = of_a_causal_lm("Mixtral", TINY | ROUTED, output_router_logits=True)
DECODES = of_a_causal_lm("Bart", BART, shifts=False)
BUFFERS, CHOICES = of_a_chain(Averages), of_a_chain(Chooses)


# ---- what is broken


def detached(tree: Any) -> Any:
    """A tree without a graph."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def without_gradient(original: Any) -> Any:
    """What a method returns without a graph."""
    return lambda *given: detached(original(*given))


def carried_without_gradient(original: Any) -> Any:
    """A packet beside whose hidden state nothing has a graph."""

    def after(*given: Any) -> Any:
        packet = original(*given)
        return packet._replace(carried=detached(packet.carried))

    return after


def collected_without_gradient(original: Any) -> Any:
    """The forward that runs elsewhere gets what was collected without a graph."""
    return lambda packet, index: original(
        packet._replace(collected=detached(packet.collected)), index
    )


def of_the_microbatch_before(original: Any) -> Any:
    """A recompute gets what another microbatch's forward has kept."""
    return lambda self, layers, at: original(self, layers, (at - 1) % MICROBATCHES)


def as_the_forward_left_them(original: Any) -> Any:
    """A recompute begins with the buffers that its forward ended with."""

    def end(self: Any, task: Any, shell: Any, *more: Any) -> Any:
        values = {name: value.clone() for name, value in shell.buffers.items()}
        kept = original(self, task, shell, *more)
        return {name: values[name] for name in kept} if task.role is Role.FORWARD else kept

    return end


def chosen_anew(_: Any) -> Any:
    """A recompute chooses for itself."""

    def replay(self: Any, _func: Any, _args: Any, _kwargs: Any, run: Any) -> Any:
        self._at += 1
        return run()

    return replay


def as_any_loss(original: Any) -> Any:
    """The router's loss is not known to be there."""
    return lambda parts, kwargs, rule: original(parts, {"labels": kwargs["labels"]}, rule)


def shifted_all_the_same(original: Any) -> Any:
    """The first label of a sequence is never counted."""
    return lambda labels, **_: original(labels)


def nothing(_: Any) -> Any:
    """Nothing is done."""
    return lambda *_, **__: None


def as_given(_: Any) -> Any:
    """The caller's own tensors are read."""
    return lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


# what is broken: its owner, its name there, how, and the experiment that must notice
MECHANISMS: dict[str, tuple[Any, str, Any, Experiment]] = {
    "what is carried has no gradient": (Flow, "after", carried_without_gradient, CARRIES),
    "what is written has no gradient": (Flow, "written", without_gradient, CARRIES),
    "what is collected has no gradient": (
        causal_layers,
        "hand_over",
        collected_without_gradient,
        ROUTES,
    ),
    "the router's loss of each microbatch whole": (call, "_own_loss", as_any_loss, ROUTES),
    "first labels left out": (call, "count_trained_tokens", shifted_all_the_same, DECODES),
    "kept data of another microbatch": (KeptData, "take", of_the_microbatch_before, BUFFERS),
    "buffers of forward's end": (LayerRuns, "_end_buffers", as_the_forward_left_them, BUFFERS),
    "choices made anew": (Replaying, "__call__", chosen_anew, CHOICES),
    "late draws not seen": (Undrawn, "has_drawn", nothing, drops_late),
    "buffers of a failed step stay": (BufferState, "take_back", nothing, fails),
    "inputs not copied": (graph, "_cut", as_given, writes_to_its_input),
    "generation waits for no upload": (Residence, "_wait", nothing, generates),
}


@contextmanager
def broken(owner: Any, name: str, how: Any) -> Iterator[None]:
    """Have something replaced inside."""
    original = vars(owner)[name]
    setattr(owner, name, how(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def noticed(experiment: Experiment, breaking: Any = None) -> str | None:
    """What an experiment says, or the error that it ends with."""
    with breaking if breaking is not None else nullcontext():
        try:
            return experiment()
        except Exception as error:  # whatever it is, it was noticed
            return type(error).__name__


def break_each() -> Iterator[tuple[str, str | None]]:
    """Yield each mechanism and what noticed that it was broken.

    Raises RuntimeError if an experiment fails with nothing broken.
    """
    for name, (*_, experiment) in MECHANISMS.items():
        wrong = noticed(experiment)
        if wrong is not None:
            raise RuntimeError(f"with nothing broken, where this is to show: {name}: {wrong}")
    for name, (owner, attribute, how, experiment) in MECHANISMS.items():
        yield name, noticed(experiment, broken(owner, attribute, how))
