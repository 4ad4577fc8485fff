"""What is compiled: in place, ahead of time, for sizes that cover every batch."""

import jax
import pytest
from engine.kit import build, transformer

from jspec import EngineConfig
from jspec.engine.buckets import fit, make_buckets
from jspec.state import Limits


@pytest.mark.parametrize("algorithm", ["plain", "ngram"])
def test_the_pool_is_updated_in_place(algorithm):
    """Every program aliases the whole device state, and its temporaries are far smaller than the pool: nobody copies it, whichever width a step takes."""
    engine = build(transformer(), algorithm, kv_tokens=60_000, checked=False)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._loop.device))
    pool_bytes = engine._loop.device.kv_pages.nbytes
    assert pool_bytes > 10e6
    for program in engine._programs._by_key.values():
        memory = program.phase.memory_analysis()
        assert memory.alias_size_in_bytes >= state_bytes
        assert memory.temp_size_in_bytes < pool_bytes / 8


def test_the_pool_follows_from_the_memory_budget():
    """B70: a budget in bytes gives the tokens it holds, and never more than all rows can use; a wider verify leaves less to hold."""
    per_token = transformer().facts.kv_bytes_per_token
    engine = build(transformer(), "plain", kv_memory_bytes=per_token * 16 * 10, max_running=2)
    assert engine.num_kv_tokens == 160
    assert engine._loop.device.kv_pages.nbytes == per_token * (160 + 16), "the pool and its sink page"
    engine = build(transformer(), "plain", kv_memory_bytes=10**9, max_running=2)
    assert engine.num_kv_tokens == 2 * 128, "what two requests of 128 tokens, reserve included, can hold"


def test_buckets_cover_every_size():
    limits = Limits(context_len=1000, alloc_len=8, depth=1, max_prefill_tokens=1000, max_prefill_rows=4)
    buckets = make_buckets(EngineConfig(max_running=12), limits, pages_per_row=16)
    assert buckets.batch == (1, 2, 4, 8, 12)
    assert buckets.table_width == (4, 8, 16)
    assert buckets.prefill_tokens == (64, 128, 256, 512, 1000)
    assert [fit(buckets.batch, n) for n in (1, 3, 8, 9, 12)] == [1, 4, 8, 12, 12]
    with pytest.raises(ValueError, match="need=13"):
        fit(buckets.batch, 13)
    with pytest.raises(ValueError, match="must end with context_len=1000"):
        make_buckets(EngineConfig(prefill_buckets=(10,)), limits, pages_per_row=16)
