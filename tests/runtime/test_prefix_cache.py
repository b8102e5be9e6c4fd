"""A block is found by exactly those sequences whose KV in it would be the same."""

from __future__ import annotations

from harness.runtime.block_pool import BlockPool
from harness.runtime.executor import TOKENS_PER_BLOCK
from harness.runtime.prefix_cache import PrefixCache
from harness.runtime.request import Request, SamplingParams
from harness.runtime.sequence import Sequence


def make_sequence(token_ids: list[int], salt: str = "") -> Sequence:
    request = Request(
        request_id="r", prompt_token_ids=token_ids, sampling=SamplingParams(max_tokens=8), cache_salt=salt
    )
    return Sequence(request, max_tokens=8)


def compute(pool: BlockPool, cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    """Blocks of a sequence computed to its end, published."""
    sequence = make_sequence(token_ids, salt)
    sequence.block_table = [pool.allocate() for _ in range(-(-len(token_ids) // TOKENS_PER_BLOCK))]
    sequence.num_computed_tokens = len(token_ids)
    cache.publish(sequence, 0)
    return sequence.block_table


def test_only_full_blocks_are_found() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    assert compute(pool, cache, list(range(70))) == [0, 1, 2]
    assert pool.num_published == 2
    assert cache.find(make_sequence(list(range(100)))) == [0, 1]
    assert cache.find(make_sequence([*range(64), 5])) == [0, 1]
    assert cache.find(make_sequence([*range(63), 5, 5])) == [0]
    assert cache.find(make_sequence(list(range(1, 100)))) == []
    assert cache.find(make_sequence([7])) == []


def test_one_token_is_left_to_compute() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    compute(pool, cache, list(range(64)))
    assert cache.find(make_sequence(list(range(65)))) == [0, 1]
    assert cache.find(make_sequence(list(range(64)))) == [0]
    assert cache.find(make_sequence(list(range(32)))) == []


def test_a_block_counts_only_behind_its_own_prefix() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    a, b = [1] * TOKENS_PER_BLOCK, [2] * TOKENS_PER_BLOCK
    compute(pool, cache, a + b)
    assert cache.find(make_sequence([*b, 0])) == []
    assert cache.find(make_sequence([*b, *b, 0])) == []
    assert cache.find(make_sequence([*a, *a, 0])) == [0]


def test_a_child_is_not_found_without_its_parent() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    table = compute(pool, cache, list(range(96)))
    pool.forget([table[1]])
    assert cache.find(make_sequence(list(range(100)))) == [0]


def test_tenants_never_share() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    prompt = list(range(64))
    compute(pool, cache, prompt, salt="A")
    assert cache.find(make_sequence([*prompt, 1], salt="A")) == [0, 1]
    assert cache.find(make_sequence([*prompt, 1], salt="B")) == []
    assert cache.find(make_sequence([*prompt, 1])) == []


def test_digests_grow_with_the_sequence() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    sequence = make_sequence(list(range(40)))
    assert cache.find(sequence) == []
    for token_id in range(40, 70):
        sequence.append(token_id)
    sequence.block_table = [pool.allocate() for _ in range(3)]
    sequence.num_computed_tokens = 69
    cache.publish(sequence, 0)
    assert cache.find(make_sequence(list(range(80)))) == [0, 1]
