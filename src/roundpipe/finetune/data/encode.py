"""Rows as token ids with a label for each token that is learned.

The whole text is tokenised once and a token is trained if any character of it lies in a trained
span, blanks that a tokenizer leaves out of its offsets among them; no token is ever masked for what
it is, so the end token is learned also where it pads. The first token of a sample has nothing
before it that could predict it and is never a label, so that the number of labels is the number of
terms in the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from roundpipe.errors import ConfigError, DataError
from roundpipe.finetune.data.conversation import Conversation
from roundpipe.finetune.data.samples import IGNORED, Sample
from roundpipe.finetune.data.shapes import Text, Tokens, map_columns, shape_of, understand
from roundpipe.finetune.data.spans import Rendered, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from roundpipe.finetune.settings.fields import TrainConfig


def encode(row: Mapping[str, Any], tokenizer: Any, config: TrainConfig) -> list[Sample]:
    """Tokenise one row, whole: truncation is the dataset's. Raises DataError or ConfigError."""
    columns = config.dataset[0].columns if config.dataset else None
    mapped = map_columns(row, columns)
    return tokenize(prepare(mapped, shape_of(mapped), tokenizer, config), tokenizer)


def prepare(
    row: Mapping[str, Any], shape: str, tokenizer: Any, config: TrainConfig
) -> list[Rendered] | list[Tokens]:
    """What a row of ``shape`` is before it is tokenised: one sample, or one of each answer where
    the template writes an answer otherwise once more messages follow.

    Raises DataError or ConfigError.
    """
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
        ready = [Rendered(meaning.text, whole, ends_open=True, add_special_tokens=True)]
    else:
        return [_inside_vocabulary(meaning, tokenizer)]
    for each in ready:
        check_characters(each.text, "on_bad_line=skip")
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
            samples[i] = _without_first_label(Sample(ready.input_ids, ready.labels))
    return [samples[i] for i in range(len(prepared))]


def has_doubled_bos(sample: Sample, tokenizer: Any) -> bool:
    """Whether a sample starts with two begin tokens, which no model was trained on."""
    bos = tokenizer.bos_token_id
    return bos is not None and sample.input_ids[:2].tolist() == [bos, bos]


def _tokenize(rows: list[Rendered], tokenizer: Any, *, special: bool) -> list[Sample]:
    if not tokenizer.is_fast:
        return [_by_prefix(row, tokenizer, special=special) for row in rows]
    encoded = tokenizer(
        [row.text for row in rows],
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_special_tokens_mask=True,
        verbose=False,
    )
    samples = []
    names = ("input_ids", "offset_mapping", "special_tokens_mask")
    for row, given, offsets, added in zip(rows, *(encoded[name] for name in names), strict=True):
        ids = np.array(given, np.int32)
        is_trained = _touched(offsets, row.spans)
        if special:  # what the tokenizer puts around a text is at no place of it
            is_trained &= ~np.array(added, bool)
        labels = np.where(is_trained, ids, np.int32(IGNORED))
        samples.append(_finish(row, ids, labels, tokenizer))
    return samples


def _touched(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> NDArray[np.bool_]:
    """Which tokens touch a span.

    Many tokenizers trim blanks off their offsets (``trim_offsets``), and a token that is nothing
    but blanks, as the indentation of code is, seems to be nowhere. It stands between the end of the
    token before it and the place it is said to be at.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    starts = np.where(starts == ends, np.minimum(starts, np.append(0, ends)[:-1]), starts)
    ends = np.maximum(ends, starts + 1)
    is_trained = np.zeros(len(starts), bool)
    for start, end in spans:
        is_trained |= (starts < end) & (ends > start)
    return is_trained


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


def _finish(row: Rendered, ids: ArrayLike, labels: ArrayLike, tokenizer: Any) -> Sample:
    sample, eos = Sample(ids, labels), tokenizer.eos_token_id
    if row.ends_open and row.spans and eos is not None:
        # The text's own last token may be the end token already; either way it is learned.
        if sample.input_ids[-1:].tolist() != [eos]:
            sample = Sample(np.append(sample.input_ids, eos), np.append(sample.labels, eos))
        sample.labels[-1] = eos
    return _without_first_label(sample)


def _without_first_label(sample: Sample) -> Sample:
    labels = sample.labels.copy()
    labels[:1] = IGNORED
    return Sample(sample.input_ids, labels)


def _inside_vocabulary(tokens: Tokens, tokenizer: Any) -> Tokens:
    size = len(tokenizer)
    for token in (*tokens.input_ids, *(each for each in tokens.labels if each != IGNORED)):
        if not 0 <= token < size:
            raise DataError(
                f"not a token of this tokenizer: {token}, its vocabulary has {size}"
                "\nhint: give text, or tokenise with the model's own tokenizer"
            )
    return tokens


def check_characters(text: str, way_out: str) -> None:
    """Raise DataError for half of a character, which JSON can write and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise DataError(f"not a character: {text[problem.start]!a}\nhint: {way_out}") from problem
