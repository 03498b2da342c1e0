"""What a row of a Trainer's dataset is before it is tokenised, by the rules that its user knows.

    messages, conversations   the chat template's text, all of it trained; ``assistant_only_loss``:
                              answers alone, found by position where the template marks none
    prompt, completion        strings are joined as they stand, messages by the template; the
                              completion is trained, whatever the template writes behind it too
    text                      all of it, with the end token behind it
    input_ids                 as they are; ``labels``, else every token that no mask leaves out

Shapes that TRL does not know (question and answer, instruction and output) are read as our commands
read them, and so are all where the arguments were ours. A row that was packed (``seq_lengths``, or
``position_ids`` that begin again) is taken apart, so that its samples do not see each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.encode import prepare
from roundpipe.finetune.data.samples import IGNORED
from roundpipe.finetune.data.shapes import Tokens, shape_of
from roundpipe.finetune.data.spans import Rendered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from roundpipe.finetune.settings.fields import TrainConfig
    from roundpipe.finetune.trainer.told import Preparation

_CONVERSATIONS = ("messages", "conversations")
_PAIR = "prompt/completion"
_MASKS = ("assistant_masks", "completion_mask")


@dataclass(frozen=True)
class RowReader:
    """Rows of one dataset, all of ``shape``."""

    shape: str
    config: TrainConfig
    how: Preparation
    tokenizer: Any
    formatting_func: Callable[[dict[str, Any]], Any] | None = None

    @classmethod
    def of(
        cls,
        columns: Iterable[str],
        config: TrainConfig,
        how: Preparation,
        tokenizer: Any,
        formatting_func: Callable[[dict[str, Any]], Any] | None = None,
    ) -> RowReader:
        """A reader of rows with these columns. Raises DataError or ConfigError for no shape."""
        named = list(columns)
        if "input_ids" in named:
            return cls("input_ids", config, how, tokenizer)
        if formatting_func is not None:
            _require_all_trained(how)
            return cls("text", config, how, tokenizer, formatting_func)
        shape = _shape(named, how)
        if how.is_theirs:
            trains_all = _trains_all(shape, how)
            config = config.model_copy(update={"train_on_prompt": trains_all})
        return cls(shape, config, how, tokenizer)

    def read(self, row: Mapping[str, Any]) -> list[Rendered] | list[Tokens]:
        """What becomes of one row. Raises DataError or ConfigError."""
        if self.formatting_func is not None:
            texts = _texts(self.formatting_func(dict(row)))
            return [each for text in texts for each in self._text(text)]
        if self.shape == "input_ids":
            return self._tokens(row)
        if self.how.is_theirs and self.shape == "text":
            return self._text(row[self.how.text_column])
        if self.how.is_theirs and self.shape == _PAIR:
            return self._pair(row)
        return prepare(row, self.shape, self.tokenizer, self.config)

    def _text(self, text: Any) -> list[Any]:
        return list(prepare({"text": text}, "text", self.tokenizer, self.config))

    def _pair(self, row: Mapping[str, Any]) -> list[Any]:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            start = 0 if self.config.train_on_prompt else len(prompt)
            (joined,) = prepare({"text": whole}, "text", self.tokenizer, self.config)
            assert isinstance(joined, Rendered)
            return [replace(joined, spans=[(start, len(whole))])]
        ready = prepare(row, _PAIR, self.tokenizer, self.config)
        if self.config.train_on_prompt or self.how.answers_only or len(ready) > 1:
            return list(ready)
        return [
            replace(each, spans=[(each.spans[0][0], len(each.text))])
            for each in ready
            if isinstance(each, Rendered) and each.spans
        ]

    def _tokens(self, row: Mapping[str, Any]) -> list[Any]:
        given = {name: row[name] for name in ("input_ids", "labels") if row.get(name) is not None}
        if "labels" not in given:
            given["labels"] = _labels(row, self.how)
        lengths = _lengths_in(row)
        if lengths is None:
            if row.get("attention_mask") is not None:
                given["attention_mask"] = [int(bit) for bit in row["attention_mask"]]
            return list(prepare(given, "input_ids", self.tokenizer, self.config))
        (whole,) = prepare(given, "input_ids", self.tokenizer, self.config)
        assert isinstance(whole, Tokens)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        return [
            Tokens(whole.input_ids[end - length : end], whole.labels[end - length : end])
            for end, length in zip(ends, lengths, strict=True)
        ]


def _shape(columns: list[str], how: Preparation) -> str:
    if how.is_theirs and how.text_column in columns:
        known = (*_CONVERSATIONS, "prompt")
        if how.text_column != "text" or not any(name in columns for name in known):
            return "text"
    return shape_of(columns)


def _trains_all(shape: str, how: Preparation) -> bool:
    if shape in _CONVERSATIONS:
        return not how.answers_only
    return how.completion_only is False


def _require_all_trained(how: Preparation) -> None:
    if how.completion_only or how.answers_only:
        name = "completion_only_loss" if how.completion_only else "assistant_only_loss"
        raise ConfigError(
            f"formatting_func makes plain text, of which {name}=True cannot tell the answer"
            f"\nhint: {name}=False, or rows with prompt and completion"
        )


def _texts(made: Any) -> list[str]:
    texts = made if isinstance(made, list | tuple) else [made]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"formatting_func returned no text: {str(made)[:60]}"
            "\nhint: a function of one row that returns a string"
        )
    return list(texts)


def _labels(row: Mapping[str, Any], how: Preparation) -> list[Any]:
    """Tokens that no mask leaves out; one of completions counts where those alone are trained."""
    is_pair = not how.is_theirs or ("prompt" in row and "completion" in row)
    names = (
        _MASKS if how.completion_only or (how.completion_only is None and is_pair) else _MASKS[:1]
    )
    masks = [row[name] for name in names if row.get(name) is not None]
    ids = row["input_ids"]
    return [token if all(bits) else IGNORED for token, *bits in zip(ids, *masks, strict=True)]


def _lengths_in(row: Mapping[str, Any]) -> list[int] | None:
    """Lengths of the samples in a packed row, None for a row of one."""
    lengths = row.get("seq_lengths")
    if lengths is None and (positions := row.get("position_ids")) is not None:
        starts = [i for i, position in enumerate(positions) if position == 0]
        edges = [*starts, len(positions)]
        lengths = [stop - start for start, stop in pairwise(edges)]
        if starts[:1] != [0]:
            raise DataError("position_ids that do not begin at 0\nhint: leave the column out")
        mask = row.get("attention_mask")
        if mask is not None and not all(mask):  # padding stands at position 0 too
            return None
    return list(lengths) if lengths is not None and len(lengths) > 1 else None
