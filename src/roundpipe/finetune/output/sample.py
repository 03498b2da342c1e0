"""Let a model answer: the one place that does, for samples of a run, evaluation and conversation.

`RoundPipe.generate` makes the tokens, with the newest weights, on the first device: resident where
the weights fit, else streamed. Training may go on afterwards with the same bits: the random state
is put back, and nothing of the model is touched.

Prompts are answered several at a time, padded on the left; those of like length together. A model
that carries a state from token to token may take padding for text: that is tried once, and where it
does, only prompts of one length go together.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, TextStreamer

from roundpipe.errors import ConfigError, DataError, DeviceError
from roundpipe.finetune.model.from_transformers import quiet_transformers
from roundpipe.finetune.model.positions import most_computable
from roundpipe.finetune.model.vocabulary import pad_token_of
from roundpipe.finetune.output.prompts import end_tokens, tokens_of
from roundpipe.finetune.output.rate import outlook_line, rate_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from roundpipe.engine.outlook import Outlook
    from roundpipe.finetune.output.prompts import Prompt
    from roundpipe.plan.machine import Machine
    from roundpipe.roundpipe import RoundPipe

MAX_NEW_TOKENS = 64
BATCH_SIZE = 8
_ALIKE = 1e-2  # of the largest logit: what padding may change by rounding
# Settings that ask for tokens to be drawn.
_DRAWS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
)
# Settings of `generate` that would make something else of an answer, and what is there instead.
_NOT_OF_ANSWERS = {
    "eos_token_id": "answers end where the model, its tokenizer or its chat template ends a turn",
    "max_length": "max_new_tokens=256",
    "num_return_sequences": "the same prompt several times: [prompt] * 4",
    "pad_token_id": "leave it out: padding is not attended to",
    "return_dict_in_generate": "model.generate(…) returns more than texts",
}


def answer(  # noqa: PLR0913 - what one may want to say about an answer
    pipe: RoundPipe,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = BATCH_SIZE,
    tell: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **sampling: Any,
) -> list[str]:
    """Answer each prompt; see `Answerer` and its `answers`."""
    how = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, **sampling}
    return Answerer(pipe, tokenizer, **how).answers(prompts, tell=tell, should_stop=should_stop)


def sampling_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are chosen: fields of ``GenerationConfig``, None for what is not said.

    A temperature, or what leaves out unlikely tokens, has them drawn without ``do_sample`` too; a
    temperature of 0 is greedy. Raises ConfigError for what is no such field.
    """
    said = {name: value for name, value in given.items() if value is not None}
    kind: Any = GenerationConfig
    known = kind().to_dict()
    for name in said:
        if name in _NOT_OF_ANSWERS:
            raise ConfigError(f"no setting of an answer: {name}\nhint: {_NOT_OF_ANSWERS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) or ["temperature"]
            raise ConfigError(f"no setting of generate: {name}\nhint: {near[0]}")
    if said.get("temperature") == 0:
        greedy = {name: value for name, value in said.items() if name not in _DRAWS}
        return {**greedy, "do_sample": False}
    return {"do_sample": not said.keys().isdisjoint(_DRAWS), **said}


class Answerer:
    """A model and how it answers. ``num_tokens`` and ``seconds``: of what it has made so far;
    ``use_adapter``: set to False, the base answers without its adapter.

    Greedy unless ``sampling`` says otherwise: see `sampling_settings`; what is not said is as the
    model's own says. ``seed``: of draws, None draws anew each time. ``machine``: whose first device
    answers, for forecasts; None: as the model's devices are known. Raises ConfigError for sampling
    that means nothing.
    """

    def __init__(
        self,
        pipe: RoundPipe,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        batch_size: int = BATCH_SIZE,
        seed: int | None = None,
        machine: Machine | None = None,
        **sampling: Any,
    ) -> None:
        self.pipe, self.tokenizer = pipe, tokenizer
        self.max_new_tokens, self.batch_size, self.seed = max_new_tokens, batch_size, seed
        self.num_tokens, self.seconds = 0, 0.0
        self.use_adapter = True
        self._machine = machine
        self._sampling = sampling_settings(sampling)
        self._ends = end_tokens(pipe.model, tokenizer)
        self._pad = pad_token_of(tokenizer, pipe.model)
        self._most = most_computable(pipe.model)
        self._takes_padding: bool | None = None if _is_stateful(pipe.model) else True

    # ---- before and after

    def outlook(self, prompts: Sequence[Prompt], *, rows: int | None = None) -> Outlook:
        """What answering ``prompts``, ``rows`` of them at a time, will do."""
        longest = max((len(tokens_of(self.tokenizer, prompt)) for prompt in prompts), default=1)
        rows = min(len(prompts) or 1, self.batch_size) if rows is None else rows
        return self.pipe.generation_outlook(
            rows, longest, self.max_new_tokens, machine=self._machine
        )

    def outlook_line(self, prompts: Sequence[Prompt]) -> str:
        """What will happen and about how fast: ``streamed: 9 of 32 blocks stay, …``."""
        many = self.outlook(prompts)
        return outlook_line(many if many.rows == 1 else self.outlook(prompts, rows=1), many)

    def rate_line(self) -> str:
        """What was measured: ``312 tokens in 14.1 s: 22 tokens/s``."""
        if not self.seconds:
            return "nothing was answered"
        rate = rate_text(self.num_tokens / self.seconds)
        return f"{self.num_tokens:,} tokens in {self.seconds:.1f} s: {rate} tokens/s"

    # ---- answering

    def answers(
        self,
        prompts: Sequence[Prompt],
        *,
        tell: Callable[[int], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Answer each prompt, in their order; blocks until all are.

        A prompt is a question, messages that end with one, or token ids. ``tell`` is called with
        the number of answers so far; once ``should_stop`` says so, answers that are not complete
        are what there is of them. Where a device has no room for so many at a time it takes fewer.
        Raises DataError for a prompt that the chat template refuses, DeviceError without any room.
        """
        if not prompts:
            return []
        tokens = [tokens_of(self.tokenizer, prompt) for prompt in prompts]
        found = [""] * len(prompts)
        done = 0
        with self._undisturbed(), quiet_transformers():
            waiting = self._together(tokens)
            while waiting and not (should_stop and should_stop()):
                batch = waiting.pop(0)
                try:
                    made = self._made(
                        [tokens[i] for i in batch], self.max_new_tokens, should_stop=should_stop
                    )
                except DeviceError as error:
                    if len(batch) == 1 or not isinstance(error.__cause__, torch.OutOfMemoryError):
                        raise
                    half = (len(batch) + 1) // 2
                    waiting[:0] = [batch[:half], batch[half:]]
                    self.batch_size = half
                    continue
                for index, row in zip(batch, made, strict=True):
                    found[index] = self._text(row)
                done += len(batch)
                if tell is not None:
                    tell(done)
        return found

    def stream(
        self,
        prompt: Prompt,
        show: Callable[[str], None],
        *,
        max_new_tokens: int | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> str:
        """Answer one prompt, giving the text to ``show`` piece by piece as it is made.

        ``max_new_tokens``: of this answer, where it has less room than others.
        """
        tokens = tokens_of(self.tokenizer, prompt)
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        with self._undisturbed(), quiet_transformers():
            streamer = _Shown(self.tokenizer, show)
            (row,) = self._made([tokens], most, should_stop=should_stop, streamer=streamer)
        return self._text(row)

    def _text(self, row: list[int]) -> str:
        return str(self.tokenizer.decode(row, skip_special_tokens=True)).strip()

    def _made(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
        *,
        should_stop: Callable[[], bool] | None = None,
        streamer: TextStreamer | None = None,
    ) -> list[list[int]]:
        """New tokens for each prompt, all at a time, up to and with what ends an answer."""
        width = max(map(len, prompts))
        if self._most is not None:
            self._require_room(width)
            max_new_tokens = min(max_new_tokens, self._most - width)
        more: dict[str, Any] = {} if streamer is None else {"streamer": streamer}
        if not self.use_adapter:
            more["use_adapter"] = False
        if should_stop is not None:
            more["stopping_criteria"] = [_stops_when(should_stop)]
        started = time.perf_counter()
        output = self.pipe.generate(
            **self._padded(prompts, width), generation_config=self._settings(max_new_tokens), **more
        )
        self.seconds += time.perf_counter() - started
        rows = [self._ended(row) for row in output[:, width:].tolist()]
        self.num_tokens += sum(map(len, rows))
        return rows

    def _padded(self, prompts: Sequence[list[int]], width: int) -> dict[str, Any]:
        """Prompts [rows, width], padded with a token of their own.

        It is masked, but what keeps a model from saying things again counts it as said.
        """
        ids = torch.full((len(prompts), width), self._pad)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row] = tokens[0] if tokens else self._pad
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, width - len(tokens) :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def _require_room(self, width: int) -> None:
        if self._most is not None and width >= self._most:
            raise DataError(
                f"a prompt has {width:,} tokens, and the model has positions for {self._most:,}"
                "\nhint: ask with fewer words"
            )

    def _settings(self, max_new_tokens: int) -> GenerationConfig:
        """What is not said here ``generate`` takes from the model's own generation config."""
        kind: Any = GenerationConfig
        settings: GenerationConfig = kind(
            max_new_tokens=max_new_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad,
            **self._sampling,
        )
        return settings

    def _ended(self, row: list[int]) -> list[int]:
        """Without what fills up rows that ended before others."""
        end = next((at for at, token in enumerate(row) if token in self._ends), len(row))
        return row[: end + 1]

    def _together(self, tokens: Sequence[list[int]]) -> list[list[int]]:
        """Which prompts go together, longest first: what has no room is known at once.

        One whose answer the positions cut short would cut shorter prompts' answers too.
        """
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
        free = math.inf if self._most is None else self._most - self.max_new_tokens
        cut = [i for i in order if len(tokens[i]) > free]
        others = order[len(cut) :]
        groups = _by_length(cut, tokens)
        if self._padded_together([tokens[i] for i in others]):
            groups.append(others)
        else:
            groups += _by_length(others, tokens)
        size = self.batch_size
        return [group[at : at + size] for group in groups for at in range(0, len(group), size)]

    def _padded_together(self, prompts: Sequence[list[int]]) -> bool:
        """Whether ``prompts``, longest first, go together though some have to be padded.

        A layer that picks the tokens it looks at (``index_topk`` of DeepSeek V3.2 and GLM 5) picks
        padding too, once there are more than it may pick.
        """
        if not prompts or len(prompts[0]) == len(prompts[-1]):
            return False
        config: Any = self.pipe.model.config
        picked = getattr(config.get_text_config(), "index_topk", None)
        if isinstance(picked, int) and len(prompts[0]) + self.max_new_tokens > picked:
            return False
        return self._pads_right(prompts[-1])

    def _pads_right(self, prompt: list[int]) -> bool:
        """Whether padding before a prompt changes nothing; tried once with a model of states."""
        if self._takes_padding is None:
            logits = [
                self.pipe.generate(
                    **self._padded([prompt], len(prompt) + more),
                    max_new_tokens=1,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                ).logits[0]
                for more in (0, 3)
            ]
            difference = (logits[0] - logits[1]).abs().max()
            self._takes_padding = bool(difference <= _ALIKE * logits[0].abs().max())
        return self._takes_padding

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Put the random state back, that of all devices: torch gives them all a seed."""
        place = self.pipe.generation_outlook(1, 1, 1).place
        is_host = place.type == "cpu"
        cards = [] if is_host else list(range(torch.accelerator.device_count()))
        with torch.random.fork_rng(devices=cards, device_type="cuda" if is_host else place.type):
            if self.seed is None:
                torch.seed()  # else each answer would be drawn alike, the state being put back
            else:
                torch.manual_seed(self.seed)
            yield


class _Shown(TextStreamer):
    """Gives text away as it is made, without the prompt."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show, self._has_begun = show, False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `TextStreamer`; white space before the first word is left out, as in an answer."""
        text = text if self._has_begun else text.lstrip()
        if text:
            self._has_begun = True
            self._show(text)


def _by_length(order: Sequence[int], tokens: Sequence[list[int]]) -> list[list[int]]:
    """Those of one length together; they stand side by side in ``order``."""
    by_length = itertools.groupby(order, key=lambda i: len(tokens[i]))
    return [list(group) for _, group in by_length]


def _stops_when(should_stop: Callable[[], bool]) -> Callable[..., Tensor]:
    def stops(ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        return torch.full((ids.shape[0],), should_stop(), device=ids.device)

    return stops


def _is_stateful(model: Any) -> bool:
    """Whether transformers says that a model carries a state from token to token."""
    base = getattr(model, "get_base_model", lambda: model)()
    return bool(getattr(base, "_is_stateful", False))
