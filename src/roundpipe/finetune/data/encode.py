"""Rows as token ids with a label for each token that is learned.

The whole text is tokenised once and a token is trained if any character of it lies in a trained
span; no token is ever masked for what it is, so the end token is learned also where it pads. The
first token of a sample has nothing before it that could predict it and is never a label, so that
the number of labels is the number of terms in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.conversation import Conversation
from roundpipe.finetune.data.shapes import Text, Tokens, map_columns, shape_of, understand
from roundpipe.finetune.data.template import Rendered, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roundpipe.finetune.settings.fields import TrainConfig

IGNORED = -100  # the label of a token that is not trained, as torch's cross entropy has it


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence. ``labels[i]`` is ``input_ids[i]`` where that token is trained, else -100."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_trained(self) -> int:
        """How many tokens count in the loss."""
        return sum(label != IGNORED for label in self.labels)


def encode(row: Mapping[str, Any], tokenizer: Any, config: TrainConfig) -> Sample:
    """Tokenise one row, whole: truncation is the dataset's. Raises DataError or ConfigError."""
    columns = config.dataset[0].columns if config.dataset else None
    mapped = map_columns(row, columns)
    return tokenize([prepare(mapped, shape_of(mapped), tokenizer, config)], tokenizer)[0]


def prepare(
    row: Mapping[str, Any], shape: str, tokenizer: Any, config: TrainConfig
) -> Rendered | Tokens:
    """What a row of ``shape`` is before it is tokenised. Raises DataError or ConfigError."""
    meaning = understand(row, shape)
    if isinstance(meaning, Conversation):
        ready = render(
            meaning,
            tokenizer,
            everything=config.train_on_prompt,
            only_last=config.mask_history,
        )
    elif isinstance(meaning, Text):
        whole = [(0, len(meaning.text))]
        ready = Rendered(meaning.text, whole, ends_open=True, add_special_tokens=True)
    else:
        return _inside_vocabulary(meaning, tokenizer)
    _check_characters(ready.text)
    return ready


def tokenize(prepared: Sequence[Rendered | Tokens], tokenizer: Any) -> list[Sample]:
    """Samples of prepared rows, in their order, with as few calls of the tokenizer as it takes."""
    samples: dict[int, Sample] = {}
    for special in (False, True):
        chosen = [
            (i, ready)
            for i, ready in enumerate(prepared)
            if isinstance(ready, Rendered) and ready.add_special_tokens is special
        ]
        if chosen:
            made = _tokenize([ready for _, ready in chosen], tokenizer, special=special)
            samples.update(zip((i for i, _ in chosen), made, strict=True))
    for i, ready in enumerate(prepared):
        if isinstance(ready, Tokens):
            samples[i] = _sample(ready.input_ids, ready.labels)
    return [samples[i] for i in range(len(prepared))]


def has_doubled_bos(sample: Sample, tokenizer: Any) -> bool:
    """Whether a sample starts with two begin tokens, which no model was trained on."""
    bos = tokenizer.bos_token_id
    return bos is not None and sample.input_ids[:2] == [bos, bos]


def _tokenize(rows: list[Rendered], tokenizer: Any, *, special: bool) -> list[Sample]:
    if not tokenizer.is_fast:
        return [_by_prefix(row, tokenizer, special=special) for row in rows]
    encoded = tokenizer(
        [row.text for row in rows],
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    return [
        _finish(row, ids, _labels(ids, offsets, row.spans), tokenizer)
        for row, ids, offsets in zip(
            rows, encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


def _labels(
    ids: list[int], offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]]
) -> list[int]:
    """Labels of the tokens that touch a span; spans are in order, and so are tokens."""
    labels = [IGNORED] * len(ids)
    rest = iter(spans)
    span = next(rest, None)
    for i, (start, end) in enumerate(offsets):
        while span is not None and span[1] <= start:
            span = next(rest, None)
        if span is None:
            break
        if end > span[0] and end > start:
            labels[i] = ids[i]
    return labels


def _by_prefix(row: Rendered, tokenizer: Any, *, special: bool) -> Sample:
    """Labels without offsets: the tokens of each span's beginning must begin those of the whole."""

    def ids_of(text: str) -> list[int]:
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(found)

    ids = ids_of(row.text)
    labels = [IGNORED] * len(ids)
    for span in row.spans:
        start, end = (ids_of(row.text[:edge]) for edge in span)
        if ids[: len(start)] != start or ids[: len(end)] != end:
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise ConfigError(
                f"the tokenizer of {name} joins prompt and answer in one token and gives no "
                "offsets, so what to train cannot be told by position"
                "\nhint: a fast tokenizer (tokenizer.json), or train_on_prompt=true"
            )
        labels[len(start) : len(end)] = ids[len(start) : len(end)]
    if special:
        around = tokenizer.build_inputs_with_special_tokens([])
        bos = [tokenizer.bos_token_id]
        if around[:1] == bos and bos != [None]:
            ids, labels = bos + ids, [IGNORED, *labels]
    return _finish(row, ids, labels, tokenizer)


def _finish(row: Rendered, ids: list[int], labels: list[int], tokenizer: Any) -> Sample:
    eos = tokenizer.eos_token_id
    if row.ends_open and row.spans and eos is not None:
        # The text's own last token may be the end token already; either way it is learned.
        if ids[-1:] != [eos]:
            ids, labels = [*ids, eos], [*labels, eos]
        labels[-1] = eos
    return _sample(ids, labels)


def _sample(ids: list[int], labels: list[int]) -> Sample:
    return Sample(list(ids), [IGNORED, *labels[1:]] if labels else [])


def _inside_vocabulary(tokens: Tokens, tokenizer: Any) -> Tokens:
    size = len(tokenizer)
    for token in tokens.input_ids:
        if not 0 <= token < size:
            raise DataError(
                f"not a token of this tokenizer: {token}, its vocabulary has {size}"
                "\nhint: give text, or tokenise with the model's own tokenizer"
            )
    return tokens


def _check_characters(text: str) -> None:
    """JSON can write half of a character (a lone surrogate), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(
            f"not a character: {text[problem.start]!a}\nhint: on_bad_line=skip"
        ) from problem
