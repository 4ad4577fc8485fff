"""Pages that outlive their request: an immutable index of prefixes, a page at a time."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from pyrsistent import PMap, pmap


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """Which page holds the KV of which prefix. `N` pages.

    A page is named by a key that stands for every token up to its end (`page_keys`), so a prefix is a chain of keys, and the tree that SGLang's radix cache
    makes explicit is implied. Whoever reads a page reads all those before it: a page is used no later than the one before it.
    """

    depth: Any  # i32[N + 1]  place of the page in its chain, from 1; 0: the page is not cached
    last_used: Any  # i32[N + 1]  `clock` at its last use
    clock: Any  # i32[]  uses so far
    pages: PMap = dataclasses.field(metadata={"static": True})  # key -> page
    keys: PMap = dataclasses.field(metadata={"static": True})  # page -> key


def init_prefix_cache(num_pages: int) -> PrefixCache:
    """Nothing cached."""
    zeros = np.zeros(num_pages + 1, np.int32)
    return PrefixCache(depth=zeros, last_used=zeros.copy(), clock=np.int32(0), pages=pmap(), keys=pmap())


def page_keys(
    tokens: np.ndarray, *, page_size: int, lookahead: int = 0, known: tuple[bytes, ...] = ()
) -> tuple[bytes, ...]:
    """Names of the pages that a sequence fills: 128 bits of BLAKE2b, chained, so that equal keys mean equal tokens from the start.

    Args:
        tokens: i32[n] or i64[n].
        page_size: tokens a page holds.
        lookahead: tokens past a position on which the draft's KV at that position depends; they are part of the last page's name, and a page without
            them has none. SGLang's bigram keys are the case of 1.
        known: keys of the first pages, if they were computed before.
    """
    keys = list(known)
    tokens = np.ascontiguousarray(tokens, np.int32)
    for i in range(len(keys), (len(tokens) - lookahead) // page_size):
        before = keys[-1] if keys else b""
        content = tokens[i * page_size : (i + 1) * page_size + lookahead].tobytes()
        keys.append(hashlib.blake2b(before + content, digest_size=16).digest())
    return tuple(keys)
