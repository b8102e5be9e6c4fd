"""Locks on folders: they tell the work of a living process from what a dead one left.

The kernel drops a lock with its process. A process id would not do: two containers that share a disk do not see each
other's. On a file system without locks nobody is kept out, and nothing is taken for abandoned.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_ATTEMPTS = 100  # other processes may remove a folder again and again, but not for ever


def lock_folder(path: Path, *, wait: bool = False) -> int:
    """Make a folder, or take the one that is there, and lock it.

    Returns:
        A descriptor that holds the lock until it is closed.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
        OSError: the folder cannot be made.
    """
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):  # others may remove it, and those above it, while they are empty
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock(descriptor, wait)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "no folder can be made there", str(path.parent))


def remove_abandoned(path: Path) -> None:
    """Remove a folder that no living process holds; one that cannot be removed is left."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone since, or somebody else's
        return
    with suppress(BlockingIOError):
        if _lock(descriptor, wait=False):
            shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    """Whether it is locked now; not so on a file system without locks.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
