"""Blocks are taken in the order least likely to be missed, and none is ever lost."""

from __future__ import annotations

import random

import pytest

from harness.runtime.block_pool import BlockPool, num_blocks_for


def test_num_blocks_for() -> None:
    assert [num_blocks_for(n) for n in (0, 1, 32, 33, 64, 65)] == [0, 1, 1, 2, 2, 3]


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_published_blocks_are_taken_last_and_children_before_parents() -> None:
    pool = BlockPool(6)
    old, new, private = ([pool.allocate(), pool.allocate()] for _ in range(3))
    assert (old, new, private) == ([0, 1], [2, 3], [4, 5])
    for block_id, digest in zip([*old, *new], (b"o0", b"o1", b"n0", b"n1"), strict=True):
        pool.publish(block_id, digest)
    pool.release(new)
    pool.release(old)
    pool.release(private)
    assert pool.num_free == 6
    # unpublished first; then by the time of release, where each table gives up its end first
    assert [pool.allocate() for _ in range(6)] == [4, 5, 3, 2, 1, 0]
    assert pool.num_evictions == 4
    assert pool.num_published == 0


def test_a_free_block_is_found_until_it_is_taken() -> None:
    pool = BlockPool(2)
    first = pool.allocate()
    pool.publish(first, b"d")
    pool.release([first])
    assert pool.find(b"d") == first
    pool.acquire([first])
    assert pool.num_free == 1
    pool.allocate()
    assert (pool.find(b"d"), pool.num_evictions) == (first, 0)
    pool.release([first])
    assert pool.allocate() == first
    assert (pool.find(b"d"), pool.num_evictions) == (None, 1)


def test_shared_blocks_are_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, b"d")
    pool.acquire([block])
    pool.check_integrity([[block], [block]])
    pool.release([block])
    assert not pool.is_free(block)
    pool.release([block])
    assert pool.is_free(block)
    pool.check_integrity([])


def test_of_equal_contents_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"d")
    pool.publish(second, b"d")
    assert pool.find(b"d") == first
    assert pool.num_published == 1


def test_forgotten_blocks_are_not_found() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"d")
    pool.forget([block, 1])
    assert pool.find(b"d") is None
    pool.release([block])
    pool.check_integrity([])
    assert pool.num_evictions == 0


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([[block], [block]])
    pool.release([block])
    with pytest.raises(AssertionError, match="released but not held"):
        pool.release([block])


def test_random_use_leaks_nothing() -> None:
    rng = random.Random(0)
    pool = BlockPool(16)
    tables: list[list[int]] = []
    for i in range(3000):
        if tables and rng.random() < 0.45:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif tables and rng.random() < 0.2:
            shared = list(rng.choice(tables))
            pool.acquire(shared)
            tables.append(shared)
        else:
            table = [pool.allocate() for _ in range(min(rng.randint(1, 4), pool.num_free))]
            for j, block_id in enumerate(table[:-1]):
                pool.publish(block_id, f"{i}.{j}".encode())
            tables.append(table)
        pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    pool.check_integrity([])
    assert pool.num_free == 16
    assert pool.num_evictions > 0
