"""Pages that leak, run out, or are taken from whoever could have used them: black-box scenarios. Ids (B10, ...) name the kind of fault.

All that is at stake is the host's, so most of these run on a worker that computes nothing; the slow ones repeat them with models."""

import functools
import itertools

import numpy as np
import pytest
from engine.kit import (
    VOCAB,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    oracle_worker,
    shadow_draft,
    slow_greedy,
    transformer,
)
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora

from jspec import Engine, EngineConfig
from jspec.bench.stub import stub_target, stub_worker
from jspec.models.tiny_draft import random_draft
from jspec.scheduler import pages_to_finish
from jspec.spec_workers import EagleSizes, eagle, frozen_kv_mtp, multi_layer_eagle, ngram, plain, uno

ON_OFF = (True, False)


def stub(*, width: int = 5, accept: int = 3, lookahead: int = 0, context_len: int = 128, **settings):
    """An engine without a model: each verify checks `width` tokens and accepts `accept`."""
    worker = stub_worker(verify_width=width, accept_len=accept)._replace(lookahead=lookahead)
    return build(stub_target(context_len), worker=worker, mixed_batches=True, **settings)


def steps(engine, most: int) -> dict:
    """Outputs by name, of what ends within so many steps; whatever has not ended then never would."""
    ended = {}
    for _ in range(most):
        if not engine.has_work:
            return ended
        ended |= {e.rid: e.output for e in engine.step() if e.output is not None}
    raise AssertionError(f"{engine.state.waiting=} after {most} steps")


# --- every way to end ---------------------------------------------------------------------------------------------------

POOL = {"kv_tokens": 320, "max_prefill_tokens": 72, "schedule_conservativeness": 0.01}
"""Holds four requests of up to 40 tokens, whatever a page holds, and not four that grow to 120."""

CELLS = list(itertools.product((1, 4, 16, 64), ON_OFF, ON_OFF))
FAST = [(1, True, False), (4, True, True), (16, False, True)]


def cells(*fast):
    return [pytest.param(*cell, marks=() if cell in fast else pytest.mark.slow) for cell in CELLS]


def requests(count: int, page_size: int, *, shortest: int, longest: int, seed: int):
    """Prompts of up to 20 tokens, half of which begin as others do, and output lengths: no sum is a whole number of pages."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, VOCAB, 20).tolist()
    prompts, lengths = [], []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        prompts.append([*stem[: 20 - len(own)], *own] if i % 2 else own)
        length = int(rng.integers(shortest, longest))
        lengths.append(length + ((len(prompts[-1]) + length) % page_size == 0))
    return prompts, lengths


def assert_nothing_leaked(engine):
    assert_idle(engine)
    state = engine.state
    assert (state.ledger.page_table == 0).all()
    if not engine.config.prefix_cache:
        assert int(state.ledger.num_free) * engine.config.page_size == engine.num_kv_tokens


def assert_no_end_leaks(engine, count: int, wanted):
    """`count` requests that all end by length, as many of which some are retracted, and as many of which some are aborted at any age."""
    page_size = engine.config.page_size
    for seed, (shortest, longest) in enumerate([(1, 19), (60, 100)]):
        prompts, lengths = requests(count, page_size, shortest=shortest, longest=longest, seed=seed)
        engine.reset_summary()
        outputs = engine.generate(prompts, [greedy(length) for length in lengths])
        for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
            assert (output.finish_reason, len(output.token_ids)) == ("length", length)
            assert wanted is None or output.token_ids == wanted(prompt)[:length]
        retractions = sum(output.retractions for output in outputs)
        assert retractions == engine.summary().retractions
        assert (retractions > 0) == (seed == 1)
        assert_nothing_leaked(engine)

    prompts, lengths = requests(count, page_size, shortest=1, longest=60, seed=2)
    ages, todo, ended = np.random.default_rng(3).integers(0, 25, count), {}, {}
    for now in itertools.count():
        if now < count:
            rid = engine.submit(prompts[now], greedy(lengths[now]))
            todo.setdefault(now + int(ages[now]), []).append((rid, now))
        for rid, _ in todo.get(now, ()):
            engine.abort(rid)
        ended |= {e.rid: e.output for e in engine.step() if e.output is not None}
        if now >= count + 25 and not engine.has_work:
            break
    for rid, i in itertools.chain(*todo.values()):
        output = ended[rid]
        assert output.finish_reason == "abort" or len(output.token_ids) == lengths[i]
        assert wanted is None or output.token_ids == wanted(prompts[i])[: len(output.token_ids)]
    reasons = [output.finish_reason for output in ended.values()]
    assert set(reasons) == {"length", "abort"}
    assert any(output.finish_reason == "abort" and len(output.token_ids) > 1 for output in ended.values())
    assert_nothing_leaked(engine)


@pytest.mark.parametrize(("page_size", "overlap", "prefix_cache"), cells(*FAST))
def test_b10_no_end_leaks_a_page(page_size, overlap, prefix_cache):
    """B10 (sglang-jax issue 70, pull request 994): pages of 1 to 64, overlap and prefix cache on and off; requests end by length, are retracted, are aborted,
    none with a whole number of pages. Idle, every page is free or cached, none held or locked."""
    settings = {"page_size": page_size, "overlap": overlap, "prefix_cache": prefix_cache}
    assert_no_end_leaks(stub(**settings, **POOL), 60, None)


WORKERS = {
    "plain": lambda: plain(transformer()),
    "ngram": lambda: ngram(transformer(), num_draft_tokens=5, min_ngram=1),
    "chain": lambda: eagle(transformer(), shadow_draft(transformer()), sizes=EagleSizes(num_steps=3)),
    "tree": lambda: eagle(
        transformer(), shadow_draft(transformer()), sizes=EagleSizes(num_steps=3, topk=2, num_draft_tokens=5)
    ),
    "multi-layer": lambda: multi_layer_eagle(transformer(), random_draft(transformer(), 3, kind="multi-layer")),
    "frozen-kv": lambda: frozen_kv_mtp(transformer(), often_right(transformer())),
    "uno": lambda: uno(transformer(), random_lora(transformer())),
    "uno tree": lambda: uno(transformer(), random_lora(transformer()), topk=2, num_draft_tokens=6),
}


@functools.cache
def alone(prompt: tuple[int, ...]) -> list[int]:
    return slow_greedy(transformer(), list(prompt), 101)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "overlap", "prefix_cache"), cells(*CELLS))
@pytest.mark.parametrize("worker", ["known", "chain"])
def test_b10_with_a_model(worker, page_size, overlap, prefix_cache):
    """B10: the whole matrix, and whatever pages are taken away and given back, each request says what it says alone."""
    settings = {"page_size": page_size, "overlap": overlap, "prefix_cache": prefix_cache, **POOL}
    if worker == "known":
        engine = build(markov(), worker=oracle_worker(), mixed_batches=True, **settings)
        assert_no_end_leaks(engine, 200, lambda prompt: markov_continuation(prompt[-1], 101))
    else:
        engine = build(transformer(), worker=WORKERS[worker](), mixed_batches=True, **settings)
        assert_no_end_leaks(engine, 40, lambda prompt: alone(tuple(prompt)))


# --- a pool too small for one -------------------------------------------------------------------------------------------


def most_that_is_taken(engine, prompt) -> int:
    """The highest `max_new_tokens` that the engine does not refuse."""
    low, high = 0, engine.limits.context_len
    while high - low > 1:
        middle = (low + high) // 2
        try:
            engine.abort(engine.submit(prompt, greedy(middle)))
            low = middle
        except ValueError:
            high = middle
    steps(engine, 3)
    return low


@pytest.mark.parametrize(
    "page_size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)]
)
def test_b11_alone_in_a_pool_too_small(page_size):
    """B11 (sglang pull request 19881): 64 tokens of KV. 40 and 500 more are refused, with the numbers, and the next request runs; the longest that is taken
    runs to its end, alone and beside others like it, in so many steps."""
    engine = stub(page_size=page_size, kv_tokens=64, context_len=1024, schedule_conservativeness=0.01)
    prompt, short = list(range(40)), list(range(50, 60))
    first, second = engine.generate([prompt, short], [greedy(500), greedy(10)])
    assert (first.finish_reason, first.token_ids) == ("refused", [])
    assert "prompt of 40 tokens with max_new_tokens=500 needs" in first.error and "pool has 64" in first.error
    assert (second.finish_reason, len(second.token_ids)) == ("length", 10)
    assert_nothing_leaked(engine)

    prompt = prompt[:20]
    most = most_that_is_taken(engine, prompt)
    assert 20 + most + engine.limits.reserve_len > 64, "one token more would fit"
    with pytest.raises(ValueError, match=f"max_new_tokens={most + 1} needs"):
        engine.submit(prompt, greedy(most + 1))
    for count in (1, 2, 4):
        sent = {engine.submit([*prompt[1:], i], greedy(most)): most for i in range(count)}
        list(engine.step())
        sent |= {engine.submit(short, greedy(16)): 16 for _ in range(count)}
        ended = steps(engine, 60 * count)
        assert {rid: len(output.token_ids) for rid, output in ended.items()} == sent
        assert {output.finish_reason for output in ended.values()} == {"length"}
        assert_nothing_leaked(engine)
    # Pages of 16 are too few for two at once.
    assert (engine.summary().retractions > 0) == (page_size < 16)


@pytest.mark.parametrize("overlap", ON_OFF)
def test_b11_out_of_pages_ends_one_request(monkeypatch, overlap):
    """B11: what if one had been taken that the pool cannot hold? It ends with an error and the tokens it has, and whoever waits behind it runs."""
    engine = stub(page_size=16, kv_tokens=64, context_len=1024, overlap=overlap, schedule_conservativeness=0.01)
    with monkeypatch.context() as unchecked:
        unchecked.setattr("jspec.engine.engine.check_request", lambda tokens, params, **_: params.max_new_tokens)
        engine.submit(list(range(40)), greedy(500), rid="long")
    engine.submit(list(range(10)), greedy(10), rid="short")
    streamed, ended = [], {}
    for _ in range(60):
        for emission in engine.step():
            streamed += emission.token_ids if emission.rid == "long" else []
            ended |= {emission.rid: emission.output} if emission.output is not None else {}
    assert not engine.has_work
    assert (ended["short"].finish_reason, len(ended["short"].token_ids)) == ("length", 10)
    long = ended["long"]
    assert long.finish_reason == "error" and "the KV pool cannot hold the next step" in long.error
    # All but the reserve of the step that no page was left for.
    assert 64 - 40 - engine.limits.reserve_len - 16 < len(long.token_ids) <= 64 - 40
    assert long.token_ids == streamed and len(streamed) > 1
    assert_nothing_leaked(engine)
    assert len(engine.generate([list(range(10))], greedy(10))[0].token_ids) == 10


# --- conversations ------------------------------------------------------------------------------------------------------

TURNS, SAID = 6, 9
ANSWERS = np.arange(4, 12)
"""Tokens of each of eight conversations' answers, so that one prompt comes while others are decoded."""

LIVE = int(TURNS * (SAID + ANSWERS).sum())
"""Tokens of all conversations, when they end."""


def converse(engine) -> np.ndarray:
    """Cached tokens of each turn's requests, all of which are sent at once: i64[TURNS, 8]."""
    rng = np.random.default_rng(15)
    said, hits = [[] for _ in ANSWERS], []
    for _ in range(TURNS):
        said = [[*before, *rng.integers(0, VOCAB, SAID).tolist()] for before in said]
        outputs = engine.generate(said, [greedy(int(answer)) for answer in ANSWERS])
        assert {output.finish_reason for output in outputs} == {"length"}
        hits.append([output.cached_tokens for output in outputs])
        said = [[*before, *output.token_ids] for before, output in zip(said, outputs, strict=True)]
    assert_nothing_leaked(engine)
    return np.array(hits)


def assert_drafts_cost_no_hits(without: np.ndarray, hits: np.ndarray, page_size: int, not_kept=0):
    known = np.arange(TURNS)[:, None] * (SAID + ANSWERS)  # what was computed the turn before, but for the last token
    assert (without >= known - page_size).all(), "the pool is too small for this test"
    assert (hits >= without - page_size - not_kept).all()


@pytest.mark.parametrize("lookahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("share", [pytest.param(2.0, marks=pytest.mark.slow), 0.97])
@pytest.mark.parametrize("page_size", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_b15_drafts_cost_no_prefix_hits(page_size, share, lookahead):
    """B15 (sglang issue 32459): eight conversations of six turns, in a pool of twice what they hold in the end, and in one where twice the speculative reserve
    would push prefixes out before their next turn: drafts cost no hits but for the page whose last token no draft has seen followed."""
    settings = {"page_size": page_size, "kv_tokens": int(share * LIVE), "max_prefill_tokens": 64}
    without = converse(stub(width=1, accept=1, **settings))
    hits = converse(stub(width=6, accept=3, lookahead=lookahead, **settings))
    assert_drafts_cost_no_hits(without, hits, page_size)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ON_OFF)
def test_b15_with_a_model(overlap):
    """B15: every algorithm, each with its own reserve; one whose draft has no KV of answers that could be used again keeps only prompts."""
    settings = {"page_size": 4, "kv_tokens": 2 * LIVE, "max_prefill_tokens": 64, "overlap": overlap}
    workers = {name: make() for name, make in WORKERS.items()}
    hits = {
        name: converse(build(transformer(), worker=worker, mixed_batches=True, **settings))
        for name, worker in workers.items()
    }
    for name, worker in workers.items():
        not_kept = 0 if worker.caches_output else ANSWERS + worker.lookahead
        assert_drafts_cost_no_hits(hits["plain"], hits[name], 4, not_kept)


# --- sizes in any order -------------------------------------------------------------------------------------------------


def sized(*, lookahead: int, context_len: int, **settings) -> Engine:
    """An engine of these sizes and no defaults of the kit."""
    config = EngineConfig(context_len=context_len, checked=True, **settings)
    worker = stub_worker(verify_width=4, accept_len=3)._replace(lookahead=lookahead)
    return Engine(config, target=stub_target(context_len), worker=worker)


def assert_no_size_crashes(*, lookahead: int = 0, **settings) -> bool:
    """Refused at the start, with the field, or every prompt runs that the pool holds. Returns which."""
    page, context, chunk = settings["page_size"], settings["context_len"], settings.get("max_prefill_tokens")
    buckets = settings.get("prefill_buckets")
    most = chunk or (buckets[-1] if buckets else context)
    least = min(context, page + lookahead)
    if most < least:
        with pytest.raises(ValueError, match=f"max_prefill_tokens={most} must be at least {least}"):
            sized(lookahead=lookahead, **settings)
        return False
    if buckets and buckets[-1] != most:
        with pytest.raises(ValueError, match=f"must end with max_prefill_tokens={most}"):
            sized(lookahead=lookahead, **settings)
        return False
    engine = sized(lookahead=lookahead, **settings)
    edges = {1, 2, *(n + d for n in (page, most, 2 * most, context // 2, context) for d in (-1, 0, 1))}
    rng = np.random.default_rng(page)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in sorted(edges) if 1 <= n < context]
    lengths = [min(9, context - len(prompt)) for prompt in prompts]
    fits = [
        pages_to_finish(np.int32(len(p)), np.int32(n), limits=engine.limits, page_size=page) * page
        <= engine.num_kv_tokens
        for p, n in zip(prompts, lengths, strict=True)
    ]
    for output, length, fit in zip(engine.generate(prompts, greedy(9)), lengths, fits, strict=True):
        expected = ("length", length) if fit else ("refused", 0)
        assert (output.finish_reason, len(output.token_ids)) == expected
    assert any(fits) and engine.summary().compiles_after_warmup == 0
    assert_idle(engine)
    return True


REFUSED = [
    {"max_prefill_tokens": 1, "page_size": 4},
    {"max_prefill_tokens": 15, "page_size": 16},
    {"max_prefill_tokens": 16, "page_size": 16, "lookahead": 1},
    {"max_prefill_tokens": 31, "page_size": 64, "context_len": 32},
    {"prefill_buckets": (8, 15), "page_size": 16},
    {"max_prefill_tokens": 64, "prefill_buckets": (16, 32)},
    {"max_prefill_tokens": 16, "prefill_buckets": (16, 32)},
    {"max_prefill_tokens": 200, "prefill_buckets": (16, 128)},
]
TAKEN = [
    {"max_prefill_tokens": 1, "page_size": 1, "max_running": 1},
    {"max_prefill_tokens": 17, "page_size": 16, "max_running": 1, "lookahead": 1},
    {"max_prefill_tokens": 30, "page_size": 16, "max_running": 1, "prefill_buckets": (7, 30)},
    {"max_prefill_tokens": 32, "page_size": 64, "max_running": 1, "context_len": 32},
    {"prefill_buckets": (200,), "max_running": 1, "context_len": 32},
    {"max_prefill_tokens": 64, "kv_tokens": 36},
]
CASES = [pytest.param(sizes, False, id=f"refused {sizes}") for sizes in REFUSED]
CASES += [pytest.param(sizes, True, id=f"taken {sizes}") for sizes in TAKEN]


@pytest.mark.parametrize(("sizes", "taken"), CASES)
def test_b52_sizes_that_do_not_go_together(sizes, taken):
    """B52 (sglang-jax issue 1551): chunks below, at and above pages, buckets, context and pool: refused at the start, or no prompt is too much."""
    sizes = {"page_size": 4, "context_len": 128, "max_running": 3, **sizes}
    assert assert_no_size_crashes(**sizes, batch_buckets=(sizes["max_running"],)) == taken


def test_b52_sizes_that_are_no_sizes():
    """B52: refused before there is an engine."""
    with pytest.raises(ValueError, match=r"batch_buckets=\(1, 2\) must end with max_running=3"):
        EngineConfig(max_running=3, batch_buckets=(1, 2))
    with pytest.raises(ValueError, match=r"prefill_buckets=\(32, 16\) must ascend"):
        EngineConfig(prefill_buckets=(32, 16))
    with pytest.raises(ValueError, match="max_prefill_tokens=0 must be at least 1"):
        EngineConfig(max_prefill_tokens=0)


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("max_running", "kv_tokens"), [(1, None), (3, 128)])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_b52_sizes_in_any_order(page_size, max_running, kv_tokens, lookahead):
    """B52: all orderings of chunk, page, context, rows and pool."""
    for context_len, chunk in itertools.product((32, 100), (None, 1, 4, 5, 17, 64, 65, 300)):
        assert_no_size_crashes(
            lookahead=lookahead,
            page_size=page_size,
            context_len=context_len,
            max_running=max_running,
            kv_tokens=kv_tokens,
            max_prefill_tokens=chunk,
        )
