import ast

import pytest

from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.usage import usage_lines


def lines_for(source: ModelSource, *, is_adapter: bool, has_template: bool = True) -> str:
    lines = usage_lines(
        "out", source, is_adapter=is_adapter, has_template=has_template, question='it\'s "so"?'
    )
    text = "\n".join(lines)
    ast.parse(text)  # it is Python, whatever the question holds
    assert all(line == line.lstrip() for line in lines)  # indented lines cannot be pasted
    return text


@pytest.mark.parametrize(
    ("source", "loading"),
    [
        (ModelSource("./base", "./base"), "from_pretrained('./base')"),
        (ModelSource("a/b@v1", "a/b", revision="v1"), "from_pretrained('a/b', revision='v1')"),
        (
            ModelSource("x/m.gguf", "x", gguf_file="m.gguf"),
            "from_pretrained('x', gguf_file='m.gguf')",
        ),
        (
            ModelSource("package:p/m.gguf", "/site/p", gguf_file="m.gguf", package="p"),
            "from_pretrained(folder, gguf_file='m.gguf')",
        ),
    ],
)
def test_an_adapter_needs_its_base_as_the_user_named_it(source: ModelSource, loading: str) -> None:
    text = lines_for(source, is_adapter=True)
    assert f"base = AutoModelForCausalLM.{loading}" in text
    assert "PeftModel.from_pretrained(base, 'out')" in text
    assert "/site" not in text  # no path of this machine


def test_a_whole_model_needs_no_base() -> None:
    text = lines_for(ModelSource("./base", "./base"), is_adapter=False)
    assert "peft" not in text
    assert "model = AutoModelForCausalLM.from_pretrained('out')" in text


def test_without_a_template_the_question_is_plain_text() -> None:
    text = lines_for(ModelSource("./base", "./base"), is_adapter=False, has_template=False)
    assert "apply_chat_template" not in text
