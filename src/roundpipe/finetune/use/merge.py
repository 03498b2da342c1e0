"""An adapter and its base become one model, which everything loads that loads models.

    live model -> logits -> weights, one after another, into a folder beside -> its names checked
    -> opened again -> logits compared -> the folder gets its name

W + delta is taken in fp32 and rounded once, to what is saved. The folder is there whole or not at
all, and only if what it holds is the model that was there before.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.device.host_memory import host_memory
from roundpipe.device.resolve import resolve_devices
from roundpipe.durable import sync, whole_folder, write_new
from roundpipe.errors import ConfigError, PlanError, RoundPipeError
from roundpipe.finetune.model.adapters import short_count
from roundpipe.finetune.model.from_transformers import DTYPES, quiet_transformers
from roundpipe.finetune.model.source import ModelSource
from roundpipe.finetune.output.model_card import CARD_FILE, Card, write_card
from roundpipe.finetune.output.result_files import base_of, save_result, tokenizer_bytes
from roundpipe.finetune.output.usage import QUESTION, Result, short_lines
from roundpipe.finetune.use.comparing import Difference, logits_of, sample_ids
from roundpipe.finetune.use.merge_checks import (
    REPORT,
    require_same_weights,
    require_stock_keys,
)
from roundpipe.finetune.use.merge_wish import MERGE_FILE, MERGE_FORMAT, require_free
from roundpipe.finetune.use.merged_weights import (
    MergedWeights,
    require_mergeable,
    set_dtype_,
    untie_,
)
from roundpipe.finetune.use.opened import (
    Loaded,
    load_subject,
    make_pool,
    open_tokenizer,
    wrap,
)
from roundpipe.finetune.use.precision import SHARE_OF_MEMORY, live_dtype, stored_dtype
from roundpipe.finetune.use.subject import Subject
from roundpipe.models.loading.own_class import name_to_load
from roundpipe.models.saving import save
from roundpipe.plan.amounts import write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roundpipe.engine.pool import DevicePool
    from roundpipe.finetune.output.terminal import Terminal
    from roundpipe.finetune.settings.config import TrainConfig
    from roundpipe.finetune.use.merge_wish import MergeWish

_SPARE = 64 << 20  # bytes of the disk that stay free
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The root of the mean squared difference of logits as a share of their spread, above which they are
# another model's: rounding to 16 bits costs some hundredths, an adapter left out several tenths.
_ANOTHER = {"fp32": 1e-2, "fp16": 0.2, "bf16": 0.3}


@dataclass(frozen=True)
class Merged:
    """What came out. ``parted``: weights that were tied before. ``difference``: None: not known."""

    folder: Path
    dtype: torch.dtype
    num_bytes: int
    parted: Sequence[str]
    difference: Difference | None


def merge(
    subject: Subject,
    wish: MergeWish,
    settings: TrainConfig,
    terminal: Terminal,
    *,
    environment: Mapping[str, str],
) -> Merged:
    """Write ``subject`` as one model into ``wish.folder``, and say what that is worth.

    ``settings``: of the run, for devices and attention. Takes host memory of the base once. Blocks
    on disk and network. Raises ConfigError for an adapter that cannot be merged, PlanError where
    the disk has no room, RoundPipeError where the result is not the model that it should be.
    """
    with contextlib.ExitStack() as parts:
        devices = resolve_devices(settings.devices, environment=environment)
        for device in devices:
            parts.callback(device.close)
        tokenizer = _tokenizer(subject, settings, terminal)
        dtype = live_dtype(subject, settings, devices)
        pool = parts.enter_context(make_pool(settings, devices))
        return _Merging(subject, wish, settings, terminal, pool, tokenizer, dtype).run()


@dataclass
class _Merging:
    """A merge under way. ``dtype``: of the live model."""

    subject: Subject
    wish: MergeWish
    settings: TrainConfig
    terminal: Terminal
    pool: DevicePool
    tokenizer: Any
    dtype: torch.dtype

    def run(self) -> Merged:
        loaded = self._load()
        if self.subject.adapter is not None:
            require_mergeable(loaded.model)
        with self.terminal.waiting("running the model as it is"):
            ids = sample_ids(self.tokenizer, self.settings.sample_prompts, _rows(loaded.model))
            live = self._logits(loaded, ids)
        if self.wish.is_original:
            del loaded
            gc.collect()
            loaded = self._load(is_packed=False)
        target, dtype = loaded.bare, self._saved_dtype()
        set_dtype_(target, dtype)
        weights = MergedWeights(base_of(loaded.model), target, packed=loaded.packed)
        parted = untie_(target, weights)
        size = _size_of(target)
        self._require_room(size)
        self._say_what(weights, loaded, dtype, parted)
        base_folder = loaded.base.folder
        with self._whole() as place:
            self._write(place, target, weights, base_folder, size)
            samples, asked = weights.samples, weights.num_asked
            del loaded, weights
            gc.collect()
            require_stock_keys(place)
            difference = self._compared(place, ids, live, samples, size, dtype)
            merged = Merged(self.wish.folder, dtype, size, parted, difference)
            self._write_about(place, merged, target, base_folder)
        self._show(merged, target, asked)
        return merged

    def _load(self, *, is_packed: bool | None = None) -> Loaded:
        return load_subject(
            self.subject,
            self.settings,
            self.terminal,
            dtype=self.dtype,
            is_packed=is_packed,
            with_bare=True,
        )

    def _logits(self, loaded: Loaded, ids: Tensor) -> Tensor:
        with wrap(loaded, self.settings, self.pool) as model:
            return logits_of(model, ids)

    def _saved_dtype(self) -> torch.dtype:
        """What was said; else as the base was stored, unless it was trained over less."""
        if self.wish.dtype is not None:
            return DTYPES[self.wish.dtype]
        stored = stored_dtype(self.subject.source)
        return min(stored, self.dtype, key=lambda dtype: dtype.itemsize)

    def _say_what(
        self, weights: MergedWeights, loaded: Loaded, dtype: torch.dtype, parted: Sequence[str]
    ) -> None:
        say = self.terminal.line
        if self.subject.adapter is not None:
            over = self.subject.source.name
            if loaded.base.is_packed:
                over += ", its 4 bits unpacked as it was trained (base=original: those of before)"
            elif self.wish.is_original:
                over += " as it was before it was packed; the adapter was trained over 4 bits"
            say(f"merging {weights.num_merged} modules of {self.subject.name} into {over}")
            kept = "" if dtype == torch.float32 else "; dtype=fp32 keeps every digit"
            say(f"added up in fp32, saved as {_NAMES[dtype]}{kept}")
        if parted:
            say(f"one weight in the base, two from here on: {' and '.join(parted)}")

    def _require_room(self, size: int) -> None:
        folder = self.wish.folder.absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        beside = 0 if self.tokenizer is None else tokenizer_bytes(self.tokenizer)
        needs, has = size + beside + _SPARE, shutil.disk_usage(there).free
        if needs > has:
            raise PlanError(
                f"does not fit on the disk of output_dir: {write_bytes(needs)} of "
                f"{write_bytes(has)}: {self.wish.shown}\n"
                "hint: output_dir=FOLDER on a larger disk, or dtype=bf16"
            )

    @contextlib.contextmanager
    def _whole(self) -> Iterator[Path]:
        """A folder to write into, that gets its name when the block ends."""
        try:
            with whole_folder(self.wish.folder) as place:
                yield place
                for path in place.iterdir():
                    sync(path)
                require_free(self.wish.folder, self.wish.shown)  # hours may have gone by
        except OSError as error:
            raise ConfigError(
                f"output_dir: cannot be written to: {self.wish.shown}: "
                f"{error.strerror or error}\nhint: make room there, or output_dir=ANOTHER"
            ) from error

    def _write(
        self, place: Path, target: Any, weights: MergedWeights, folder: Path | None, size: int
    ) -> None:
        _take_generation_config(target, self.subject)
        with self.terminal.counting(f"writing {self.wish.shown}", size) as show:
            weights.tell = show
            if self.tokenizer is None:
                with quiet_transformers():
                    save(place, target, weights)
            else:
                save_result(place, target, weights, self.tokenizer, base_folder=folder)

    def _compared(
        self,
        place: Path,
        ids: Tensor,
        live: Tensor,
        samples: Mapping[str, Tensor],
        size: int,
        dtype: torch.dtype,
    ) -> Difference | None:
        """How far what was written is from the live model. Raises where that is too far."""
        memory = host_memory()
        needs = size * self.dtype.itemsize // dtype.itemsize
        if memory is not None and needs > SHARE_OF_MEMORY * memory.free_bytes:
            self.terminal.line(f"not compared: memory has no room for {write_bytes(needs)}")
            return None
        source = ModelSource(given=self.wish.shown, location=str(place))
        with self.terminal.waiting("running what was written"):
            merged = load_subject(
                Subject(self.wish.shown, source),
                self.settings,
                self.terminal,
                dtype=self.dtype,
                is_packed=False,
            )
            require_same_weights(samples, merged.model.state_dict())
            difference = Difference.of(live, self._logits(merged, ids))
        names = {_NAMES[each] for each in (dtype, self.dtype)}
        most = max(_ANOTHER[name] for name in names)
        if not difference.share <= most and not self.wish.is_original:
            raise RoundPipeError(
                f"what was written is another model: {difference.line()}\n{REPORT}"
            )
        return difference

    def _write_about(
        self, place: Path, merged: Merged, target: Any, base_folder: Path | None
    ) -> None:
        """The model card, and what lets a later merge take this one's place."""
        subject = self.subject
        facts = [f"Added up in fp32, saved as {_NAMES[merged.dtype]}."]
        if merged.difference is not None:
            facts.append(f"Against the model with its adapter: {merged.difference.line()}.")
        if subject.adapter is not None:
            config = subject.config
            card = Card(
                self._result(merged, target),
                "merged",
                summary="An adapter and its base as one model.",
                settings={} if config is None else _settings_of(config),
                notes=facts,
                base_folder=base_folder,
            )
            write_card(place, card)
        files = sorted({path.name for path in place.iterdir()} | {CARD_FILE, MERGE_FILE})
        about = {
            "format": MERGE_FORMAT,
            "of": subject.given,
            "base": subject.source.hub_id or subject.source.given,
            "dtype": _NAMES[merged.dtype],
            "files": files,
        }
        write_new(place / MERGE_FILE, json.dumps(about, indent=2) + "\n")

    def _result(self, merged: Merged, target: Any) -> Result:
        prompts = self.settings.sample_prompts
        return Result(
            folder=self.wish.shown,
            source=self.subject.source,
            question=prompts[0] if prompts else QUESTION,
            model_class=name_to_load(target),
            has_template=bool(getattr(self.tokenizer, "chat_template", None)),
            dtype=str(merged.dtype).removeprefix("torch."),
        )

    def _show(self, merged: Merged, target: Any, asked: int) -> None:
        say, count = self.terminal.line, short_count(_count_of(target))
        say("checked: stock transformers finds every weight, and no other")
        if asked:
            say(f"checked: {asked} merged modules give in fp32 what they gave with the adapter")
        if merged.difference is not None:
            of = "before" if self.subject.adapter is None else "the model with its adapter"
            say(f"against {of}: {merged.difference.line()}")
        size = write_bytes(merged.num_bytes)
        say(f"the model is in {self.wish.shown} ({count} weights, {size}; its README.md has more):")
        say()
        for line in short_lines(self._result(merged, target)):
            say(line)


def _tokenizer(subject: Subject, settings: TrainConfig, terminal: Terminal) -> Any:
    """The tokenizer of the result, or None where there is none to go with it."""
    try:
        return open_tokenizer(subject, settings, terminal)
    except ConfigError as error:
        if "no tokenizer" not in str(error) and "cannot load the tokenizer" not in str(error):
            raise
    terminal.line(f"no tokenizer goes with it: neither {subject.given} nor its base has one")
    return None


def _rows(model: Any) -> int:
    return int(base_of(model).get_input_embeddings().weight.shape[0])


def _size_of(target: Any) -> int:
    """Bytes of what will be written, a tied weight once."""
    return sum({id(p): p.nbytes for p in target.parameters()}.values())


def _count_of(target: Any) -> int:
    return sum(parameter.numel() for parameter in target.parameters())


def _take_generation_config(target: Any, subject: Subject) -> None:
    """How the result of a run ends its texts, where that is not as its base does."""
    if subject.adapter is None or not (subject.adapter / "generation_config.json").is_file():
        return
    from transformers import GenerationConfig  # noqa: PLC0415 (imports late)

    with contextlib.suppress(OSError, ValueError, TypeError):
        target.generation_config = GenerationConfig.from_pretrained(subject.adapter)


def _settings_of(config: TrainConfig) -> dict[str, Any]:
    names = ("finetuning_type", "lora_r", "lora_alpha", "learning_rate", "batch_size")
    return {name: getattr(config, name) for name in names}
