"""Reuse of KV between requests that begin alike.

Full blocks are named by a digest of everything their KV depends on within one engine: the tenant's salt, all earlier
tokens, and their own:

    digest[-1] = H(salt)        digest[i] = H(digest[i - 1], tokens of block i)

H is BLAKE2b (RFC 7693) with 256 bits: equal digests mean equal content even where prompts are crafted to collide, so
nothing is compared on a hit, and tenants of different salts can never meet. Hashing takes under a microsecond a block.

Owns the naming and the rule of how much may be reused. The blocks are `harness.runtime.block_pool`'s.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from harness.runtime.block_pool import BlockPool
from harness.runtime.executor import TOKENS_PER_BLOCK
from harness.runtime.sequence import Sequence


class PrefixCache:
    """Finds and publishes the blocks of sequences in `pool`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest known prefix, `[]` for none. They are not yet held.

        Tokens whose logits are wanted are left to compute, one at least: of a sequence that is known to its very end
        the last block is computed again.
        """
        num_blocks = sequence.first_logit_position // TOKENS_PER_BLOCK
        _hash_blocks(sequence, num_blocks)
        block_ids: list[int] = []
        for digest in sequence.block_digests[:num_blocks]:
            block_id = self._pool.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, sequence: Sequence, first_block: int) -> None:
        """Make the full computed blocks of a sequence findable, from number `first_block` of its table on."""
        num_blocks = sequence.num_computed_tokens // TOKENS_PER_BLOCK
        _hash_blocks(sequence, num_blocks)
        for i in range(first_block, num_blocks):
            self._pool.publish(sequence.block_table[i], sequence.block_digests[i])


def _hash_blocks(sequence: Sequence, num_blocks: int) -> None:
    """Bring `block_digests` up to `num_blocks` entries."""
    digests = sequence.block_digests
    # `person` keeps a salt from ever being read as a block
    parent = digests[-1] if digests else _digest(sequence.request.cache_salt.encode(), person=b"salt")
    for start in range(len(digests) * TOKENS_PER_BLOCK, num_blocks * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK):
        tokens = array("I", sequence.token_ids[start : start + TOKENS_PER_BLOCK])
        parent = _digest(parent + tokens.tobytes(), person=b"block")
        digests.append(parent)


def _digest(data: bytes, *, person: bytes) -> bytes:
    return blake2b(data, digest_size=32, person=person).digest()
