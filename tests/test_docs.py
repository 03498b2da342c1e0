"""Every code block in the docs runs, every example loads, the quickstart's data is as claimed."""

from __future__ import annotations

import ast
import importlib.util
import json
import operator
import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.pages import AFTER, NOT_RUN, PAPERS, ROOT, Block, all_blocks, as_script, blocks_of

QUICKSTART = ROOT / "examples" / "quickstart.jsonl"
STEP = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")
RESULT_OF = {"+": operator.add, "-": operator.sub, "x": operator.mul, "/": operator.floordiv}


REASONS = re.compile(r"needs (a card|the hub|time|a clone|[\w.-]+)|shows your own folder")
SEEN = {
    "a clone": ("clone",),
    "a card": ("card", "GPU"),
    "the hub": ("hub", "download"),
    "time": ("hour", "time"),
}


def blocks(language: str) -> list[object]:
    """Every fenced block of one language in the docs, as parameters named by file and line."""
    found = [block for block in all_blocks() if block.language == language]
    return [pytest.param(block, id=block.name) for block in found]


def commands() -> list[object]:
    """Every `roundpipe` line of the shell blocks, as words without the program's name."""
    found: list[object] = []
    for path in PAPERS:
        variables: dict[str, str] = {}
        for block in blocks_of(path):
            if block.language != "sh":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and (match := re.fullmatch(r"(\w+)=(.*)", words[0])):
                    variables[match[1]] = match[2]
                for name, value in variables.items():
                    words = [word.replace(f"${name}", value) for word in words]
                if words[:1] == ["roundpipe"]:
                    found.append(pytest.param(words[1:], id=f"{path.name}: {' '.join(words)}"))
    return found


def label(line: str) -> str:
    """What a printed line is about: its first column if it is set in columns, else its first word.

    An empty one for a line that goes on with the one before.
    """
    if line.startswith("  "):
        return re.split(r" {2,}", line[2:])[0]
    return line.split(" ", maxsplit=1)[0]


def figure(line: str) -> float:
    """The first number of a line, in its own unit; 0 without one."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", line)
    return float(found[0].replace(",", "")) if found else 0.0


def quickstart_samples() -> list[dict[str, str]]:
    return [json.loads(line) for line in QUICKSTART.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("block", blocks("python"))
def test_a_python_block_in_the_docs_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(block.text, block.name, "exec")
    if not block.reason and block.mark != AFTER:  # those after others run as part of their page
        monkeypatch.chdir(tmp_path)
        # Bars of other libraries that run for ten seconds would leave a watching thread behind.
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
        exec(code, {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("console"))
def test_a_command_in_the_docs_prints_what_stands_below_it(
    block: Block,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from roundpipe.cli import main

    monkeypatch.chdir(tmp_path)
    command, _, below = block.text.partition("\n")
    words = shlex.split(command.removeprefix("$ roundpipe "))
    assert main(words) == (3 if "does not fit" in below else 0)
    printed, shown = capsys.readouterr().out.splitlines(), below.splitlines()
    assert [label(line) for line in printed] == [label(line) for line in shown]
    # A plan may get a little better; what is shown must still be what people get.
    for ours, theirs in zip(printed, shown, strict=True):
        if label(ours) in ("gpu", "host", "disk", "speed", "longest"):
            assert figure(ours) == pytest.approx(figure(theirs), rel=0.1), (ours, theirs)


@pytest.mark.parametrize("words", commands())
def test_a_command_in_the_docs_is_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.cli import app, doctor, plan
    from roundpipe.finetune.forecast.wish import read_wish
    from roundpipe.finetune.settings.parse import parse_argv
    from roundpipe.finetune.settings.translate import KNOWN

    monkeypatch.chdir(tmp_path)
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert words[0] in known or words == ["--version"] or words[-1] == "--help"
    options = {"why", "json", "trace", "html"}
    if words[0] in ("chat", "eval", "merge", "export"):  # their values are tried where pages are
        module = importlib.import_module(f"roundpipe.cli.{words[0].replace('export', 'merge')}")
        own = {
            "answer_pattern",
            "prompt",
            *getattr(module, "OPTIONS", ()),
            *getattr(module, "_OPTIONS", ()),
        }
        given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words[2:]}
        assert given <= KNOWN | own
    if words[0] == doctor.__name__:
        from roundpipe.cli.doctor import read_wish as read_doctors

        read_doctors(words[1:])
    elif words[0] in (plan.__name__, "train"):
        _, values = parse_argv(words[1:], known=KNOWN | options)
        asked = {key: value for key, value in values.items() if key not in options}
        assert asked.keys() <= KNOWN
        if "model" in asked:
            read_wish({}, {k: v for k, v in asked.items() if k != "dataset"}, lambda _: 1)


def test_every_machine_in_the_docs_is_one() -> None:
    from roundpipe.plan import parse_machine

    texts = {
        text
        for path in PAPERS
        for text in re.findall(r"\bmachine=([\w,=/+*.-]+)", path.read_text())
        if text != "machine" and not text.endswith((".yaml", ".json"))  # an argument; a file
    }
    assert len(texts) > 8
    for text in texts:
        assert parse_machine(text.rstrip(".,")).num_devices >= 1


MODEL_KEYS = {"model", "model_name", "model_name_or_path", "base_model"}


@pytest.mark.parametrize("block", blocks("yaml"))
def test_a_machine_file_or_a_config_in_the_docs_is_read(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roundpipe.finetune.settings.config import make_config
    from roundpipe.plan import machine_of

    values = yaml.safe_load(block.text)
    if not values.keys() & (MODEL_KEYS | {"dataset", "datasets"}):
        assert machine_of(values).num_devices >= 1
        return
    monkeypatch.chdir(tmp_path)
    for other in blocks_of(block.path):  # a config may name what the page has its reader write
        if other.language == "json" and other.file:
            Path(other.file).parent.mkdir(parents=True, exist_ok=True)
            Path(other.file).write_text(other.text)
    given = {} if values.keys() & MODEL_KEYS else {"model": "m"}
    if not values.keys() & {"dataset", "datasets", "dataset_name"}:
        given["dataset"] = "my.jsonl"  # a plan needs none
    config, _ = make_config({**given, **values})
    assert config.dataset


@pytest.mark.parametrize("block", blocks("json"))
def test_the_values_of_a_plan_in_the_docs_are_its_keys(block: Block) -> None:
    from roundpipe.report.forecast import Forecast

    shown = json.loads(block.text)
    if block.file:  # a file of the reader's
        return
    amounts = dict.fromkeys(("device", "pinned_host", "pageable_host", "disk"), 0)
    made = Forecast(title="", needs=(), bytes=amounts, longest=0).as_values()
    assert list(shown) == list(made)
    assert list(shown["bytes"]) == list(amounts)


@pytest.mark.parametrize("block", blocks("jsonl"))
def test_each_line_of_data_in_the_docs_is_one_sample(block: Block) -> None:
    for line in block.text.splitlines():
        assert isinstance(json.loads(line), dict)


def test_a_block_that_is_not_run_says_why_also_to_a_reader() -> None:
    for block in all_blocks():
        if not block.mark.startswith(NOT_RUN):
            # A mark that is misspelt would be no mark.
            assert block.mark in ("", AFTER), f"{block.name}: {block.mark}"
            continue
        reason = REASONS.fullmatch(block.reason)
        assert reason is not None, f"{block.name}: {block.reason}"
        words = SEEN.get(reason[1] or "", (reason[1] or "",))
        said = (block.section + block.text).lower()
        assert any(word.lower() in said for word in words), f"{block.name}: {block.reason}"


def test_a_page_becomes_the_script_that_its_reader_would_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\nWrite `data/my.jsonl`:\n\n```jsonl\n{}\n```\n\n```sh\n"
        "NAME=a\nexit 3  # exit code 3\n```\n\n<!-- not run: needs a card -->\n```sh\nbad\n```\n\n"
        "<!-- after the blocks above -->\n```python\nprint(1)\n```\n\n```python\nalone\n```\n"
    )
    script = as_script(page, "python")
    assert "mkdir -p data\ncat > data/my.jsonl <<'END_OF_BLOCK_0'\n{}\nEND_OF_BLOCK_0" in script
    assert 'exit 3 || code=$?; test "${code:-0}" = 3; unset code' in script
    assert "python - <<'END_OF_BLOCK_3'\nprint(1)" in script
    assert "bad" not in script
    assert "alone" not in script


def test_the_site_lists_every_page_once() -> None:
    listed = re.findall(
        r"^- \[[^]]*\]\(([^)#:]+)\)", (ROOT / "docs" / "index.md").read_text(), re.M
    )
    assert len(set(listed)) == len(listed)
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(listed) == set()


def test_the_table_of_models_in_the_readme_has_every_model_and_method() -> None:
    from roundpipe.finetune.forecast.table import METHODS, MODELS

    readme = (ROOT / "README.md").read_text()
    (table,) = re.findall(
        r"^```text\n(?:·.*\n)*(1 × RTX 4090.*?)^```", readme, re.DOTALL | re.MULTILINE
    )
    _, _, heads, *rows = table.splitlines()
    assert re.split(r" {3,}", heads.strip()) == list(METHODS.values())
    names = [row.split()[0] for row in rows[: len(MODELS)]]
    assert names == [model.split("/")[1] for model in MODELS]


@pytest.mark.parametrize("index", ["docs/design/README.md", "benchmarks/README.md"])
def test_an_index_names_every_file_beside_it(index: str) -> None:
    path = ROOT / index
    suffix = ".md" if index.startswith("docs") else ".py"
    beside = {each.name for each in path.parent.glob(f"[!_]*{suffix}")} - {path.name}
    assert beside
    missing = {name for name in beside if name not in path.read_text()}
    assert not missing


def test_the_readme_has_a_library_example_of_about_twelve_lines() -> None:
    first, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert 10 <= first.count("\n") <= 14


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_an_example_is_a_valid_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe.finetune.data.files import is_hub_id
    from roundpipe.finetune.settings.config import load_config

    monkeypatch.chdir(ROOT)
    config, notes = load_config([str(path)])
    assert notes == []
    for entry in config.dataset:
        assert Path(entry.path).is_file() or is_hub_id(entry)


def test_quickstart_answers_are_right_and_in_one_style() -> None:
    for sample in quickstart_samples():
        working, _, answer = sample["answer"].partition(". Answer: ")
        steps = [STEP.fullmatch(step) for step in working.split(", ")]
        for step in steps:
            assert step is not None, sample
            left, sign, right, result = step.groups()
            assert RESULT_OF[sign](int(left), int(right)) == int(result), sample
            assert sign != "/" or int(left) % int(right) == 0, sample
        assert steps[-1] is not None
        assert steps[-1][4] == answer, sample


def test_quickstart_questions_differ() -> None:
    questions = [sample["question"] for sample in quickstart_samples()]
    assert len(set(questions)) == len(questions) == 184


@pytest.mark.slow
def test_quickstart_has_at_most_12000_tokens_with_the_chat_template() -> None:
    from transformers import AutoTokenizer

    from roundpipe.finetune.settings.config import load_config

    config, _ = load_config([str(ROOT / "examples" / "quickstart.yaml")])
    package, _, file = config.model_name_or_path.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)  # not imported: it wants what we do not install
    assert found is not None
    assert found.submodule_search_locations is not None
    tokenizer = AutoTokenizer.from_pretrained(found.submodule_search_locations[0], gguf_file=file)
    tokens = 0
    for sample in quickstart_samples():
        chat = [
            {"role": "user", "content": sample["question"]},
            {"role": "assistant", "content": sample["answer"]},
        ]
        tokens += len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])
    assert tokens <= 12_000


def test_a_message_that_the_errors_page_explains_is_one_of_ours() -> None:
    said = set[str]()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.add(node.value)
    pool = "\n".join(said)
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "faq.md").read_text(), re.MULTILINE)
    assert len(headings) > 20
    for heading in headings:
        for piece in filter(None, (part.strip() for part in heading.split("…"))):
            assert piece in pool, f"{heading}: {piece}"


def test_the_reference_has_every_public_name_and_no_other() -> None:
    import roundpipe

    page = (ROOT / "docs" / "api.md").read_text()
    found = re.findall(r"^\.\. auto(?:class|function|exception|data):: (\S+)$", page, re.MULTILINE)
    rooms = ("plan", "sim", "optim")
    names = {f"roundpipe.{name}" for name in roundpipe.__all__} - {f"roundpipe.{r}" for r in rooms}
    for room in rooms:
        names |= {f"roundpipe.{room}.{name}" for name in getattr(roundpipe, room).__all__}
    twice = {"roundpipe.GradScaler", "roundpipe.sim.Machine"}  # explained where they belong
    assert set(found) == names - twice - {"roundpipe.__version__"}
    assert len(found) == len(set(found))
