"""Let the model answer a few questions while it is being trained, without disturbing it.

The answers come from a copy of the module tree around the newest weights: no weight is copied, and
neither the training mode nor the parameters of the model that is trained are touched. Decoding is
greedy, and the random state is put back all the same (a model may draw in places of its own).
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig

from roundpipe.finetune.model.from_transformers import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 64
_BYTES_PER_THREAD = 1 << 29


def answer_prompts(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """Answer each prompt greedily with ``weights``, on the host, one after another.

    A prompt goes through the chat template as a user's message where the tokenizer has one.
    """
    if not prompts:
        return []
    copied: Any = copy_around(model, weights).eval()
    settings = _greedy(copied, tokenizer, max_new_tokens)
    with (
        _fewer_threads(copied),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(),
        quiet_transformers(),
    ):
        return [_answer(copied, tokenizer, prompt, settings) for prompt in prompts]


def copy_around(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Copy the module tree of ``model`` around ``weights``; tensors are shared, not copied.

    Parameters that ``weights`` does not name, and all buffers, are those of ``model``.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = weights.get(name, parameter)
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(tensor.detach(), requires_grad=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        memo[id(buffer)] = weights.get(name, buffer)
    return copy.deepcopy(model, memo)


def _greedy(
    model: Any, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> GenerationConfig:
    """Greedy decoding that ends where the model or its template ends a turn.

    ``generate`` takes whatever is not said here from the model's own generation config.
    """
    own = getattr(model, "generation_config", None)
    ends = _as_list(getattr(own, "eos_token_id", None)) + _as_list(tokenizer.eos_token_id)
    pads = _as_list(tokenizer.pad_token_id) + ends
    kind: Any = GenerationConfig
    settings: GenerationConfig = kind(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(set(ends)) or None,
        pad_token_id=pads[0] if pads else None,
    )
    return settings


def _answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, settings: GenerationConfig
) -> str:
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    output = model.generate(
        input_ids=ids, attention_mask=inputs["attention_mask"], generation_config=settings
    )
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return str(answer).strip()


@contextlib.contextmanager
def _fewer_threads(model: nn.Module) -> Iterator[None]:
    """Give a thread at least half a gigabyte of weights to read for each token.

    With less its threads mostly wait for each other, and where the machine is busy with something
    else as well they wait a scheduler's slice each time: 135 M weights took 78 s in place of 4.
    """
    threads = torch.get_num_threads()
    size = sum(parameter.nbytes for parameter in model.parameters())
    torch.set_num_threads(max(1, min(threads, size // _BYTES_PER_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
