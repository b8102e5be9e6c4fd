"""Chooses which prompts to calibrate on: no two alike, and every kind of them there.

Owns near-duplicates and the stratified draw. Both keep the order of the keys that prompts came with, so that the same
traffic and seed give the same draw.

Near-duplicates: SimHash over shingles of eight characters (Charikar, STOC 2002), as used for web pages by Manku et al.
(WWW 2007). They let 3 of 64 bits differ among billions of pages; 6 find more of the edits among a few thousand
requests, and two texts meet there when about 95% of their shingles are the same.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

SHINGLE_CHARS = 8
MAX_DIFFERENT_BITS = 6
MAX_SHINGLE_TEXT = 1 << 14
FLOOR_SHARE = 64


def first_of_each(texts: Sequence[tuple[str, str]]) -> list[int]:
    """Places of the texts that are no near-duplicate of an earlier one, in order.

    Texts are `(system prompt, body)`; only bodies are compared, and only under the same system prompt: a long prompt
    that all requests share would make all of them alike.
    """
    kept: list[int] = []
    hashes: dict[str, npt.NDArray[np.uint64]] = {}
    seen: set[tuple[str, str]] = set()
    for place, (system_prompt, body) in enumerate(texts):
        plain = _plain(body)
        if (system_prompt, plain) in seen:
            continue
        value = simhash(plain)
        earlier = hashes.get(system_prompt, np.empty(0, dtype=np.uint64))
        if len(earlier) and _num_bits(earlier ^ value).min() <= MAX_DIFFERENT_BITS:
            continue
        seen.add((system_prompt, plain))
        hashes[system_prompt] = np.append(earlier, value)
        kept.append(place)
    return kept


def _plain(text: str) -> str:
    """Letters alone, and a 0 for each digit; the whole text where that leaves nothing."""
    return re.sub(r"\d", "0", re.sub(r"[\W_]+", "", text[:MAX_SHINGLE_TEXT].casefold())) or text


def simhash(text: str) -> np.uint64:
    """64 bits that differ in few places between texts that differ little."""
    codes = np.frombuffer(text.ljust(SHINGLE_CHARS)[:MAX_SHINGLE_TEXT].encode("utf-32-le"), dtype=np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(codes.astype(np.uint64), SHINGLE_CHARS)
    powers = np.power(np.uint64(0x9E3779B97F4A7C15), np.arange(1, SHINGLE_CHARS + 1, dtype=np.uint64))
    mixed = (windows * powers).sum(axis=1, dtype=np.uint64)
    for shift in (33, 29):  # the finalizer of MurmurHash3: every bit of a shingle moves every bit of its hash
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(0xFF51AFD7ED558CCD)
    bits = np.unpackbits(mixed.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")
    ones = bits.sum(axis=0, dtype=np.int64) * 2 > len(mixed)
    return np.uint64(int.from_bytes(np.packbits(ones, bitorder="little").tobytes(), "little"))


def _num_bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    bits = np.unpackbits(values.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1)
    return np.asarray(bits.sum(axis=1, dtype=np.int64))


def draw(kinds: Sequence[tuple[Hashable, ...]], num: int) -> list[int]:
    """Places of `num` of the items whose kinds along each axis (language, length, prompt, ...) are given.

    First every kind of every axis gets up to `max(1, num / 64)` items, the rarest first; then the rest is drawn in
    proportion to how often each combination of kinds occurs. Returned in the order of the items.
    """
    if num >= len(kinds):
        return list(range(len(kinds)))
    taken: set[int] = set()
    members: dict[tuple[int, Hashable], list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        for axis, value in enumerate(kind):
            members[axis, value].append(place)
    rarest_first = [
        members[key] for key in sorted(members, key=lambda key: (len(members[key]), key[0], members[key][0]))
    ]
    for floor in range(1, max(1, num // FLOOR_SHARE) + 1):
        for places in rarest_first:
            have = sum(place in taken for place in places)
            free = next((place for place in places if place not in taken), None)
            if have < floor and free is not None and len(taken) < num:
                taken.add(free)
    return sorted(taken | _in_proportion(kinds, [p for p in range(len(kinds)) if p not in taken], num - len(taken)))


def _in_proportion(kinds: Sequence[tuple[Hashable, ...]], places: Sequence[int], num: int) -> set[int]:
    """The first places of each stratum, as many as its share of all places; largest remainders fill up."""
    strata: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for place in places:
        strata[kinds[place]].append(place)
    quotas = {kind: num * len(members) / max(len(places), 1) for kind, members in strata.items()}
    sizes = Counter({kind: int(quota) for kind, quota in quotas.items()})
    by_remainder = sorted(quotas, key=lambda kind: (sizes[kind] - quotas[kind], strata[kind][0]))
    sizes.update(by_remainder[: num - sizes.total()])
    return {place for kind, members in strata.items() for place in members[: sizes[kind]]}


def common_prompts(system_prompts: Sequence[str], *, max_prompts: int = 32) -> list[str]:
    """A short name per prompt: empty for none, a hash for the most common ones, `other` for the rest.

    Prompts that hold a date or a name are all different; as kinds of their own they would crowd out all others.
    """
    counts = Counter(filter(None, system_prompts))
    ranked = sorted(counts, key=lambda prompt: (-counts[prompt], prompt))[:max_prompts]
    names = {prompt: prompt_hash(prompt) for prompt in ranked} | {"": ""}
    return [names.get(prompt, "other") for prompt in system_prompts]


def prompt_hash(prompt: str) -> str:
    """The first eight hex digits of its SHA-256."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]
