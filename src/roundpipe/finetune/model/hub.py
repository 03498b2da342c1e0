"""Have the files of a model or an adapter on this machine, mistakes first, gigabytes last.

    locate_model -> fetch (config, tokenizer, template; seconds) -> data is read -> fetch_weights

What cannot be trained is refused in between, before anything large is downloaded.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from roundpipe.errors import RoundPipeError
from roundpipe.models.loading import hub as model_hub
from roundpipe.models.loading.distrust import check_folder
from roundpipe.models.loading.fetch import read_config
from roundpipe.models.loading.formats import refuse_form
from roundpipe.models.loading.own_class import class_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from roundpipe.finetune.model.source import ModelSource


class Shows(Protocol):
    """What is asked of a terminal."""

    def line(self, text: str = "") -> None:
        """Show a line."""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Say what is waited for if it takes long."""

    def counting(
        self, what: str, total: int, unit: str = "B"
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Show how much of ``total`` is done."""


def fetch(source: ModelSource, terminal: Shows, *, hub: model_hub.Hub | None = None) -> ModelSource:
    """Have the small files of ``source`` in a folder, and look whether it can be trained at all.

    Of a hub model the result is at the commit that was found, and the disk has room for its
    weights. A folder's files are looked at, a GGUF file is taken as it is. Blocks on the network.
    Raises ConfigError with a way out, PlanError where the disk has no room.
    """
    if source.gguf_file is not None:
        return source
    with named("model_name_or_path"):
        if source.hub_id is not None and source.snapshot is None:
            with terminal.waiting(f"asking the hub for {source.name}"):
                found = model_hub.open_snapshot(source.hub_id, source.revision, hub)
            if found.note is not None:
                terminal.line(found.note)
            source = replace(
                source, location=str(found.folder), commit=found.commit, snapshot=found
            )
            model_hub.require_room(found)
        folder = Path(source.location)
        check_folder(folder)
        config = read_config(folder)
        class_for(config)
        refuse_form(config)
    return source


def fetch_weights(source: ModelSource, terminal: Shows) -> None:
    """Download the weights of a hub model that was fetched, where the cache does not have them.

    Shows how far it is. What was broken off goes on where it ended.
    """
    snapshot = source.snapshot
    if snapshot is None or not snapshot.missing:
        return
    said = f"downloading {source.name}"
    if snapshot.partial_bytes:
        said += f", going on from {snapshot.partial_bytes / 1e9:.1f} GB"
    with (
        named("model_name_or_path"),
        terminal.counting(said, snapshot.missing_bytes) as show,
    ):
        model_hub.fetch_weights(snapshot, show)


@contextlib.contextmanager
def named(key: str) -> Iterator[None]:
    """Say which key an error is about."""
    try:
        yield
    except RoundPipeError as error:
        if str(error).startswith(key):
            raise
        told = str(error).replace("quantization=nf4", "finetuning_type=qlora")
        raise type(error)(f"{key}: {told}") from error
