"""Locks on folders: who is kept out, who waits, and what counts as abandoned."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from harness.folder_lock import lock_folder, remove_abandoned


def test_a_folder_that_is_held_is_neither_taken_nor_removed(tmp_path: Path) -> None:
    work = tmp_path / "new" / "work"
    held = lock_folder(work)
    with pytest.raises(BlockingIOError):
        lock_folder(work)
    remove_abandoned(work)
    assert work.is_dir()
    os.close(held)
    os.close(lock_folder(work))
    remove_abandoned(work)
    remove_abandoned(work)  # gone already
    assert not work.exists()


def test_who_waits_gets_a_folder_even_where_the_other_removed_it(tmp_path: Path) -> None:
    work = tmp_path / "work"
    held = lock_folder(work)
    (work / "theirs").touch()
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(lock_folder(work, wait=True)))
    waiting.start()
    waiting.join(0.1)
    assert not got
    shutil.rmtree(work)
    os.close(held)
    waiting.join(10)
    assert list(work.iterdir()) == []
    with pytest.raises(BlockingIOError):
        lock_folder(work)
    os.close(got[0])


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(folder: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    for descriptor in (lock_folder(tmp_path / "work"), lock_folder(tmp_path / "work")):
        os.close(descriptor)
    remove_abandoned(tmp_path / "work")
    assert (tmp_path / "work").is_dir()


def test_a_place_that_holds_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        lock_folder(tmp_path / "file")
    remove_abandoned(tmp_path / "file")
    assert (tmp_path / "file").exists()
