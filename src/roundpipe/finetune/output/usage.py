"""The lines that show how to use what a run wrote; they run as they stand when pasted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roundpipe.finetune.model.source import ModelSource


def usage_lines(
    folder: str,
    source: ModelSource,
    *,
    is_adapter: bool,
    has_template: bool,
    question: str,
    model_class: str = "AutoModelForCausalLM",
) -> list[str]:
    """Python lines that load the result from ``folder`` and let it answer ``question``."""
    if is_adapter:
        loading = _adapter_lines(folder, source, model_class)
    else:
        loading = _model_lines(folder, model_class)
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({folder!r})"
    return [*loading, tokenizer, *_asking_lines(question, has_template=has_template)]


def _model_lines(folder: str, kind: str) -> list[str]:
    return [
        f"from transformers import {kind}, AutoTokenizer",
        f"model = {kind}.from_pretrained({folder!r})",
    ]


def _adapter_lines(folder: str, source: ModelSource, kind: str) -> list[str]:
    lines = [
        "from peft import PeftModel",
        f"from transformers import {kind}, AutoTokenizer",
    ]
    place = repr(source.hub_id or source.location)  # never a cache's folder
    if source.package is not None:
        lines.insert(0, "import importlib.util")
        place = f"importlib.util.find_spec({source.package!r}).submodule_search_locations[0]"
        lines.append(f"folder = {place}")
        place = "folder"
    if source.gguf_file is not None:
        place += f", gguf_file={source.gguf_file!r}"
    if source.revision is not None:
        place += f", revision={source.revision!r}"
    return [
        *lines,
        f"base = {kind}.from_pretrained({place})",
        f"model = PeftModel.from_pretrained(base, {folder!r})",
    ]


def _asking_lines(question: str, *, has_template: bool) -> list[str]:
    if has_template:
        asking = [
            f'chat = [{{"role": "user", "content": {question!r}}}]',
            "inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, "
            'return_tensors="pt", return_dict=True)',
        ]
    else:
        asking = [f'inputs = tokenizer({question!r}, return_tensors="pt")']
    return [
        *asking,
        "output = model.generate(**inputs, max_new_tokens=64, do_sample=False)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], '
        "skip_special_tokens=True))",
    ]
