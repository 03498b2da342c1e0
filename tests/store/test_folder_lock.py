import os

import pytest

from roundpipe.errors import ConfigError
from roundpipe.store.folder_lock import LOCK_FILE, lock_folder


def test_a_held_folder_is_refused_naming_option_and_process_and_is_free_afterwards(tmp_path):
    with lock_folder(tmp_path, key="some_dir"):
        with pytest.raises(ConfigError) as error, lock_folder(tmp_path, key="some_dir"):
            pass
        assert str(error.value) == (
            f"some_dir: {tmp_path} is in use by the live process {os.getpid()}\n"
            "hint: some_dir=ANOTHER, or wait until that run has ended"
        )
    assert not (tmp_path / LOCK_FILE).exists()
    with lock_folder(tmp_path, key="some_dir"):
        pass


def test_a_file_left_by_a_process_that_died_holds_nothing(tmp_path):
    (tmp_path / LOCK_FILE).write_text("1")
    with lock_folder(tmp_path, key="some_dir"):
        assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())


def test_where_one_may_not_write_is_said_by_the_options_name(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()  # root may write anywhere else
    with (
        pytest.raises(ConfigError, match=r"(?s)some_dir: .* cannot be written to: .*hint: some_"),
        lock_folder(tmp_path, key="some_dir"),
    ):
        pass
