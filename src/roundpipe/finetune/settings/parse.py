"""From a command line and a YAML file to a mapping of keys to values; no key is judged here.

YAML 1.1 is read as people mean it: ``1e-4`` is a number, ``none`` and ``None`` are null, a key
given twice is an error. On the command line a value is YAML too, but one that opens no bracket and
no quote is a plain scalar as it stands, so ``sample_prompts=What is this: a test #1`` is a string.
A file may be JSON, and name variables of the environment: ``${HOME}/out``.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# The resolver only matches from the front, so the end is part of each pattern.
_FLOAT = re.compile(
    r"(?:[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_NULL = re.compile(r"(?:~|null|Null|NULL|none|None|NONE|)\Z")

_MOST_NODES = 100_000

# ${NAME}, ${NAME:-default}, $NAME in capitals; ${oc.env:NAME,default} of OmegaConf.
_VARIABLE = re.compile(
    r"\$\{(?:oc\.env:)?(?P<braced>[A-Za-z_]\w*)(?:(?::-|,)(?P<default>[^{}]*))?\}"
    r"|\$(?P<bare>[A-Z_][A-Z0-9_]*)\b"
)
# Keys whose text is for a model or a template, dollars and all.
_AS_WRITTEN = ("sample_prompts", "chat_template", "chat_template_jinja", "special_tokens")
# Keys that take several words after ``--KEY``, as argparse has it.
_SEVERAL = (
    "dataset",
    "datasets",
    "eval_dataset",
    "lora_modules_to_save",
    "lora_target",
    "lora_target_modules",
    "lora_target_parameters",
    "modules_to_save",
    "report_to",
    "target_modules",
    "target_parameters",
)
# Keys under which YAML files keep what their anchors name.
_HOLDERS = ("x-", "x_", ".", "_")

# Keys whose `none` says something that a blank does not.
_NONE_IS_A_WORD = ("resume_from_checkpoint",)


RESOLVED = "# The resolved config of a run of roundpipe train; it loads again as a config.\n"
"""What a config that a run has written begins with."""


class _Loader(yaml.SafeLoader):
    """Safe YAML with our numbers, our nulls, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(
                    problem="a key that is a list or a mapping", problem_mark=key.start_mark
                )
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key given twice: {key.value}", problem_mark=key.start_mark
                )
            seen.add(key.value)
            if key.value.replace("-", "_") in _NONE_IS_A_WORD and value.value.lower() == "none":
                value.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)

    def construct_document(self, node: yaml.Node) -> Any:
        if _unfolded(node, {}) > _MOST_NODES:
            raise yaml.MarkedYAMLError(
                problem="aliases that unfold to more than a config can hold",
                problem_mark=node.start_mark,
            )
        return super().construct_document(node)


def _unfolded(node: yaml.Node, known: dict[int, float]) -> float:
    """How many nodes there are once each alias is what it stands for; infinitely many in a loop."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for each in inner for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_unfolded(part, known) for part in parts)
    return known[id(node)]


_REPLACED = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:null", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag not in _REPLACED]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])


def parse_value(text: str) -> Any:
    """The value that ``text`` on a command line means. Raises ConfigError on broken YAML."""
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        loader = _Loader("")
        tag = loader.resolve(yaml.ScalarNode, text.strip(), (True, False))  # type: ignore[no-untyped-call]
        scalar = loader.construct_object(yaml.ScalarNode(tag, text.strip()))
        return text if isinstance(scalar, str) else scalar
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ConfigError(
            f"not a YAML value: {text}\nhint: {_where(problem)}; quote it for the shell"
        ) from problem


def read_file(path: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Every key of the config file ``path``, dashes as underscores. Raises ConfigError.

    ``environment``: the process's, for variables that values name.
    """
    file = Path(path)
    if is_data(path):
        raise ConfigError(f"data, not a config: {path}\nhint: dataset={path}")
    try:
        content = file.read_bytes()
        data = _data_of(content, is_json=file.suffix == ".json")
    except FileNotFoundError:
        raise ConfigError(f"no such config file: {path}\nhint: {near_file(file)}") from None
    except OSError as problem:
        raise ConfigError(
            f"cannot read config file: {path}: {(problem.strerror or 'error').lower()}"
            "\nhint: give a YAML file, or keys only: model=… dataset=…"
        ) from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # ValueError: !!int x
        raise ConfigError(f"broken YAML: {path}\nhint: {_where(problem)}") from problem
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"not a config: {path} holds a {type(data).__name__}\nhint: one `key: value` a line"
        )
    is_resolved = content.startswith(RESOLVED.encode())  # what looks like a variable is none
    return {
        str(key).replace("-", "_"): value
        if key in _AS_WRITTEN or is_resolved
        else _filled(value, str(key), environment or {})
        for key, value in data.items()
        if not (str(key).startswith(_HOLDERS) and isinstance(value, dict | list))
    }


def _data_of(content: bytes, *, is_json: bool) -> Any:
    """What a file says. YAML takes most of JSON too, but no tabs."""
    if is_json:
        with contextlib.suppress(ValueError):  # else YAML says where it is wrong
            return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    return yaml.load(content, _Loader)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise yaml.YAMLError(f"key given twice: {key}")
        found[key] = value
    return found


def _filled(value: Any, key: str, environment: Mapping[str, str]) -> Any:
    """The value with variables of the environment filled in. Raises ConfigError for unset ones."""
    if isinstance(value, dict):
        return {name: _filled(each, f"{key}.{name}", environment) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, key, environment) for each in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def fill(found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        text = environment.get(name, found["default"])
        if text is None:
            raise ConfigError(
                f"no such variable in the environment: {key}: {value}"
                f"\nhint: export {name}=…, or write what it stands for"
            )
        return text

    filled = _VARIABLE.sub(fill, value)
    return filled if filled == value else parse_value(filled)


def parse_argv(
    argv: Sequence[str], *, known: Collection[str] = ()
) -> tuple[str | None, dict[str, Any]]:
    """Split a command line into the config file, if any, and the values of its keys.

    ``known`` holds the keys after which, in ``--flag key=value``, the flag is bare. Raises
    ConfigError on a second file or on text that is no value.
    """
    file: str | None = None
    values: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        dashed = word.startswith("--")
        name, equals, text = word.removeprefix("--").partition("=")
        if not _KEY.fullmatch(name) or not (dashed or equals):
            if word.startswith("-"):
                raise ConfigError(f"not an option: {word}\nhint: key=value, or --key value")
            if file is not None:
                raise ConfigError(
                    f"two config files: {file} and {word}\nhint: settings are given as key=value"
                )
            file = word
            continue
        key = name.replace("-", "_")
        bare = not equals and (not words or _is_option(words[0], known))
        if bare and _is_denied(key, known):
            values[key.removeprefix("no_")] = False
            continue
        if not equals:
            text = "true" if bare else words.pop(0)
        if key == "config" and key not in known:
            words.insert(0, text)
            continue
        values[key] = parse_value(text)
        more: list[str] = []
        while not equals and key in _SEVERAL and words and not _is_end(words[0], known):
            more.append(words.pop(0))
        if more:
            values[key] = [values[key], *more]
    return file, values


def is_data(name: str) -> bool:
    """Whether ``name`` is that of a file of samples, and of nothing else."""
    return Path(name).suffix in (".jsonl", ".csv", ".tsv", ".parquet", ".arrow")


def near_file(path: Path) -> str:
    """A hint for a file that is not there: its nearest neighbour, or where we looked."""
    folder = path.parent
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir())
        for name in difflib.get_close_matches(path.name, names, n=1):
            return str(folder / name)
        return f"paths are relative to {Path.cwd()}" if not path.is_absolute() else "check the path"
    return f"there is no folder {folder} (paths are relative to {Path.cwd()})"


def _is_option(word: str, known: Collection[str]) -> bool:
    return word.startswith("--") or _is_setting(word, known)


def _is_denied(key: str, known: Collection[str]) -> bool:
    """Whether ``--no-KEY`` says no to a key."""
    return key.startswith("no_") and key not in known and key.removeprefix("no_") in known


def _is_end(word: str, known: Collection[str]) -> bool:
    """Whether a list that is given as words ends before ``word``: an option, or the config file."""
    return _is_option(word, known) or word.endswith((".yaml", ".yml"))


def _is_setting(word: str, known: Collection[str]) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.replace("-", "_") in known


def _where(problem: Exception) -> str:
    mark = getattr(problem, "problem_mark", None)
    text = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {text}" if mark else text
