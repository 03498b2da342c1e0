"""Generation of text on one device: what goes in, what comes out, how much memory it leaves.

Arguments are those of the model's own ``generate``, which runs in the caller's thread, with his
autocast and random state: a sample drawn from a seed is the one that the plain model would draw.

[Note: threads that wait] On a CPU device a token of a small model is a thousand products of some
microseconds, and threads that share one wait for each other; where the machine is busy with
something else too they wait a scheduler's slice each time: 135 M weights took 78 s in place of 4.
So a thread is to have half a gigabyte of weights to read, or that much more to compute with them.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.device.cpu import CpuDevice
from roundpipe.device.emulated import EmulatedDevice
from roundpipe.engine.residence import Residence, run_on
from roundpipe.errors import ConfigError, DeviceError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roundpipe.device.api import Device
    from roundpipe.engine.engine import Engine
    from roundpipe.models.spec import ModelSpec

HOST = torch.device("cpu")
_SLACK = 1.25  # of what generation is reckoned to take beside weights
_CACHES = ("cache", "past_key_values", "cache_params")  # as transformers calls them, new and old
_BYTES_PER_THREAD, _TOKENS_AT_ONCE = 1 << 29, 128  # see [Note: threads that wait]
_TOKENS = 20  # that transformers makes where nobody says how many


def generate(  # noqa: PLR0913 - what a call knows
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    device_bytes: int | None,
    newest: bool,
    output_device: torch.device,
    use_adapter: bool = True,
) -> Any:
    """Run the model's ``generate(*args, **kwargs)`` on the first device; nothing is under way.

    ``device_bytes``: what the device may hold, None without limit. ``newest``: with what masters
    say, where that is not published yet. Blocks until all is done; results are on
    ``output_device``, those of a cache that was given too. ``use_adapter``: False has the base
    model answer, without the adapters of ``peft``. Raises ModelError for a model that does not
    generate text, DeviceError where there is no room or nothing really computes.
    """
    model, spec = engine.models[0], engine.spec
    device = model.device
    if isinstance(device, EmulatedDevice):
        raise DeviceError(
            f"an emulated device computes nothing, so it cannot generate: {device.name}\n"
            'hint: devices="cpu"'
        )
    with torch.inference_mode(False):
        tree = tree_of(spec, device.torch_device, use_adapter=use_adapter)
    work = work_bytes(tree.module, args, kwargs)
    room = None if device_bytes is None else _made_room(engine, device_bytes - work)

    # A device's streams know nothing of the caller's: what goes in or out passes the host, and each
    # copy to it waits for what made the tensor.
    given = moved((args, dict(kwargs)), HOST)

    def run(residence: Residence) -> Any:
        there = moved(given, device.torch_device)
        if residence.streamed and device.torch_device.type != "cpu":
            there[1].setdefault("disable_compile", True)  # a graph would keep what is in a slot
        try:
            with _threads_of(tree.module, device):
                return moved(tree.module.generate(*there[0], **there[1]), HOST)
        finally:
            moved(given, HOST, caches_alone=True)

    try:
        with torch.no_grad(), Residence(model, tree, room=room, newest=newest) as residence:
            made = run_on(device, functools.partial(run, residence))
        return moved(made, output_device)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"generation does not fit {device.name}: {str(error).splitlines()[0]}\n"
            "hint: fewer sequences at a time, or a smaller max_new_tokens"
        ) from error
    finally:
        moved(given, output_device, caches_alone=True)


def refuse_cache(spec: ModelSpec, kwargs: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for a call of a causal LM that is to go on from a cache.

    Layers run on several devices, each over whole sequences: a cache would be of no one's.
    """
    for name in _CACHES if spec.computes_loss else ():
        if (kwargs or {}).get(name) is not None:
            raise ConfigError(
                f"a call does not go on from a cache: {name} is given\n"
                "hint: generate(input_ids, …) keeps one; else give whole sequences"
            )


def tree_of(spec: Any, device: torch.device, *, use_adapter: bool = True) -> Any:
    """The whole model as a tree for ``device``; raises ModelError if it has no ``generate``."""
    if not hasattr(spec, "split"):
        raise ModelError(
            f"{type(spec.module).__name__} does not generate text: it is no causal LM\n"
            "hint: wrap the causal LM itself"
        )
    from roundpipe.models.generating import GeneratingTree  # noqa: PLC0415 (imports late)

    return GeneratingTree(spec, device, use_adapter=use_adapter)


def _made_room(engine: Engine, device_bytes: int) -> int:
    """What is left of ``device_bytes``; where that is too little, training gives up what it has."""
    model = engine.models[0]
    room = device_bytes - model.device.allocated_bytes
    if room < sum(layer.slot_layout.num_bytes for layer in engine.layers):
        model.let_go()
        model.close()  # training makes what it needs anew
        room = device_bytes - model.device.allocated_bytes
    return room


@contextlib.contextmanager
def _threads_of(module: Any, device: Device) -> Iterator[None]:
    """Have a CPU device take as many threads for each pass as help it; see the note."""
    most = torch.get_num_threads()
    if most == 1 or not isinstance(device, CpuDevice):
        yield
        return
    inner = getattr(module, "get_base_model", lambda: module)()
    num_bytes = sum(parameter.nbytes for parameter in inner.parameters())

    def choose(_: Any, args: Any, kwargs: Any) -> None:
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        tokens = 1 if given is None else given.shape[:2].numel()
        threads = threads_for(num_bytes, tokens, most=most)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    handle = inner.register_forward_pre_hook(choose, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        torch.set_num_threads(most)


def threads_for(num_bytes: int, tokens: int, *, most: int) -> int:
    """Threads for a pass of ``tokens`` through so many bytes of weights on a CPU device."""
    work = num_bytes * max(1, tokens // _TOKENS_AT_ONCE)
    return max(1, min(most, work // _BYTES_PER_THREAD))


def moved(tree: Any, device: torch.device, *, caches_alone: bool = False) -> Any:
    """The tree with its tensors on ``device``; caches are moved in place, as ``generate`` writes.

    ``caches_alone``: leave other tensors where they are.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if caches_alone else leaf.to(device)
        if hasattr(leaf, "get_seq_length"):
            _move_cache(leaf, device)
        return leaf

    return pytree.tree_map(one, tree)


def _move_cache(cache: Any, device: torch.device) -> None:
    """Bring what a cache of transformers holds, layer by layer, to ``device``, in place."""
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if isinstance(value, torch.device):
                setattr(layer, name, device)
            else:
                setattr(layer, name, moved(value, device))


@dataclass(frozen=True)
class Work:
    """What generating takes beside weights, in bytes: the caches in the end, and all else."""

    cache: int
    beside: int

    @property
    def num_bytes(self) -> int:
        """All of it, with some slack."""
        return int(_SLACK * (self.cache + self.beside))


def work_bytes(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """What generating takes beside weights: the cache, logits, and the prompt's way through.

    Reckoned from the model's config, with some slack; nothing is run.
    """
    rows, prompt = _prompt_shape(args, kwargs)
    own = getattr(module, "generation_config", None)
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)

    def said(name: str, *, by_model: bool = True) -> int:
        asked = [kwargs.get(name), getattr(given, name, None)]
        asked += [getattr(own, name, None)] if by_model else []
        return int(next((value for value in asked if value is not None), 0))

    rows *= max(said("num_beams"), said("num_return_sequences"), 1)
    new = said("max_new_tokens")
    length = max(prompt + (new or _TOKENS), said("max_length", by_model=not new))
    return work_for(module, rows=rows, prompt=prompt, length=length).num_bytes


def work_for(module: Any, *, rows: int, prompt: int, length: int) -> Work:
    """`Work` for prompts of ``prompt`` tokens that grow to ``length``."""
    config = module.config.get_text_config()

    def number(name: str, otherwise: int) -> int:
        try:
            value = getattr(config, name, None)
        except RuntimeError:  # differs from layer to layer, says Gemma 4
            value = max(getattr(layer, name) for layer in config.per_layer_config)
        return value if isinstance(value, int) and value else otherwise

    size, heads = number("hidden_size", 1), number("num_attention_heads", 1)
    shared, head = number("num_key_value_heads", heads), number("head_dim", size // heads)
    element = module.dtype.itemsize
    cache = 2 * number("num_hidden_layers", 1) * shared * head * length * element
    way = 4 * prompt * (size + number("intermediate_size", 4 * size)) * element
    eager = getattr(config, "_attn_implementation", None) == "eager"
    scores = 8 * heads * prompt * prompt if eager else 0
    logits = 16 * number("vocab_size", 1)
    return Work(rows * cache, rows * (way + scores + logits))


def _prompt_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    names = ("inputs", "input_ids", "inputs_embeds")
    found = [*args[:1], *(kwargs.get(name) for name in names)]
    shapes = [value.shape for value in found if isinstance(value, torch.Tensor)]
    return (int(shapes[0][0]), int(shapes[0][1])) if shapes else (1, 1)
