"""Chunks, tails, retraction, shared prefixes, priorities: whatever the scheduler does, a request says what it says alone."""

import functools

import numpy as np
import pytest
from engine.kit import CONTEXT, VOCAB, assert_idle, build, greedy, prompts_of, shadow_draft, slow_greedy, transformer
from engine.test_block_drafts import foreseeing, successors
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora

from jspec import SamplingParams
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import EagleSizes, dflash, eagle, frozen_kv_mtp, multi_layer_eagle, ngram, plain, uno
from jspec.state import ForwardMode

TOKENS = 20


WORKERS = {
    "plain": plain,
    "ngram": lambda t: ngram(t, num_draft_tokens=5, min_ngram=1),
    "chain": lambda t: eagle(t, shadow_draft(t), sizes=EagleSizes(num_steps=3)),
    "tree": lambda t: eagle(t, shadow_draft(t), sizes=EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)),
    "multi-layer": lambda t: multi_layer_eagle(t, random_draft(t, 3, kind="multi-layer")),
    "dflash": lambda t: dflash(t, foreseeing(t, successors())),
    "frozen-kv": lambda t: frozen_kv_mtp(t, often_right(t)),
    "frozen-kv tree": lambda t: frozen_kv_mtp(
        t, often_right(t), sizes=EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)
    ),
    "uno": lambda t: uno(t, random_lora(t)),
    "uno tree": lambda t: uno(t, random_lora(t), topk=3, num_draft_tokens=9),
}
FAST = ("plain", "ngram", "chain", "tree", "multi-layer")
"""The others have such tests of their own, on fewer settings."""

DRAFTING = [name for name in WORKERS if name != "plain"]


@functools.cache
def worker_of(name: str):
    return WORKERS[name](transformer())


@functools.cache
def alone(prompt: tuple[int, ...], length: int = TOKENS) -> list[int]:
    return slow_greedy(transformer(), list(prompt), length)


def some_slow(*names: str, fast: tuple[str, ...]):
    """Parameters, of which only the `fast` ones run every time."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def modes(engine) -> list[ForwardMode]:
    """Modes of the launches to come, as they are made."""
    seen, launch = [], engine._launch

    def watched(loop):
        loop, launched = launch(loop)
        if launched is not None:
            seen.append(launched.batches[0].forward_mode)
        return loop, launched

    engine._launch = watched
    return seen


def engine_of(worker: str, **settings):
    """An engine that nobody used before."""
    settings = {"page_size": 4, "max_running": 4, "max_prefill_tokens": 24, "mixed_batches": True, **settings}
    return build(transformer(), worker=worker_of(worker), **settings)


def run_staggered(engine, prompts, params, *, every: int = 3):
    """Requests that arrive while others run; their outputs in order."""
    outputs, waiting = {}, list(zip(prompts, params, strict=True))
    rids, step = [], 0
    while waiting or engine.has_work:
        if waiting and step % every == 0:
            rids.append(engine.submit(*waiting.pop(0)))
        outputs.update({e.rid: e.output for e in engine.step() if e.output is not None})
        step += 1
    return [outputs[rid] for rid in rids]


PRESSED = {"kv_tokens": 160, "schedule_conservativeness": 0.01}
"""Settings of a small pool, promised many times over."""

pressed = functools.cache(functools.partial(engine_of, **PRESSED))
"""By worker: one such engine, for all tests that leave it idle."""

UNLESS_SLOW = [pytest.param(name, True, id=f"{name}-overlap") for name in FAST]
UNLESS_SLOW += [pytest.param(name, False, id=f"{name}-no-overlap", marks=pytest.mark.slow) for name in WORKERS]
UNLESS_SLOW += [
    pytest.param(name, True, id=f"{name}-overlap", marks=pytest.mark.slow) for name in WORKERS if name not in FAST
]


@pytest.mark.parametrize(("worker", "overlap"), UNLESS_SLOW)
def test_chunks_and_tails_change_no_token(worker, overlap):
    """B53: prompts of up to 90 tokens in chunks of at most 24, running requests along as tails: as each alone, without a cache."""
    engine = engine_of(worker, overlap=overlap)
    seen = modes(engine)
    prompts = prompts_of(10, seed=1, longest=90)
    for prompt, output in zip(prompts, run_staggered(engine, prompts, [greedy(TOKENS)] * 10), strict=True):
        assert output.token_ids == alone(tuple(prompt))
    assert {ForwardMode.MIXED, ForwardMode.DECODE} <= set(seen)
    assert engine.summary().compiles_after_warmup == 0
    assert_idle(engine)


@pytest.mark.parametrize("worker", some_slow(*DRAFTING, fast=("chain", "multi-layer")))
def test_the_length_of_chunks_changes_no_draft(worker):
    """B50: accept lengths, too, are the same for every length of chunks: the draft is fed the prompt's own next token at a chunk's end."""
    prompts, seen = [np.tile(prompt, 3)[:90].tolist() for prompt in prompts_of(3, seed=2, shortest=40)], []
    for chunk in (12, 128):
        engine = engine_of(worker, max_prefill_tokens=chunk, max_running=1)
        outputs = [engine.generate([prompt], greedy(TOKENS))[0] for prompt in prompts]
        seen.append([(output.token_ids, output.accept_lens) for output in outputs])
    assert all(others == seen[0] for others in seen)
    assert worker == "multi-layer" or sum(len(lens) for _, lens in seen[0]) < 3 * (TOKENS - 1), "no draft was accepted"


def assert_retracted(engine, prompts, params, wanted):
    engine.reset_summary()
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == wanted
    assert {output.finish_reason for output in outputs} == {"length"}
    summary = engine.summary()
    assert sum(output.retractions for output in outputs) == summary.retractions > 0
    assert summary.compiles_after_warmup == 0
    assert_idle(engine)


@pytest.mark.parametrize("worker", some_slow(*WORKERS, fast=FAST))
def test_retraction_changes_no_token(worker):
    """B04: a pool that holds a third of what the requests want: some are retracted, all say what they say alone, nothing leaks."""
    prompts = prompts_of(8, seed=3, shortest=2, longest=12)
    assert_retracted(pressed(worker), prompts, greedy(50), [alone(tuple(prompt), 50) for prompt in prompts])


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("worker", list(WORKERS))
def test_retraction_with_other_pages(worker, page_size, overlap):
    """The pool holds one request to its end, and a page for each of the others."""
    reserve = 2 * worker_of(worker).alloc_len
    tokens = (-(-(12 + 60 + reserve) // page_size) + 3) * page_size
    sizes = {"kv_tokens": tokens, "page_size": page_size, "max_prefill_tokens": 64, "overlap": overlap}
    engine = engine_of(worker, **{**PRESSED, **sizes})
    prompts = prompts_of(8, seed=3, shortest=2, longest=12)
    assert_retracted(engine, prompts, greedy(60), [alone(tuple(prompt), 60) for prompt in prompts])


@pytest.mark.parametrize("worker", ["plain", "chain"])
def test_retraction_changes_no_sampled_token(worker):
    """Keys are made of seed and position: what a retracted request had drawn and not yet settled it draws again."""
    prompts = prompts_of(8, seed=4, shortest=2, longest=12)
    params = [SamplingParams(max_new_tokens=50, temperature=2.0, seed=i) for i in range(8)]
    solo = engine_of("plain", max_running=1, overlap=False)
    wanted = [solo.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    assert_retracted(pressed(worker), prompts, params, wanted)


@pytest.mark.parametrize("worker", some_slow(*WORKERS, fast=("ngram", "chain", "multi-layer")))
def test_a_warm_prefix_changes_no_token_and_no_draft(worker):
    """B47: the same prompts twice, and prompts that go on from an answer: tokens and accept lengths are those of an engine without a cache."""
    stem = prompts_of(1, seed=5, shortest=40)[0]
    prompts = [[*stem, *more] for more in prompts_of(3, seed=6, shortest=5, longest=20)]
    cold = engine_of(worker, prefix_cache=False, max_running=1, max_prefill_tokens=128)
    warm = engine_of(worker, max_running=1, max_prefill_tokens=128)
    for turn in range(3):
        want, got = ([engine.generate([p], greedy(TOKENS))[0] for p in prompts] for engine in (cold, warm))
        assert [o.token_ids for o in got] == [o.token_ids for o in want] == [alone(tuple(p)) for p in prompts]
        assert [o.accept_lens for o in got] == [o.accept_lens for o in want]
        assert all(o.cached_tokens == 0 for o in want)
        # From the second on a prompt begins with what is cached, but for the page with its last token.
        assert all(o.cached_tokens >= (len(stem) - 3) // 4 * 4 for o in got[bool(turn) - 1 :]), turn
        if turn == 1:
            prompts = [[*p, *o.token_ids, 3] for p, o in zip(prompts, got, strict=True)]
            prompts = [p[: CONTEXT - TOKENS] for p in prompts]
    assert_idle(warm)


@pytest.mark.parametrize("worker", some_slow(*DRAFTING, fast=("chain",)))
def test_prompts_that_part_near_a_page_end(worker):
    """B48: they share one token less than two pages, two pages, and a little more: accept lengths are those without a cache, since a page's name holds the
    token that the draft's KV at its end has seen. (UNO's noise follows the seed.)"""
    stem, rest = prompts_of(2, seed=15, shortest=40)
    cold = engine_of(worker, prefix_cache=False, max_running=1, max_prefill_tokens=128)
    warm = engine_of(worker, max_running=1, max_prefill_tokens=128)
    lookahead = worker_of(worker).lookahead
    for shared in range(7, 12):
        other = [*stem[:shared], (stem[shared] + 1) % VOCAB, *rest]
        warm.generate([stem], greedy(4))
        want, got = (engine.generate([other], greedy(TOKENS, seed=1))[0] for engine in (cold, warm))
        assert (got.token_ids, got.accept_lens) == (want.token_ids, want.accept_lens)
        assert got.cached_tokens == (shared - lookahead) // 4 * 4


@pytest.mark.parametrize("worker", some_slow(*WORKERS, fast=FAST))
def test_a_last_chunk_of_one_token(worker):
    """B51: prompts of a whole number of chunks, a token more and a token less, while others decode."""
    engine = pressed(worker)
    others = prompts_of(2, seed=16, shortest=5, longest=9)
    prompts = [prompts_of(1, seed=17 + n, shortest=n, longest=n)[0] for n in (47, 48, 49)]
    outputs = run_staggered(engine, [*others, *prompts], [greedy(TOKENS)] * 5, every=2)
    for prompt, output in zip([*others, *prompts], outputs, strict=True):
        assert output.token_ids == alone(tuple(prompt))
    assert_idle(engine)


def test_a_full_hit_still_computes_a_position():
    """A prompt of whole pages, all of them cached: the last page is computed again, for its logits."""
    engine = engine_of("ngram")
    prompt = prompts_of(1, seed=7, shortest=40)[0][:40]
    first = engine.generate([prompt], greedy(TOKENS))[0]
    again = engine.generate([prompt], greedy(TOKENS))[0]
    assert (first.cached_tokens, again.cached_tokens) == (0, 36)
    assert first.token_ids == again.token_ids == alone(tuple(prompt))


def test_equal_prompts_at_once_compute_their_prefix_once():
    """Eight equal prompts: one computes, the others wait for it and begin where it ended."""
    engine = engine_of("plain", max_running=8, max_prefill_tokens=64)
    prompt = prompts_of(1, seed=8, shortest=40)[0]
    outputs = engine.generate([prompt] * 8, greedy(TOKENS))
    assert {tuple(o.token_ids) for o in outputs} == {tuple(alone(tuple(prompt)))}
    assert sorted(o.cached_tokens for o in outputs) == [0] + [(len(prompt) - 1) // 4 * 4] * 7


def test_the_cache_gives_way_to_requests():
    """More prompts than the pool holds, one after another: the oldest prefixes are evicted, and requests never wait for cached pages."""
    engine = pressed("chain")
    prompts = prompts_of(12, seed=9, shortest=30, longest=60)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
        assert output.token_ids == alone(tuple(prompt))
    assert engine.state.prefix_cache.pages
    assert_idle(engine)


def test_a_higher_priority_starts_first_and_takes_a_place():
    """Two rows, both taken: the urgent request takes the place of one that is not, which waits again and still says what it says alone."""
    engine = engine_of("ngram", max_running=2)
    prompts = prompts_of(4, seed=10, shortest=4, longest=10)
    for i in range(2):
        engine.submit(prompts[i], greedy(40), rid=f"low{i}")
    for _ in range(4):
        list(engine.step())
    engine.submit(prompts[2], greedy(8), rid="late")
    engine.submit(prompts[3], greedy(8, priority=5), rid="urgent")
    ended = {}
    while engine.has_work:
        ended.update({e.rid: e.output for e in engine.step() if e.output is not None})
    assert next(iter(ended)) == "urgent"
    assert sorted(o.retractions for o in ended.values()) == [0, 0, 0, 1]
    assert ended["low0"].retractions + ended["low1"].retractions == 1
    for rid, prompt, length in (("low0", 0, 40), ("low1", 1, 40), ("late", 2, 8), ("urgent", 3, 8)):
        assert ended[rid].token_ids == alone(tuple(prompts[prompt]), length)
    assert_idle(engine)


def test_longest_prefix_first():
    """Of two that wait, the one whose prompt is cached goes first, though it came last; first come first served says otherwise."""
    known, other = prompts_of(2, seed=11, shortest=30)
    for policy, first in (("fcfs", "other"), ("longest-prefix", "known")):
        engine = engine_of("plain", max_running=1, policy=policy)
        engine.generate([known], greedy(4))
        engine.submit(prompts_of(1, seed=12)[0], greedy(12), rid="runs")
        list(engine.step())
        engine.submit(other, greedy(4), rid="other")
        engine.submit(known, greedy(4), rid="known")
        order = [e.rid for _ in range(60) for e in engine.step() if e.output is not None]
        assert order == ["runs", first, "known" if first == "other" else "other"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_abort_in_the_middle_of_a_prompt(overlap):
    """The first chunk is under way, or settled: the request ends, its pages come back, its neighbours notice nothing."""
    for steps in (1, 2, 3):
        engine = engine_of("chain", overlap=overlap)
        other = prompts_of(1, seed=13, shortest=30)[0]
        engine.submit(other, greedy(TOKENS), rid="other")
        long = prompts_of(1, seed=14, shortest=90, longest=100)[0]
        engine.submit(long, greedy(TOKENS), rid="long")
        for _ in range(steps):
            list(engine.step())
        assert engine.abort("long")
        ended = {}
        while engine.has_work:
            ended.update({e.rid: e.output for e in engine.step() if e.output is not None})
        assert (ended["long"].finish_reason, ended["long"].token_ids) == ("abort", [])
        assert ended["other"].token_ids == alone(tuple(other))
        assert_idle(engine)


def test_random_traffic_under_pressure():
    """Arrivals, aborts, priorities and shared prefixes at random over a small pool, every invariant checked after every transition: all that end by
    length say what they say alone."""
    for seed, worker in enumerate(FAST):
        rng = np.random.default_rng(seed)
        engine = pressed(worker)
        stems = prompts_of(3, seed=seed + 20, shortest=20, longest=60)
        sent, ended = {}, {}
        for _ in range(160):
            if rng.random() < 0.2 and len(sent) < 24:
                stem = stems[rng.integers(3)]
                prompt = [*stem[: rng.integers(1, len(stem) + 1)], *rng.integers(0, VOCAB, rng.integers(0, 5)).tolist()]
                length = int(rng.integers(1, 30))
                rid = engine.submit(prompt, greedy(length, priority=int(rng.integers(3))))
                sent[rid] = (prompt, length)
            if sent and rng.random() < 0.03:
                engine.abort(str(rng.choice(list(sent))))
            ended.update({e.rid: e.output for e in engine.step() if e.output is not None})
        while engine.has_work:
            ended.update({e.rid: e.output for e in engine.step() if e.output is not None})
        assert set(ended) == set(sent)
        for rid, (prompt, length) in sent.items():
            want = alone(tuple(prompt), 30)[:length]
            assert ended[rid].token_ids == want[: len(ended[rid].token_ids)]
            assert ended[rid].finish_reason == "abort" or len(ended[rid].token_ids) == length
        assert any(output.cached_tokens for output in ended.values())
        assert_idle(engine)
