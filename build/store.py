"""Where engines are kept, and how one comes into being: whole or not at all.

An engine is written into a temporary folder beside its place and renamed when complete. A build that fails leaves
nothing, not even the folders it made for the engine to lie in; what a killed one left behind is removed by the next.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from harness.errors import BuildError, EngineError
from harness.folder_lock import lock_folder, remove_abandoned
from harness.manifest import MANIFEST_NAME, read_manifest, verify_files

_TEMPORARY = ".building-"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def engine_id(
    *,
    content_hash: str,
    arch: str,
    layers: Mapping[str, str],
    versions: Mapping[str, str],
    compile_settings: Mapping[Literal["fast", "deterministic"], Mapping[str, str]],
) -> str:
    """12 hex digits from all that decides what an engine computes, and how."""
    parts = {
        "content": content_hash,
        "arch": arch,
        "layers": layers,
        "versions": versions,
        "compile_settings": compile_settings,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def existing_engine(engine_dir: Path, wanted_id: str) -> bool:
    """Whether the wanted engine is already there, whole.

    Raises:
        BuildError: the folder holds something else, or an engine that is damaged or of another version.
        OSError: the folder cannot be looked at.
    """
    if not engine_dir.exists():
        return False
    if (engine_dir / MANIFEST_NAME).is_file():
        try:
            manifest = read_manifest(engine_dir)
            if manifest.engine_id == wanted_id:
                verify_files(engine_dir, manifest)
                return True
        except EngineError as error:
            raise BuildError(
                f"{engine_dir} holds an engine that cannot be reused: {error.message}",
                "remove it and build again, or give another --out",
            ) from None
        raise BuildError(
            f"{engine_dir} holds another engine (id {manifest.engine_id}, this build is {wanted_id})",
            "give another --out",
        )
    refuse_occupied(engine_dir)
    return False


def refuse_occupied(engine_dir: Path) -> None:
    """Refuse a place of which nothing but its path need be known to see that no engine can lie there.

    Raises:
        BuildError: something else is there.
        OSError: the folder cannot be looked at.
    """
    if not engine_dir.exists() or (engine_dir / MANIFEST_NAME).is_file():
        return
    if not engine_dir.is_dir() or any(engine_dir.iterdir()):
        raise BuildError(f"{engine_dir} exists and is not an engine", "give another --out, or remove it")


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuse early what cannot be written.

    Raises:
        BuildError: the disk has less than `needed_bytes` free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise BuildError(
            f"building needs {needed_bytes / 2**30:.2f} GiB of disk, {free / 2**30:.2f} GiB are free in {folder}",
            "free some, or give --out on another disk",
        )


def not_written(folder: Path, error: OSError) -> BuildError:
    """What to raise where `folder` could not be written."""
    where = f" ({error.filename})" if error.filename else ""
    hint = (
        "free some space, or give --out on another disk"
        if error.errno in DISK_FULL
        else "check the folder, or give another --out"
    )
    return BuildError(f"cannot write {str(folder)[:200]}: {error.strerror or error}{where[:200]}", hint)


def was_taken(error: OSError) -> bool:
    """Whether `staged` failed because its folder had been filled meanwhile, such as by a faster build of the same."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)


@contextmanager
def staged(engine_dir: Path) -> Iterator[Path]:
    """A temporary folder that becomes `engine_dir` if the block succeeds and vanishes if it does not.

    Raises:
        OSError: the folder cannot be made or renamed, such as when another build finished `engine_dir` first.
    """
    target = Path(os.path.realpath(engine_dir))  # a link to an empty folder is filled, not replaced
    with _made(target.parent):
        for leftover in target.parent.glob(f"{_TEMPORARY}*"):
            remove_abandoned(leftover)
        stage, lock = _make_locked(target.parent)
        try:
            yield stage
            stage.rename(target)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            os.close(lock)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder and those above it; what it made is removed again if it stays empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with suppress(OSError):  # not empty, or never made
                path.rmdir()


def _make_locked(parent: Path) -> tuple[Path, int]:
    """A new folder and a descriptor that holds its lock; until then, another build may take it for a leftover."""
    while True:
        stage = parent / f"{_TEMPORARY}{secrets.token_hex(6)}"
        with suppress(BlockingIOError):  # another build is about to remove it
            return stage, lock_folder(stage)
