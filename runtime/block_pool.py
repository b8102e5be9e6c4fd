"""KV blocks by number: who holds them, which are free, and which still hold something worth finding.

A block is held by the block tables that contain it (its reference count), or free. Its content may be published under
a digest; a published block stays findable while free, until it is taken again:

    allocate() <-- [ never published | least recently freed  ...  most recently freed ] <-- release()
                     taken first       published: taking one is an eviction

Owns no KV memory and does not know what a digest is made of: see `harness.runtime.prefix_cache`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from harness.runtime.executor import TOKENS_PER_BLOCK


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that `num_tokens` tokens occupy."""
    return -(-num_tokens // TOKENS_PER_BLOCK)


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Every operation is O(1) a block.

    Raises:
        ValueError: `num_blocks` is not positive.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; allowed: 1 or more")
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self._num_refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, published ones included."""
        return len(self._free)

    @property
    def num_published(self) -> int:
        """Blocks that can be found by digest, free or held."""
        return len(self._digest_of)

    def is_free(self, block_id: int) -> bool:
        """Whether no table holds the block."""
        return self._num_refs[block_id] == 0

    def allocate(self) -> int:
        """Take a free block, whose content is forgotten. The caller has checked `num_free`."""
        block_id, _ = self._free.popitem(last=False)
        if block_id in self._digest_of:
            self.forget([block_id])
            self.num_evictions += 1
        self._num_refs[block_id] = 1
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that were found, one reference more each."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._num_refs[block_id] += 1

    def release(self, block_table: Sequence[int]) -> None:
        """Drop one reference to each block of a table.

        The table is walked from its end, so that a sequence's last block is evicted before its first: a block is worth
        nothing without those before it.
        """
        for block_id in reversed(block_table):
            assert self._num_refs[block_id] > 0, f"block {block_id} is released but not held"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._digest_of:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, digest: bytes) -> None:
        """Make a held block findable. Of two blocks of equal content the first stays the one that is found."""
        assert self._num_refs[block_id] > 0, f"block {block_id} is published but not held"
        assert block_id not in self._digest_of, f"block {block_id} is published twice"
        if digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def find(self, digest: bytes) -> int | None:
        """The block published under `digest`; changes nothing."""
        return self._block_of.get(digest)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable; those that are not published are passed over."""
        for block_id in block_ids:
            digest = self._digest_of.pop(block_id, None)
            if digest is not None:
                del self._block_of[digest]

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that the reference counts are exactly those of `block_tables`, and that nothing leaked.

        Raises:
            AssertionError: a block is lost, held twice over, or findable under a digest that is not its own.
        """
        held = Counter(chain.from_iterable(block_tables))
        assert self._num_refs == [held[block_id] for block_id in range(self.num_blocks)], "reference counts are wrong"
        assert self._free.keys() == set(range(self.num_blocks)) - held.keys(), "free and held blocks do not add up"
        assert self._block_of == {digest: block_id for block_id, digest in self._digest_of.items()}
