"""The engine store: ids, staging, and builds that get in each other's way."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.build.store import check_free_space, engine_id, existing_engine, staged
from harness.errors import BuildError
from harness.folder_lock import remove_abandoned

PARTS: dict[str, object] = {
    "content_hash": "0" * 64,
    "arch": "cpu",
    "layers": {"lm_head": "int8"},
    "versions": {"openvino": "1"},
    "compile_settings": {"fast": {"KV_CACHE_PRECISION": "u8"}},
}


def make_id(**changes: object) -> str:
    return engine_id(**PARTS | changes)  # type: ignore[arg-type]


def test_an_id_follows_everything_that_decides_the_bytes() -> None:
    ids = [
        make_id(),
        make_id(content_hash="1" * 64),
        make_id(arch="sm_90"),
        make_id(layers={"lm_head": "f16"}),
        make_id(versions={"openvino": "2"}),
        make_id(compile_settings={"fast": {"KV_CACHE_PRECISION": "f16"}}),
    ]
    assert len(set(ids)) == len(ids)
    assert make_id() == ids[0]
    assert all(len(identity) == 12 for identity in ids)


def test_a_build_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    engine = tmp_path / "model" / "cpu-1"
    with pytest.raises(FileNotFoundError), staged(engine) as stage:
        (stage / "half").write_text((stage / "nothing").read_text())
    assert not engine.parent.exists()
    with staged(engine) as stage:
        (stage / "whole").write_text("")
        assert not engine.exists()
    assert [path.name for path in engine.parent.iterdir()] == ["cpu-1"]
    assert [path.name for path in engine.iterdir()] == ["whole"]


def test_an_empty_folder_is_filled_and_a_full_one_is_not_touched(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    with staged(engine) as stage:
        (stage / "new").write_text("")
    with pytest.raises(OSError), staged(engine) as stage:
        (stage / "newer").write_text("")
    assert [path.name for path in engine.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [engine]


def test_other_builds_in_the_making_are_left_alone(tmp_path: Path) -> None:
    with staged(tmp_path / "a") as first, staged(tmp_path / "a") as second, staged(tmp_path / "b") as third:
        assert len({first, second, third}) == 3
        assert first.is_dir()
        assert second.is_dir()
        shutil.rmtree(second)  # as if it were lost: the others do not care
        second.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    # a process id that lives says nothing: the build may have run in another container
    leftover = tmp_path / f".building-{os.getpid()}"
    (leftover / "folder").mkdir(parents=True)
    (tmp_path / ".building-file").write_text("mine")
    with staged(tmp_path / "engine"):
        assert not leftover.exists()
    assert (tmp_path / ".building-file").read_text() == "mine"


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked", "while its cleaner is at work"])
def test_a_folder_taken_for_a_leftover_is_not_used(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another build cleans up between the making of a folder and its lock."""
    taken: list[str] = []
    held: list[int] = []
    real_open, real_flock = os.open, fcntl.flock

    def open_(path: str | Path, flags: int, **options: Any) -> int:
        if not taken and moment == "before it is opened":
            taken.append(str(path))
            shutil.rmtree(path)
        descriptor = real_open(path, flags, **options)
        if not taken:
            taken.append(str(path))
            if moment == "before it is locked":
                shutil.rmtree(path)
            else:
                held.append(real_open(path, flags))
                real_flock(held[0], fcntl.LOCK_EX)
        return descriptor

    monkeypatch.setattr(os, "open", open_)
    with staged(tmp_path / "engine") as stage:
        monkeypatch.undo()
        remove_abandoned(stage)
        assert stage.is_dir()
        assert not held or taken != [str(stage)]
        for descriptor in held:
            shutil.rmtree(taken[0])
            os.close(descriptor)
        (stage / "whole").write_text("")
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["whole"]


def test_a_file_system_without_locks_is_built_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(folder: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".building-other").mkdir()
    with staged(tmp_path / "engine"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".building-other", "engine"]


def test_a_build_that_fails_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for engine in (tmp_path / "engines" / "model" / "cpu-1", tmp_path / "mine" / "new" / "cpu-1"):
        with pytest.raises(ZeroDivisionError), staged(engine):
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    assert not existing_engine(tmp_path / "nothing", "1")
    (tmp_path / "empty").mkdir()
    assert not existing_engine(tmp_path / "empty", "1")
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path):
        with pytest.raises(BuildError, match="is not an engine") as caught:
            existing_engine(wrong, "1")
        assert "--out" in caught.value.hint


def test_a_disk_that_is_too_small_is_told_before_writing(tmp_path: Path) -> None:
    check_free_space(tmp_path, 1)
    with pytest.raises(BuildError, match="GiB are free") as caught:
        check_free_space(tmp_path, 1 << 60)
    assert "--out on another disk" in caught.value.hint
