"""Block drafts whose KV lies in a ring for each row: what they propose is what they propose over pages, and never more than their window."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import assert_idle, build, greedy, slow_greedy
from engine.test_scheduling import modes, run_staggered

from jspec import EngineConfig
from jspec.engine.pool import num_kv_pages
from jspec.models.tiny import random_target
from jspec.models.tiny_block_draft import random_block_draft
from jspec.spec_workers import build_worker, dflash, dspark
from jspec.spec_workers.base import DeviceSizes
from jspec.spec_workers.draft_cache import draft_cache
from jspec.spec_workers.forward import Prefill, prefill_batch
from jspec.state import ForwardMode, Limits

VOCAB, CONTEXT, TOKENS, WINDOW, BLOCK = 8, 320, 32, 16, 8
KINDS = {"dflash": dflash, "dspark": dspark}


@functools.cache
def target():
    """Of so few tokens that random drafts are right now and then."""
    return random_target(0, vocab_size=VOCAB, context_len=CONTEXT)


@functools.cache
def drafted(kind: str, window: int | None = WINDOW):
    own = {"markov_rank": 4, "confidence": True} if kind == "dspark" else {}
    return random_block_draft(target(), 1, kind=kind, block_size=BLOCK, window=window, **own)


@functools.cache
def alone(prompt: tuple[int, ...], count: int = TOKENS) -> list[int]:
    return slow_greedy(target(), list(prompt), count)


def prompts_of(count: int, *, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def poisoned(engine):
    """The draft's pool full of NaN, but for the sink."""
    pool = engine._loop.device.draft_kv_pages
    device = dataclasses.replace(
        engine._loop.device, draft_kv_pages=jnp.full_like(pool, jnp.nan).at[:, 0].set(pool[:, 0])
    )
    engine._loop = dataclasses.replace(engine._loop, device=device)
    return engine


def engine_of(kind: str, cache: str, **settings):
    return build(target(), worker=KINDS[kind](target(), drafted(kind), cache=cache), prefix_cache=False, **settings)


EACH = [
    pytest.param("dflash", 4, True),
    *(
        pytest.param(kind, page_size, overlap, marks=pytest.mark.slow)
        for kind, page_size, overlap in (
            ("dspark", 1, False),
            ("dflash", 1, False),
            ("dspark", 4, True),
            ("dflash", 16, True),
            ("dspark", 32, True),
        )
    ),
]


@pytest.mark.parametrize(("kind", "page_size", "overlap"), EACH)
def test_a_ring_proposes_what_pages_propose(kind, page_size, overlap):
    """Chunks longer than the ring, tails, retraction, rows that are used again: the same text and the same accept lengths, of a ring that was full of NaN."""
    prompts = prompts_of(6, longest=90)
    sizes = {
        "page_size": page_size, "max_running": 3, "overlap": overlap, "mixed_batches": True, "max_prefill_tokens": 48,
        "kv_tokens": 192, "schedule_conservativeness": 0.01,
    }  # fmt: skip
    runs = {}
    for cache in ("paged", "window"):
        engine = engine_of(kind, cache, **sizes)
        if cache == "window":
            poisoned(engine)
        seen = modes(engine)
        runs[cache] = run_staggered(engine, prompts, [greedy(TOKENS)] * len(prompts))
        assert {ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.DECODE} <= set(seen)
        assert_idle(engine)
    for prompt, paged, ring in zip(prompts, runs["paged"], runs["window"], strict=True):
        assert ring.token_ids == alone(tuple(prompt)) == paged.token_ids
        assert ring.accept_lens == paged.accept_lens
    assert sum(output.retractions for output in runs["window"]) > 0
    assert len({n for output in runs["window"] for n in output.accept_lens}) > 2, (
        "drafts were all wrong: it shows little"
    )


def test_a_window_that_slides_past_rejections():
    """B65 (vllm PR 47728): window 16, pages of 4, a block of 8 of which nearly all is rejected, 240 tokens, and a second request that takes what is free."""
    first, second = prompts_of(2, longest=6, seed=3)
    engine = engine_of("dflash", "window", page_size=4, max_running=2)
    engine.submit(first, greedy(240), rid="first")
    outputs = {}
    while engine.has_work:
        for emission in engine.step():
            if emission.output is not None:
                outputs[emission.rid] = emission.output
        if len(engine.state.ledger.kv_committed_len) and int(engine.state.ledger.kv_committed_len[1]) > 40 and second:
            engine.submit(second, greedy(120), rid="second")
            second_prompt, second = second, None
    assert outputs["first"].token_ids == alone(tuple(first), 240)
    assert outputs["second"].token_ids == alone(tuple(second_prompt), 120)
    rejected = sum(n < BLOCK for n in outputs["first"].accept_lens)
    assert rejected > 100
    assert_idle(engine)


def test_a_ring_holds_what_a_block_sees_and_no_more():
    """Every frontier: the positions from the first that the block's first row sees to its last row lie at pages of their own; a page less, and two would not."""
    for page_size in (1, 3, 4, 16, 64):
        cache = draft_cache("window", drafted("dflash"))
        rows, columns = jnp.arange(3), (CONTEXT + BLOCK) // page_size + 1
        table = np.asarray(cache.table(rows, jnp.zeros((3, columns), jnp.int32), page_size))
        sizes = DeviceSizes(num_rows=3, num_pages=1000, pages_per_row=columns, page_size=page_size, prefix_cache=False)
        pages = cache.num_pages(sizes) // 2
        assert not table[0].any() and set(table[1]) | set(table[2]) == set(range(1, 2 * pages + 1))
        assert not set(table[1]) & set(table[2])
        spans = [(max(n - WINDOW + 1, 0) // page_size, (n + BLOCK - 1) // page_size) for n in range(CONTEXT)]
        assert all(len(set(table[1][a : b + 1])) == b - a + 1 for a, b in spans)
        assert max(b - a + 1 for a, b in spans) == pages
        assert cache.bytes_per_row(page_size) == pages * page_size * drafted("dflash").facts.kv_bytes_per_token


def test_a_prefill_writes_each_slot_once():
    """Of a chunk that is longer than the ring, its end; of padding and of the sink's row, nothing."""
    cache, page_size = draft_cache("window", drafted("dflash")), 4
    rows, prefix_lens, extend_lens = (jnp.asarray(x, jnp.int32) for x in ([2, 1, 0, 3], [8, 5, 0, 11], [40, 3, 0, 1]))
    batch, last = prefill_batch(
        jnp.zeros(49, jnp.int32), rows, prefix_lens, extend_lens, jnp.ones((4, 20), jnp.int32), page_size=page_size, num_tails=1
    )  # fmt: skip
    ends = prefix_lens + extend_lens
    slots = np.asarray(cache.prefill_slots(Prefill(batch, last, ends, (), (), 0), page_size))
    ring = cache.bytes_per_row(page_size) // drafted("dflash").facts.kv_bytes_per_token
    table = np.asarray(cache.table(rows, jnp.zeros((4, 20), jnp.int32), page_size))
    want = [
        table[row, position // page_size] * page_size + position % page_size
        for row, first, end in ((0, 48 - ring, 48), (1, 5, 8), (3, 11, 12))
        for position in range(first, end)
    ]
    assert slots[slots > 0].tolist() == want and len(set(want)) == len(want) == ring + 4


def test_memory_is_that_of_rows():
    """A pool of rings, whatever the number of pages; what it takes is not there for the target's."""
    sizes = DeviceSizes(num_rows=3, num_pages=50, pages_per_row=25, page_size=16, prefix_cache=False)
    workers = [dflash(target(), drafted("dflash"), cache=cache) for cache in ("window", "paged")]
    pools = [jax.eval_shape(lambda w=w: w.init(sizes)).draft_kv_pages for w in workers]
    assert [pool.shape[1] for pool in pools] == [1 + 2 * 3, 1 + 50]
    (ring, paged), per_token = workers, drafted("dflash").facts.kv_bytes_per_token
    assert (ring.draft_kv_bytes_per_token, ring.draft_kv_bytes_per_row(16)) == (0, 48 * per_token)
    assert (paged.draft_kv_bytes_per_token, paged.draft_kv_bytes_per_row(16)) == (per_token, 0)
    config = EngineConfig(page_size=16, max_running=2, kv_memory_bytes=100_000, prefix_cache=False)
    limits = Limits(context_len=CONTEXT, alloc_len=8, depth=1, max_prefill_tokens=CONTEXT, max_prefill_rows=2)
    given = {"vocab_size": VOCAB, "verify_width": 8, "kv_bytes_per_token": 256}
    assert num_kv_pages(config, limits, **given) == 100_000 // 4096
    assert num_kv_pages(config, limits, **given, draft_row_bytes=20_000) == 60_000 // 4096


@pytest.mark.parametrize(
    ("settings", "pieces"),
    [
        ({"draft_cache": "ring"}, ["draft_cache='ring' must be one of paged, window"]),
        ({"algorithm": "eagle3", "draft_cache": "window"}, ["draft_cache=window means nothing to algorithm='eagle3'", "'dflash' or 'dspark'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_once(settings, pieces):
    with pytest.raises(ValueError) as error:
        build_worker(target(), EngineConfig(**{"algorithm": "dflash", **settings}))
    assert all(piece in str(error.value) for piece in pieces), str(error.value)


def test_what_cannot_be_is_refused_at_the_start():
    with pytest.raises(ValueError, match="draft_cache='window' needs a draft that looks back no further than a window"):
        dflash(target(), drafted("dflash", None), cache="window")
    with pytest.raises(ValueError, match=r"needs prefix_cache=False: .* give --no-prefix-cache, or 'paged'"):
        build(target(), worker=dflash(target(), drafted("dflash"), cache="window"))


@pytest.mark.slow
def test_a_ring_under_the_kernels():
    """As compiled for TPU, in the interpreter: aliased pages out of the window are skipped or masked."""
    kernels, plain = (
        random_target(0, vocab_size=VOCAB, context_len=CONTEXT, num_heads=2, num_kv_heads=1, head_dim=64, kernels=name)
        for name in ("pallas_interpret", "xla")
    )
    draft = random_block_draft(kernels, 1, kind="dflash", block_size=BLOCK, window=WINDOW, head_dim=64)
    engine = build(
        kernels, worker=dflash(kernels, draft, cache="window"), prefix_cache=False, page_size=16, max_running=2,
        kernels="pallas_interpret",
    )  # fmt: skip
    prompt = prompts_of(1, longest=30, seed=5)[0]
    assert poisoned(engine).generate([prompt], greedy(24))[0].token_ids == slow_greedy(plain, prompt, 24)
