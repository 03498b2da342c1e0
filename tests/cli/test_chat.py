"""`roundpipe chat`, from its words to what is written where."""

from __future__ import annotations

import io
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.finetune import tiny_model

from roundpipe.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What transformers says of tiny models, and peft of names that are about to go.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in ``tiny``, and an adapter of it in ``out``: both say much."""
    import torch
    from peft import LoraConfig, get_peft_model

    place = tmp_path_factory.mktemp("chat")
    model = tiny_model.tiny_model(tied=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
    model.save_pretrained(place / "tiny")
    tiny_model.tiny_tokenizer().save_pretrained(place / "tiny")
    config = LoraConfig(
        r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(place / "tiny")
    adapted.save_pretrained(place / "out")
    return place


Said = tuple[int, str, str]


@pytest.fixture
def chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """Run the command in the folder with a piped ``stdin``: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)

    def run(*words: str, stdin: bytes = b"") -> Said:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(["chat", *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_prompt_is_answered_on_stdout_and_all_else_is_said_on_stderr(
    chat: Callable[..., Said],
) -> None:
    code, out, err = chat("out", "prompt=what is 3 + 3?", "max_new_tokens=12")
    assert code == 0
    assert len(out) > 3
    assert out.count("\n") == 1
    assert "resident on cpu" in err
    assert "tokens/s (estimate)" in err
    assert "12 tokens in" in err


def test_piped_lines_are_answered_in_their_order_and_as_json_each_beside_its_row(
    chat: Callable[..., Said],
) -> None:
    lines = "so so what is 1 + 1?\n\r\nwhat is 2 + 2?\r\nwhat?"
    options = ("max_new_tokens=6", "batch_size=2", "devices=cpu*3")
    code, out, _ = chat("out", *options, stdin=lines.encode())
    assert code == 0
    answers = out.rstrip("\n").split("\n\n")
    assert len(answers) == 3
    rows = [
        {"messages": [{"role": "user", "content": "so so what is 1 + 1?"}], "id": 7},
        "what is 2 + 2?",
        {"prompt": "what?", "name": "é"},
    ]
    given = "".join(json.dumps(row) + "\n" for row in rows).encode()
    code, out, _ = chat("out", "--json", *options, stdin=given)
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["answer"] for row in found] == answers
    assert found[0]["id"] == 7
    assert found[1]["prompt"] == "what is 2 + 2?"
    assert found[2]["name"] == "é"


def test_a_prompt_beyond_what_the_model_was_made_for_is_told(chat: Callable[..., Said]) -> None:
    short = ("max_new_tokens=2",)
    code, _, err = chat("tiny", *short, stdin=b"a" * 600 + b"\nb\n" + b"c" * 700 + b"\n")
    assert code == 0
    assert err.count("the model was made for 512: its answer may mean nothing") == 1
    _, _, err = chat("tiny", "prompt=" + "a" * 600, *short)
    assert "warning: a prompt has 6" in err
    _, _, err = chat("tiny", "prompt=" + "a" * 60, *short)
    assert "warning" not in err


def test_half_a_character_is_refused_and_bytes_of_another_locale_are_read(
    chat: Callable[..., Said],
) -> None:
    code, _, err = chat("tiny", "--json", stdin=b'"half \\ud83d"\n')
    assert code == 2
    assert "not a character" in err
    code, _, err = chat("tiny", "prompt=\udcff")
    assert code == 2
    assert err.startswith("not UTF-8: prompt=")
    _, expected, _ = chat("tiny", "prompt=é", "max_new_tokens=2")
    _, found, _ = chat("tiny", "prompt=\udcc3\udca9", "max_new_tokens=2")  # as the C locale has it
    assert found == expected


def test_the_base_answers_beside_the_adapter(chat: Callable[..., Said]) -> None:
    asked = ("prompt=what is 3 + 3?", "max_new_tokens=6")
    _, alone, _ = chat("tiny", *asked)
    _, tuned, _ = chat("out", *asked)
    assert alone != tuned
    code, out, _ = chat("out", "compare=base", *asked)
    assert code == 0
    assert out == f"base: {alone.rstrip()}\nadapter: {tuned.rstrip()}\n"
    _, out, _ = chat("out", "compare=base", "--json", *asked)
    assert json.loads(out)["answer"] == tuned.rstrip()
    code, _, err = chat("tiny", "compare=base", *asked)
    assert code == 2
    assert "compare=base is of an adapter" in err


def test_keys_of_the_config_count_weights_may_be_streamed(chat: Callable[..., Said]) -> None:
    asked = ("prompt=what is 3 + 3?", "max_new_tokens=6")
    _, resident, _ = chat("out", *asked)
    code, out, err = chat("out", "device_memory_limit=120kB", *asked)
    assert code == 0
    assert "streamed to cpu: 0 of 2 blocks stay" in err
    assert out == resident
    _, sampled, _ = chat("out", "temperature=5", "seed=1", *asked)
    _, again, _ = chat("out", "temperature=5", "seed=1", *asked)
    assert sampled == again != resident


def test_the_system_prompt_is_asked_with(chat: Callable[..., Said]) -> None:
    asked = ("--json", "max_new_tokens=4")
    row = {
        "messages": [
            {"role": "system", "content": "be: brief #1"},
            {"role": "user", "content": "what?"},
        ]
    }
    _, out, _ = chat("out", *asked, stdin=json.dumps(row).encode())
    _, same, _ = chat("out", *asked, "--system", "be: brief #1", stdin=b'"what?"')
    assert json.loads(out)["answer"] == json.loads(same)["answer"]


def test_a_model_without_a_template_goes_on_with_plain_text(
    chat: Callable[..., Said], folder: Path
) -> None:
    if not (folder / "plain").exists():
        tiny_model.write_tiny_folder(folder / "plain", template=None)
    code, out, err = chat("plain", "prompt=[a b, c]", "max_new_tokens=4")
    assert code == 0
    assert err.count("no chat template") == 1
    assert out.count("\n\n") == 1


def test_an_empty_input_is_no_mistake_and_loads_nothing(chat: Callable[..., Said]) -> None:
    code, out, err = chat("no such model", stdin=b"\n\n")
    assert (code, out) == (0, "")
    assert err == "no prompts: the input is empty\n"


@pytest.mark.parametrize(
    ("words", "stdin", "problem"),
    [
        (["temperature=-1", "prompt=x"], b"", "not a number from 0 on: temperature=-1"),
        (["top_p=1.5", "prompt=x"], b"", "more than 1: top_p=1.5"),
        (["top_k=a", "prompt=x"], b"", "no whole number from 0 on: top_k=a"),
        (["max_new_tokens=0", "prompt=x"], b"", "no whole number from 1 on: max_new_tokens=0"),
        (["compare=other", "prompt=x"], b"", "compare with what: compare=other"),
        (["prompt=x", "json=3"], b"", "neither true nor false: json=3"),
        (["--prompt"], b"", "nothing follows --prompt"),
        (["temprature=1", "prompt=x"], b"", "temperature"),
        (["--json"], b'{"prompt": "a"}\n{"prompt": 3}\n', "line 2 of the input has no prompt"),
        (["--json"], b"{]\n", "line 1 of the input is not JSON"),
        ([], b"a\n\xff\n", "line 2 of the input is not UTF-8"),
        (["--json"], b'{"messages": [{"role": "king"}]}', "line 1 of the input: message 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_way_out(
    chat: Callable[..., Said], words: list[str], stdin: bytes, problem: str
) -> None:
    code, _, err = chat("out", *words, stdin=stdin)
    assert code == 2
    assert problem in err
    assert "\n  hint: " in err or "input: message" in err


def test_a_reader_that_has_enough_ends_it_quietly(
    chat: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert chat("out", "prompt=x", "max_new_tokens=3")[0] == 0


def test_ctrl_c_while_prompts_are_answered_leaves_with_130(
    chat: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.output.sample import Answerer

    made = Answerer._made

    def interrupted(self: Answerer, *args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return made(self, *args, **kwargs)

    monkeypatch.setattr(Answerer, "_made", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = chat("out", stdin=b"a\nb\n")
    assert (code, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
