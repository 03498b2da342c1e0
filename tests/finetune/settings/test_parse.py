from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe.errors import ConfigError
from roundpipe.finetune.settings.parse import RESOLVED, parse_argv, parse_value, read_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("-1e-4", -1e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("1.5e+3", 1500.0),
        ("3", 3),
        ("-1", -1),
        ("true", True),
        ("null", None),
        ("none", None),
        ("None", None),
        ("~", None),
        ("", None),
        ("nonesuch", "nonesuch"),
        ("Nullarbor", "Nullarbor"),
        ("1e-4x", "1e-4x"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("2024-01-01", "2024-01-01"),
        ("cuda:0", "cuda:0"),
        ("cpu*3", "cpu*3"),
        ("Qwen/Qwen3-8B@main", "Qwen/Qwen3-8B@main"),
        ("What is this: a test #1?", "What is this: a test #1?"),
        ("@x", "@x"),
        ("- x", "- x"),
        ("&a", "&a"),
        ("'12'", "12"),
        ("[1e-4, none, a]", [1e-4, None, "a"]),
        ("{path: a.jsonl, max_samples: 3}", {"path": "a.jsonl", "max_samples": 3}),
    ],
)
def test_a_value_means_what_it_looks_like(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_way_python_writes_a_float_is_a_number(number: float) -> None:
    assert parse_value(repr(number)) == number
    assert parse_value(f"{number:e}") == float(f"{number:e}")


def test_a_broken_value_says_where() -> None:
    with pytest.raises(ConfigError, match=r"not a YAML value: \[1, 2\nhint: line 1, column 6"):
        parse_value("[1, 2")


@pytest.mark.parametrize(
    ("line", "file", "values"),
    [
        ("my.yaml", "my.yaml", {}),
        ("a=1 b=x", None, {"a": 1, "b": "x"}),
        ("--a 1 --b=2 c=3", None, {"a": 1, "b": 2, "c": 3}),
        ("my.yaml --a-b 1 c-d=2", "my.yaml", {"a_b": 1, "c_d": 2}),
        ("--packing", None, {"packing": True}),
        ("--packing --a 1", None, {"packing": True, "a": 1}),
        ("--packing batch_size=4", None, {"packing": True, "batch_size": 4}),
        ("--text other=4", None, {"text": "other=4"}),
        ("--seed -1", None, {"seed": -1}),
        ("a=1 a=2", None, {"a": 2}),
        ("a=", None, {"a": None}),
        ("a=b=c", None, {"a": "b=c"}),
        ("--config my.yaml a=1", "my.yaml", {"a": 1}),
        ("--config=my.yaml", "my.yaml", {}),
        ("./odd=name.yaml", "./odd=name.yaml", {}),
    ],
)
def test_a_command_line_is_a_file_and_settings(line: str, file: str, values: Any) -> None:
    assert parse_argv(line.split(), known={"batch_size"}) == (file, values)


def test_a_second_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"two config files: a\.yaml and b\.yaml"):
        parse_argv(["a.yaml", "b.yaml"])


def test_a_single_dash_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not an option: -v\nhint: key=value"):
        parse_argv(["-v"])


def test_a_file_is_read_with_our_numbers_and_dashes_as_underscores(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("learning-rate: 1e-4\nmax_grad_norm: None\nx: &a {y: 1}\nz: {<<: *a, w: 2}\n")
    assert read_file(str(path)) == {
        "learning_rate": 1e-4,
        "max_grad_norm": None,
        "x": {"y": 1},
        "z": {"y": 1, "w": 2},
    }


def test_an_empty_file_has_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("# nothing\n")
    assert read_file(str(path)) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: 2\na: 3\n", r"line 3, column 1: key given twice: a"),
        (b"a: [1\nb: 2\n", r"broken YAML: .*\nhint: line 2, column 2"),
        (b"- a\n- b\n", r"not a config: .* holds a list"),
        (b"a: \xff\n", r"broken YAML"),
        (b"a: !!python/object/apply:os.getcwd []\n", r"could not determine a constructor"),
    ],
)
def test_a_broken_file_says_what_and_where(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_file(str(path))


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such config file: .*\nhint: .*/quickstart\.yaml"):
        read_file(str(tmp_path / "quickstrat.yaml"))
    with pytest.raises(ConfigError, match="there is no folder"):
        read_file(str(tmp_path / "no" / "a.yaml"))
    with pytest.raises(ConfigError, match="is a directory"):
        read_file(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("? [a, b]\n: 1\n", "a key that is a list or a mapping"),
        ("a: !!int foo\n", "invalid literal"),
        ("[" * 100_000, "recursion"),
    ],
    ids=["a list as a key", "a word as an integer", "nested without end"],
)
def test_hostile_yaml_is_broken_yaml(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_file(str(path))
    with pytest.raises(ConfigError):
        parse_value("{a: !!int foo}")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
            for old, new in zip("abcdef", "bcdefg", strict=True)
        ),
        "model: m\ndataset: &d [*d]\n",
    ],
)
def test_aliases_that_unfold_without_end_are_refused_at_once(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"broken YAML.*\n.*aliases that unfold"):
        read_file(str(file))


def test_a_few_aliases_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "few.yaml"
    file.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n")
    assert read_file(str(file)) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}


def test_a_json_file_may_be_indented_by_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"model": "m",\n\t"lr":\t5e-5,\n\t"seed": null\n}')
    assert read_file(str(path)) == {"model": "m", "lr": 5e-5, "seed": None}
    path.write_text('{"seed": 1, "seed": 2}')
    with pytest.raises(ConfigError, match="key given twice: seed"):
        read_file(str(path))
    path.write_text('{"seed": 1,, }')
    with pytest.raises(ConfigError, match=r"broken YAML: .*\nhint: line 1, column"):
        read_file(str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${HOME}/out", "/mnt/me/out"),
        ("$HOME/out", "/mnt/me/out"),
        ("${oc.env:HOME}/out", "/mnt/me/out"),
        ("${MISSING:-7}", 7),
        ("${oc.env:MISSING,x}", "x"),
        (r"lm_head(\.|$)", r"lm_head(\.|$)"),
    ],
)
def test_values_may_name_variables_of_the_environment(
    text: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"a: '{text}'\nb: [{{c: '{text}'}}]\nsample_prompts: '{text}'\n")
    expected = {"a": value, "b": [{"c": value}], "sample_prompts": text}
    assert read_file(str(path), {"HOME": "/mnt/me"}) == expected


def test_a_variable_that_is_not_set_is_no_folder_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("output_dir: ${RUNS}/1\n")
    with pytest.raises(ConfigError, match=r"output_dir: \$\{RUNS\}/1\nhint: export RUNS=…"):
        read_file(str(path), {})


def test_a_config_that_a_run_has_written_names_no_variables(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{RESOLVED}output_dir: a $NAME of ${{RUNS}}\n")
    assert read_file(str(path), {}) == {"output_dir": "a $NAME of ${RUNS}"}


def test_what_anchors_name_may_stand_under_a_key_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("x-common: &c {seed: 1, lr: 2}\n_more: [1]\n<<: *c\nlr: 3\n")
    assert read_file(str(path)) == {"seed": 1, "lr": 3}


@pytest.mark.parametrize(
    ("words", "file", "values"),
    [
        ("--no-packing --lr 1", None, {"packing": False, "lr": 1}),
        ("--no_packing=true", None, {"no_packing": True}),
        ("--report_to a b --seed 1", None, {"report_to": ["a", "b"], "seed": 1}),
        ("--target_modules q v my.yaml", "my.yaml", {"target_modules": ["q", "v"]}),
        ("--report_to wandb seed=1", None, {"report_to": "wandb", "seed": 1}),
        ("config=my.yaml seed=1", "my.yaml", {"seed": 1}),
    ],
)
def test_command_lines_of_other_trainers(
    words: str, file: str | None, values: dict[str, Any]
) -> None:
    assert parse_argv(words.split(), known={"packing", "seed", "lr"}) == (file, values)
