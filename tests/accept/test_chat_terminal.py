"""A conversation at a real terminal: typed lines, an answer that Ctrl-C ends, and leaving."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.finetune import tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.accept

_PATIENCE = 180.0  # seconds for what takes a few where nothing else runs
_COMMAND = "import sys; from roundpipe.cli import main; sys.exit(main())"


class Typist:
    """``roundpipe chat`` with a terminal of its own, and whoever sits there."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.seen = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def take_terminal() -> None:  # so that ^C is a signal
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "chat", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            start_new_session=True,
            preexec_fn=take_terminal,  # noqa: PLW1509 - no thread of ours runs
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
        )
        os.close(theirs)

    def types(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def sees(self, text: str, *, since: int = 0) -> int:
        """Wait for a text behind ``since``; where it ends."""
        until = time.monotonic() + _PATIENCE
        while text not in self.seen[since:]:
            assert time.monotonic() < until, self.seen
            assert self._reads(1.0), self.seen
        return self.seen.index(text, since) + len(text)

    def _reads(self, seconds: float) -> bool:
        """Look for more for so long; False where nobody has the terminal any longer."""
        if select.select([self.ours], [], [], seconds)[0]:
            try:
                self.seen += self._decoder.decode(os.read(self.ours, 4096))
            except OSError:
                return False
        return True

    def has_ended(self, within: float = _PATIENCE) -> bool:
        """Wait for the end, for so many seconds."""
        until = time.monotonic() + within
        while self.process.poll() is None and time.monotonic() < until:
            if not self._reads(0.2):
                time.sleep(0.2)
        return self.process.poll() is not None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.ours)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says "z " for as long as it is let."""
    place = tmp_path_factory.mktemp("terminal")
    tokenizer = tiny_model.tiny_tokenizer()
    model: Any = tiny_model.tiny_model()
    model.config.max_position_embeddings = 100_000
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight[:, 0] = 0.1
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("z"), 0] = 5
    model.save_pretrained(place / "tiny")
    tokenizer.save_pretrained(place / "tiny")
    return place


def test_a_conversation_at_a_terminal(folder: Path) -> None:
    typist = Typist(folder, "tiny", "max_new_tokens=50000")
    try:
        at = typist.sees("> ", since=typist.sees("/help says"))
        typist.types("what?\n")
        at = typist.sees("zzz", since=at)
        assert typist.process.poll() is None
        typist.types("\x03")  # ends the answer, and no more
        at = typist.sees("> ", since=at)
        typist.types("/system be brief\n")
        at = typist.sees("> ", since=typist.sees("noted", since=at))
        typist.types('"""one\n')
        at = typist.sees("… ", since=at)
        typist.types('two"""\n')
        at = typist.sees("zzz", since=at)
        typist.types("\x03")
        at = typist.sees("> ", since=at)
        typist.types("/undo\n")
        at = typist.sees("> ", since=typist.sees("taken back", since=at))
        typist.types("\x04")
        assert typist.has_ended()
        assert typist.process.returncode == 0
        assert "tokens/s" in typist.seen[at:]
    finally:
        typist.close()


def test_ctrl_c_where_a_question_is_awaited_leaves(folder: Path) -> None:
    typist = Typist(folder, "tiny")
    try:
        typist.sees("> ", since=typist.sees("/help says"))
        # Python looks for signals before it waits for a key, and not while it begins to wait: one
        # that comes just then, as no finger's does, is noticed with the next.
        for _ in range(10):
            typist.types("\x03")
            if typist.has_ended(within=20):
                break
        assert typist.process.returncode == 130
        assert "Traceback" not in typist.seen
    finally:
        typist.close()
