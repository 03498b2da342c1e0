"""The lines that use what was trained, tool by tool; they work as they stand when pasted.

A line stands here only if the tool takes this result as it is. Where it does not, `limits.py` says
why, and the way out is to merge the adapter first. Shell lines are quoted so that they mean the
same in a POSIX shell and in those of Windows; Python lines are never indented, which would keep
them from being pasted.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roundpipe.finetune.output.limits import reasons_against, vllm_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roundpipe.finetune.model.source import ModelSource

QUESTION = "What is the capital of France?"
TOOLS = {
    "roundpipe": "RoundPipe",
    "python": "Python",
    "vllm": "vLLM",
    "llama.cpp": "llama.cpp",
    "ollama": "ollama",
}
_PLAIN = re.compile(r"[\w@%+=:,./~-]+", re.ASCII)
_UNSAFE = re.compile(r'[$`"!%\n]|\\$')  # what double quotes do not take the meaning of


@dataclass(frozen=True)
class Result:
    """Something trained, in a folder.

    ``source``: what an adapter is put on, or what a whole model was trained from. ``peft``: the
    fields of ``adapter_config.json``; None for a whole model. ``is_packed``: trained over weights
    in 4 bits; ``dtype``: torch's name of the one it computes in. ``is_tied``: head and embedding
    are one weight. ``question``: what the lines ask.
    """

    folder: str
    source: ModelSource
    question: str = QUESTION
    peft: Mapping[str, Any] | None = None
    model_class: str = "AutoModelForCausalLM"
    has_template: bool = True
    is_packed: bool = False
    dtype: str = "bfloat16"
    is_tied: bool = False

    @property
    def path(self) -> str:
        """The folder for Python, which knows no ``~``."""
        return str(Path(self.folder).expanduser()) if self.folder[:1] == "~" else self.folder

    @property
    def name(self) -> str:
        """A word for what servers call it."""
        last = Path(self.folder).expanduser().resolve().name
        return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-") or "tuned"


@dataclass(frozen=True)
class Block:
    """How one tool uses a result: ``lines``, or why it cannot as it is (``reasons``)."""

    tool: str
    language: Literal["sh", "python"]
    lines: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The tool's name as it writes it."""
        return TOOLS[self.tool]


def usage_lines(result: Result) -> list[Block]:
    """A block for each of `TOOLS`, in that order."""
    made = [
        Block("roundpipe", "sh", tuple(_roundpipe_lines(result))),
        Block("python", "python", tuple(_python_lines(result))),
    ]
    for tool, lines in (("vllm", _vllm_lines), ("llama.cpp", _llama_cpp_lines)):
        made.append(_of_other(tool, result, lines(result)))
    made.append(_of_other("ollama", result, _ollama_lines(result)))
    return made


def short_lines(result: Result) -> list[str]:
    """What a terminal shows: the first two blocks whole, a line for each other tool."""
    roundpipe, python, *others = usage_lines(result)
    lines = [*(f"  {line}" for line in roundpipe.lines), "", "in Python:", "", *python.lines, ""]
    width = max(len(block.title) for block in others)
    for block in others:
        told = _first(block) if block.lines else f"merge it first: {block.reasons[0]}"
        lines.append(f"{block.title:{width}}  {told}")
    return lines


def quoted(word: str) -> str:
    """A word for a command line, in quotes only if it needs them."""
    if _PLAIN.fullmatch(word):
        return word
    return shlex.quote(word) if _UNSAFE.search(word) else f'"{word}"'


def _of_other(tool: str, result: Result, lines: list[str]) -> Block:
    reasons = tuple(reasons_against(tool, result.peft, result.source, is_tied=result.is_tied))
    return Block(tool, "sh", () if reasons else tuple(lines), reasons)


def _first(block: Block) -> str:
    """The first line of a block, and that there are more where there are."""
    return block.lines[0] + (" …" if len(block.lines) > 1 else "")


def _roundpipe_lines(result: Result) -> list[str]:
    folder = quoted(_as_path(result.folder))
    lines = [f"roundpipe chat {folder}"]
    if result.peft is not None:
        lines.append(f"roundpipe merge {folder}")
    return lines


def _as_path(folder: str) -> str:
    """A folder that no command line takes for a setting or an option."""
    return f"./{folder}" if re.match(r"-|[\w-]*=", folder) else folder


# ---- Python


def _python_lines(result: Result) -> list[str]:
    loading = _model_lines(result) if result.peft is None else _adapter_lines(result)
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({result.path!r})"
    return [*loading, tokenizer, *_asking_lines(result)]


def _model_lines(result: Result) -> list[str]:
    kind = result.model_class
    return [
        f"from transformers import {kind}, AutoTokenizer",
        f"model = {kind}.from_pretrained({result.path!r})",
    ]


def _adapter_lines(result: Result) -> list[str]:
    source, kind = result.source, result.model_class
    lines = ["from peft import PeftModel"]
    place = repr(source.hub_id or source.location)  # never a cache's folder
    if source.package is not None:
        lines.insert(0, "import importlib.util")
        place = f"importlib.util.find_spec({source.package!r}).submodule_search_locations[0]"
    packs = result.is_packed and source.gguf_file is None  # transformers does not do both
    lines.append(f"from transformers import {kind}, AutoTokenizer{', BitsAndBytesConfig' * packs}")
    if source.package is not None:
        lines.append(f"folder = {place}")
        place = "folder"
    if source.gguf_file is not None:
        place += f", gguf_file={source.gguf_file!r}"
    if source.revision is not None:
        place += f", revision={source.revision!r}"
    if packs:
        lines.append(
            'nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            f'bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="{result.dtype}")'
        )
        place += ", quantization_config=nf4"
    return [
        *lines,
        f"base = {kind}.from_pretrained({place})",
        f"model = PeftModel.from_pretrained(base, {result.path!r})",
    ]


def _asking_lines(result: Result) -> list[str]:
    if result.has_template:
        asking = [
            f'chat = [{{"role": "user", "content": {result.question!r}}}]',
            "inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, "
            'return_tensors="pt", return_dict=True)',
        ]
    else:
        asking = [f'inputs = tokenizer({result.question!r}, return_tensors="pt")']
    return [
        *asking,
        "output = model.generate(**inputs.to(model.device), max_new_tokens=64, do_sample=False)",
        'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], '
        "skip_special_tokens=True))",
    ]


# ---- other tools


def _vllm_lines(result: Result) -> list[str]:
    folder, name = result.folder, result.name
    if result.peft is None:
        return [f"vllm serve {quoted(folder)} --served-model-name {name}"]
    source = result.source
    base = quoted(source.hub_id or source.location)
    revision = f" --revision {quoted(source.revision)}" if source.revision else ""
    return [
        f"vllm serve {base}{revision} --enable-lora --lora-modules {quoted(f'{name}={folder}')} "
        f"--max-lora-rank {vllm_rank(result.peft)}"
    ]


def _llama_cpp_lines(result: Result) -> list[str]:
    """Two conversions and a start; the scripts lie in llama.cpp's own folder."""
    folder = result.folder
    if result.peft is None:
        return [_conversion(result), f"llama-cli -m {quoted(str(Path(folder, 'model.gguf')))}"]
    source, adapter = result.source, quoted(str(Path(folder, "adapter.gguf")))
    base, lines = quoted(source.location), []
    if source.hub_id is not None:
        base = "base"
        revision = f" --revision {quoted(source.revision)}" if source.revision else ""
        lines.append(f"hf download {source.hub_id}{revision} --local-dir base")
    return [
        *lines,
        f"python convert_lora_to_gguf.py {quoted(folder)} --base {base} --outfile {adapter}",
        f"python convert_hf_to_gguf.py {base} --outfile base.gguf",
        f"llama-cli -m base.gguf --lora {adapter}",
    ]


def _ollama_lines(result: Result) -> list[str]:
    """By llama.cpp's conversion: ollama's own knows few architectures."""
    modelfile = quoted(str(Path(result.folder, "Modelfile")))
    return [
        _conversion(result),
        f"echo FROM ./model.gguf > {modelfile}",
        f"ollama create {result.name} -f {modelfile}",
        f"ollama run {result.name}",
    ]


def _conversion(result: Result) -> str:
    file = quoted(str(Path(result.folder, "model.gguf")))
    return f"python convert_hf_to_gguf.py {quoted(result.folder)} --outfile {file}"
