"""A tokenizer of a few hundred tokens, and chat templates of several styles."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}"
    "<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }}</s>"
    "{% else %}{{ raise_exception('only user and assistant turns') }}{% endif %}{% endfor %}"
)
OPEN = (  # no end token anywhere
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REWRITES = (  # only the last answer keeps its reasoning
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKS_OTHERWISE = (  # the header that asks has a word that the conversation has not
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CANNOT = (  # nothing that asks for an answer stands before one
    "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}>>{% endif %}"
)
DOUBLED = "<s><s>" + CHATML

_CORPUS = [
    "What is the capital of France? Paris is the capital of France.",
    "user assistant [INST]",
]


def make(template: str | None = CHATML, *, eos: str = "<|im_end|>", pad: str | None = None) -> Any:
    """A byte-level BPE tokenizer; ``pad`` defaults to the end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 5, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        pad_token=pad or eos,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        name_or_path="tiny/model",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def trained_runs(sample: Any, tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, label in zip(sample.input_ids, sample.labels, strict=True):
        if label != -100:
            assert label == token
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = label != -100
    return [tokenizer.decode(run) for run in runs]
