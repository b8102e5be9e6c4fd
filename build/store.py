"""Where engines are kept, and how one comes into being: whole or not at all.

An engine is written into a temporary folder beside its place and renamed when complete. An interrupted build leaves
nothing that looks like an engine; what a killed one left behind is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from harness.errors import BuildError
from harness.manifest import MANIFEST_NAME, read_manifest

_TEMPORARY = ".building-"


def engine_id(*, content_hash: str, arch: str, layers: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """12 hex digits from all that decides an engine's bytes: weights, arch, recipe, versions."""
    parts = {"content": content_hash, "arch": arch, "layers": dict(layers), "versions": dict(versions)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def existing_engine(engine_dir: Path, wanted_id: str) -> bool:
    """Whether the wanted engine is already there.

    Raises:
        BuildError: the folder holds something else.
    """
    if not engine_dir.exists():
        return False
    if (engine_dir / MANIFEST_NAME).is_file():
        found = read_manifest(engine_dir).engine_id
        if found == wanted_id:
            return True
        raise BuildError(
            f"{engine_dir} holds another engine (id {found}, this build is {wanted_id})", "give another --out"
        )
    if not engine_dir.is_dir() or any(engine_dir.iterdir()):
        raise BuildError(f"{engine_dir} exists and is not an engine", "give another --out, or remove it")
    return False


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


@contextmanager
def staged(engine_dir: Path) -> Iterator[Path]:
    """A temporary folder that becomes `engine_dir` if the block succeeds and vanishes if it does not."""
    engine_dir.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(engine_dir.parent)
    stage = engine_dir.parent / f"{_TEMPORARY}{os.getpid()}-{engine_dir.name}"
    stage.mkdir()
    try:
        yield stage
        if engine_dir.is_dir() and not any(engine_dir.iterdir()):
            engine_dir.rmdir()
        stage.rename(engine_dir)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    for stage in folder.glob(f"{_TEMPORARY}*"):
        pid = stage.name.removeprefix(_TEMPORARY).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(stage, ignore_errors=True)
