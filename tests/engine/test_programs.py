"""What is compiled: in place, ahead of time, for sizes that cover every batch."""

import re

import jax
import pytest
from engine.kit import build, markov, transformer

from jspec import EngineConfig
from jspec.engine.buckets import fit, make_buckets
from jspec.spec_workers.upload import ExtendSizes
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


def limits_of(**given):
    sizes = dict(context_len=1000, alloc_len=8, depth=1, max_prefill_tokens=1000, max_prefill_rows=4)
    return Limits(**{**sizes, **given})


def test_buckets_cover_every_size():
    limits = limits_of()
    buckets = make_buckets(EngineConfig(max_running=12), limits, pages_per_row=16)
    assert buckets.batch == (1, 2, 4, 8, 12)
    assert buckets.table_width == (4, 16)
    tokens = (64, 128, 256, 512, 1000)
    # Each of them twice: prompts alone, and with as many tails as may run. 16 tokens of reserve touch one more page of 64 at most.
    sizes = dict(num_rows=4, lookahead=1, table_width=16, max_new_pages=1)
    assert buckets.prefill == tuple(
        ExtendSizes(num_tokens=num_tokens, num_tails=num_tails, **sizes)
        for num_tails in (0, 12)
        for num_tokens in tokens
    )
    assert [fit(buckets.batch, n) for n in (1, 3, 8, 9, 12)] == [1, 4, 8, 12, 12]
    with pytest.raises(ValueError, match="need=13"):
        fit(buckets.batch, 13)


@pytest.mark.parametrize(("tails", "num_tails"), [(False, 0), (True, 12)])
def test_a_prefill_runs_in_the_smallest_program_that_holds_it(tails, num_tails):
    buckets = make_buckets(EngineConfig(max_running=12), limits_of(), pages_per_row=16)
    for num_tokens, expected in ((1, 64), (64, 64), (65, 128), (512, 512), (513, 1000), (1000, 1000)):
        sizes = buckets.extend(num_tokens, tails=tails)
        assert (sizes.num_tokens, sizes.num_tails) == (expected, num_tails)


def test_programs_with_tails_are_built_only_where_batches_are_mixed():
    buckets = make_buckets(EngineConfig(max_running=12), limits_of(mixed=False), pages_per_row=16)
    assert [sizes.num_tokens for sizes in buckets.prefill] == [64, 128, 256, 512, 1000]
    assert {sizes.num_tails for sizes in buckets.prefill} == {0}


@pytest.mark.parametrize(("lookahead", "columns"), [(0, 1), (1, 1), (3, 3)])
def test_an_upload_has_room_for_what_follows_a_chunk(lookahead, columns):
    buckets = make_buckets(EngineConfig(max_running=12), limits_of(lookahead=lookahead), pages_per_row=16)
    assert {sizes.lookahead for sizes in buckets.prefill} == {columns}


def test_prefill_buckets_end_with_what_one_batch_may_prefill():
    """The last one is `max_prefill_tokens`, which is below the context length where prompts go in chunks."""
    limits = limits_of(max_prefill_tokens=100)
    buckets = make_buckets(EngineConfig(prefill_buckets=(10, 100)), limits, pages_per_row=16)
    assert [sizes.num_tokens for sizes in buckets.prefill] == [10, 100, 10, 100]
    doubling = make_buckets(EngineConfig(), limits, pages_per_row=16)
    assert [sizes.num_tokens for sizes in doubling.prefill] == [64, 100, 64, 100]
    small = make_buckets(EngineConfig(), limits_of(max_prefill_tokens=40), pages_per_row=16)
    assert [sizes.num_tokens for sizes in small.prefill] == [40, 40]
    for refused in ((10,), (10, 1000)):
        with pytest.raises(
            ValueError, match=rf"{re.escape(f'prefill_buckets={refused}')} must end with max_prefill_tokens=100"
        ):
            make_buckets(EngineConfig(prefill_buckets=refused), limits, pages_per_row=16)


def test_every_program_of_an_engine_is_built():
    """Decode by rows, pages and depth; prefill by tokens, alone and with tails, but where there could be none."""
    for max_running, num_tails in ((2, [0, 2]), (1, [0])):
        settings = dict(max_prefill_tokens=32, prefill_buckets=(32,), mixed_batches=True)
        engine = build(markov(), "plain", max_running=max_running, **settings)
        assert [sizes.num_tails for sizes in engine._buckets.prefill] == num_tails
        assert len(engine._programs) == len(engine._buckets.table_width) + len(num_tails)
        for sizes in engine._buckets.prefill:
            assert engine._programs[sizes].phase is not None
