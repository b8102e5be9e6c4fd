"""The content hash of a model source: sha256 over files, fast enough for checkpoints of hundreds of gigabytes.

A tree of two levels: each chunk is hashed on its own, on all cores, and the digests are hashed in order.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_CHUNK_BYTES = 16 << 20


def fingerprint_files(files: Mapping[str, Path]) -> str:
    """Hash the content of files, 64 hex digits. Keys are part of the hash, paths are not."""
    tree = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, path in sorted(files.items()):
            tree.update(f"{name}\0{path.stat().st_size}\0".encode())
            for digest in _chunk_digests(path, pool):
                tree.update(digest)
    return tree.hexdigest()


def _chunk_digests(path: Path, pool: ThreadPoolExecutor) -> Iterator[bytes]:
    num_bytes = path.stat().st_size
    if not num_bytes:  # an empty file cannot be mapped
        return
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        # hashing a large buffer releases the interpreter lock
        def digest(start: int) -> bytes:
            with view[start : start + _CHUNK_BYTES] as chunk:
                return hashlib.sha256(chunk).digest()

        yield from pool.map(digest, range(0, num_bytes, _CHUNK_BYTES))
