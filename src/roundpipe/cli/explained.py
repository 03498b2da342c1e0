"""What ``--help`` says of each command. Every option of it is named here: commands read their own
words, so that any key of a config may stand among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_RAW = {"allow_extra_args": True, "ignore_unknown_options": True}
_RUN = (
    "RUN is the folder of a run, a checkpoint in it, a model or an adapter: a folder, a hub id or "
    "a GGUF file."
)
_KEYS = "Any key of a config may follow too: devices, dtype, device_memory_limit …"
_KEEP_LINES = "\b"  # click: the paragraph below is not filled


@dataclass(frozen=True)
class Explained:
    """A command: the words behind its name, a line for the list, a paragraph, options, example."""

    words: str
    line: str
    text: str
    options: tuple[tuple[str, str], ...]
    example: str

    def as_settings(self) -> dict[str, Any]:
        """What the decorator of a command takes."""
        width = max((len(name) for name, _ in self.options), default=0) + 2
        listed = [f"  {name:<{width}}{what}" for name, what in self.options]
        blocks = [f"{self.line} {self.text}"]
        if listed:
            blocks.append("\n".join([_KEEP_LINES, *listed]))
        return {
            "context_settings": _RAW,
            "options_metavar": self.words,
            "short_help": self.line,
            "help": "\n\n".join(blocks),
            "epilog": f"For example: {self.example}",
        }


TRAIN = Explained(
    "[FILE] [key=value …]",
    "Fine-tune a model.",
    "FILE is a YAML config (`roundpipe init` writes one); any key of it may be given on the "
    "command line as key=value, --key value or --key=value. `roundpipe schema` lists the keys. "
    "After a stop the same command goes on.",
    (),
    "roundpipe train model=MODEL dataset=DATA.jsonl output_dir=out",
)
PLAN = Explained(
    "[FILE] [key=value …] [--why] [--json] [--trace FILE] [--html FILE]",
    "Say if a job fits, how fast, how long.",
    "The job is what FILE and keys describe; nothing of it is loaded. Without a model: a table of "
    "what this machine can train. Exit code 3 where the job does not fit.",
    (
        ("machine=MACHINE", "not this machine but 1x4090,64GB, say, or a machine file"),
        ("--why", "stages, schedules compared, what a step waits for"),
        ("--json", "plain values, for programs"),
        ("--trace FILE", "the calculated steps, for Perfetto"),
        ("--html FILE", "a page with tables and timeline"),
    ),
    "roundpipe plan model=Qwen/Qwen3-32B machine=8x4090,512GB method=lora batch_size=128",
)
INIT = Explained(
    "MODEL DATA [key=value …] [-o FILE]",
    "Write a first config for a model and a dataset.",
    "Its values fit this machine and this data, each with a comment that says why; what is given "
    "as key=value is kept.",
    (
        ("machine=MACHINE", "values for 1x4090,64GB, say, in place of this machine"),
        ("-o FILE", "write it to a new file, not to the terminal"),
    ),
    "roundpipe init Qwen/Qwen3-0.6B my.jsonl -o my.yaml",
)
CHAT = Explained(
    "RUN [key=value …] [--json]",
    "Talk with a model, or have it answer prompts.",
    f"{_RUN} Prompts are those of prompt=… or, from a pipe, a line each; without any it is a "
    f"conversation. {_KEYS}",
    (
        ("prompt=TEXT", "answer this and end"),
        ("system=TEXT", "the system prompt"),
        ("max_new_tokens=N", "of an answer, at most (512)"),
        ("temperature=T", "0 is greedy; also top_p, top_k, repetition_penalty"),
        ("seed=N", "the same answer again"),
        ("compare=base", "the model of before training answers too"),
        ("--json", "a JSON object a line, in and out"),
    ),
    "roundpipe chat out",
)
EVAL = Explained(
    "RUN [key=value …] [--json]",
    "Score a model on data: loss, perplexity, right answers.",
    f"{_RUN} {_KEYS}",
    (
        ("dataset=DATA", "left out: what the run was evaluated on"),
        ("split=NAME", "the part of it that is called so"),
        ("max_samples=N", "its first N samples"),
        ("answer_pattern=REGEX", "with one group: how many answers agree in it"),
        ("max_new_tokens=N", "of an answer, at most (256)"),
        ("compare=base", "score the model of before training too"),
        ("output=FILE", "questions, answers, verdicts; a JSON object a line"),
        ("--json", "scores as JSON"),
    ),
    "roundpipe eval out dataset=test.jsonl",
)
MERGE = Explained(
    "RUN [key=value …]",
    "Put an adapter into its base: one model that everything loads.",
    f"{_RUN} {_KEYS}",
    (
        ("output_dir=FOLDER", "left out: merged, in the run's folder"),
        ("dtype=DTYPE", "of what is saved; left out: that of the base"),
        ("base=original", "trained over 4 bits: take the weights from before"),
    ),
    "roundpipe merge out output_dir=merged",
)
DOCTOR = Explained(
    "[key=value …] [--output FILE] [--save] [--json]",
    "Measure this machine; say what is slow and what that costs.",
    "Devices, links, host memory, optimizer, disk, software. Exit code 2 where results could not "
    "be trusted.",
    (
        ("devices=DEVICES", "these alone: cpu, cuda:0"),
        ("--output FILE", "write a machine file, for plan machine=FILE"),
        ("--save", "write it where later plans for this machine find it"),
        ("--json", "what was measured and found, for programs"),
    ),
    "roundpipe doctor --save",
)
