"""What a run says in the end, and its model card, done as they say."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roundpipe.finetune.output.terminal import Terminal
from roundpipe.finetune.run.loop import train


def run(config: Any) -> tuple[Path, str]:
    stream = io.StringIO()
    result = train(config, terminal=Terminal(stream))
    assert result is not None
    return result.folder, stream.getvalue()


def python_in(card: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    return str(code)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21
@pytest.mark.parametrize(
    "changes",
    [
        {"finetuning_type": "full"},
        {"finetuning_type": "lora", "use_dora": True},
        {"finetuning_type": "qlora", "dtype": "bf16"},
    ],
    ids=lambda changes: changes["finetuning_type"],
)
def test_the_python_lines_of_a_run_let_its_result_answer(
    changes: dict[str, Any],
    config_of: Any,
    tiny: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if changes["finetuning_type"] == "qlora":  # smaller matrices are not packed
        base = tiny.write_tiny_folder(tmp_path / "base", hidden_size=64, intermediate_size=128)
        changes = {**changes, "model_name_or_path": str(base)}
    output = tmp_path / 'it\'s "my" run'
    folder, shown = run(config_of(**changes, output_dir=str(output), sample_prompts=["1 + 1?"]))
    code = python_in((folder / "README.md").read_text())
    assert code in shown
    assert ("quantization_config" in code) == (changes["finetuning_type"] == "qlora")
    scope: dict[str, Any] = {}
    exec(compile(code, "lines", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.strip() == _answered(scope)


def _answered(scope: dict[str, Any]) -> str:
    """What plain transformers decodes greedily for the same question."""
    tokenizer = scope["tokenizer"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    made = scope["model"].generate(**inputs, max_new_tokens=64, do_sample=False)
    start = inputs["input_ids"].shape[1]
    return str(tokenizer.decode(made[0, start:], skip_special_tokens=True)).strip()


def test_the_card_of_a_run_tells_what_was_trained_and_nothing_of_the_data(
    config_of: Any, tiny_data: Path
) -> None:
    folder, shown = run(config_of(val_size=3, eval_steps=2, max_length=60, max_steps=4))
    text = (folder / "README.md").read_text()
    _, head, body = text.split("---\n", maxsplit=2)
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["roundpipe", "lora", "sft"],
    }
    assert str(tiny_data) not in text
    for part in (
        "LoRA r=4 (",
        "| `learning_rate` | 0.01 |",
        "| `r` | 4 |",
        "| `target_modules` |",
        "| `dtype` | float32 |",
        "cut at max_length 60",
        "- evaluation: 3 samples",
        "- training: ",
        "at step 4, the best ",
    ):
        assert part in body, part
    assert f"the adapter is in {folder} " in shown
    assert f"roundpipe chat {folder}" in shown
    assert not list(folder.glob("checkpoint-*/README.md"))
