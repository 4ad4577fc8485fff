"""Failures that users of other engines reported, as black-box scenarios. Ids (B01, ...) name the kind of fault."""

import functools
import itertools

import numpy as np
import pytest
from engine.kit import (
    ACCEPT,
    CONTEXT,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    oracle_worker,
    prompts_of,
    transformer,
)

from jspec import SamplingParams
from jspec.engine.programs import Program
from jspec.scheduler import pages_to_finish


def solo(target, prompts, params):
    engine = build(target, "plain", overlap=False, page_size=1, max_running=1)
    return [engine.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]


def run_staggered(engine, prompts, params, *, every: int, at_once: int | None = None):
    """Submits a request every few steps, no more than `at_once` at a time; returns outputs in order of submission."""
    waiting, rids, done = list(zip(prompts, params, strict=True)), [], {}
    while waiting or engine.has_work:
        for _ in range(1 if at_once is None else at_once - (len(rids) - len(done))):
            if waiting:
                rids.append(engine.submit(*waiting.pop(0)))
        for _ in range(every):
            done |= {e.rid: e.output for e in engine.step() if e.output}
    return [done[rid] for rid in rids]


@pytest.mark.parametrize("at_once", [4, 9, 16, 64])
@pytest.mark.parametrize("algorithm", ["plain", "ngram"])
def test_b01_relay_rows_survive_many_prefills(algorithm, at_once):
    """B01 (sglang-jax pull request 1504): long prompts among short ones, several prefill batches before a first decode."""
    prompts = prompts_of(6, seed=1, shortest=80, longest=100) + prompts_of(18, seed=2, longest=12)
    params = [greedy(int(n)) for n in np.random.default_rng(3).integers(2, 14, len(prompts))]
    engine = engine_for_b01(algorithm)
    outputs = run_staggered(engine, prompts, params, every=1, at_once=at_once)
    assert [o.token_ids for o in outputs] == solo_b01()
    assert_idle(engine)


@functools.cache
def engine_for_b01(algorithm):
    return build(transformer(), algorithm, max_running=8)


def solo_b01(cache=[]):  # noqa: B006
    if not cache:
        prompts = prompts_of(6, seed=1, shortest=80, longest=100) + prompts_of(18, seed=2, longest=12)
        params = [greedy(int(n)) for n in np.random.default_rng(3).integers(2, 14, len(prompts))]
        cache.extend(solo(transformer(), prompts, params))
    return cache


def test_b02_no_upload_is_ever_touched_again(monkeypatch):
    """B02 (sglang-jax issue 1503, jax issue 37830): page tables of 256 entries and more, arrivals a few steps apart. Every array handed to the device
    keeps its content, no two share memory, and repeats agree with solo runs."""
    handed, call = [], Program.__call__

    def spy(self, params, device, upload, **options):
        handed.append((upload, upload.copy()))
        return call(self, params, device, upload, **options)

    monkeypatch.setattr(Program, "__call__", spy)
    target = transformer(context_len=1100)
    prompts, params = prompts_of(3, seed=4, shortest=10), [greedy(60)] * 3
    engine = build(target, "ngram", page_size=4, max_running=8, checked=False)
    assert engine.state.ledger.page_table.shape[1] >= 256
    runs = [[o.token_ids for o in run_staggered(engine, prompts, params, every=3)] for _ in range(5)]
    monkeypatch.undo()
    for (upload, copy), (later, _) in itertools.pairwise(handed):
        assert np.array_equal(upload, copy)
        assert not np.shares_memory(upload, later)
    assert runs == [solo(target, prompts, params)] * 5


def test_b03_a_leaver_s_row_and_pages_go_to_a_newcomer():
    """B03 (sglang pull request 18803): a pool for two, 300 requests back to back, one ending almost every step while its next step is under way."""
    engine = build(markov(), worker=oracle_worker(), max_running=2, page_size=4, kv_tokens=2 * 32)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 64, rng.integers(1, 8)).tolist() for _ in range(300)]
    lengths = rng.integers(1, 8, 300)
    outputs = engine.generate(prompts, [greedy(int(n)) for n in lengths])
    for prompt, length, output in zip(prompts, lengths, outputs, strict=True):
        assert output.token_ids == markov_continuation(prompt[-1], length)
    assert_idle(engine)


def test_b03_on_a_transformer():
    """The same with KV that matters: whoever takes over pages must not see their last owner."""
    engine = build(transformer(), "ngram", max_running=2, page_size=4, kv_tokens=2 * 44)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 64, rng.integers(1, 20)).tolist() for _ in range(60)]
    params = [greedy(int(n)) for n in rng.integers(1, 8, 60)]
    assert [o.token_ids for o in engine.generate(prompts, params)] == solo(transformer(), prompts, params)
    assert_idle(engine)


@pytest.mark.parametrize("running", [3, 5, 7, 8])
def test_b06_padding_is_nobody(running):
    """B06 (sglang pull requests 24243, 24439): batches padded to 4 and 8; the owners of the first and the highest row live longest."""
    engine = engine_of_many_buckets()
    prompts = prompts_of(running, seed=running, shortest=3)
    params = [greedy(40 if i in (0, running - 1) else 4 + i) for i in range(running)]
    outputs = engine.generate(prompts, params)
    assert [o.token_ids for o in outputs] == solo(transformer(), prompts, params)


def engine_of_many_buckets(cache=[]):  # noqa: B006
    if not cache:
        cache.append(build(transformer(), "ngram", max_running=8, page_size=4, batch_buckets=(1, 2, 4, 8)))
    return cache[0]


@pytest.mark.parametrize("length", range(8, 18))
def test_b07_exact_pool_at_page_boundaries(length):
    """B07 (TensorRT-LLM pull request 16280): verify wider than a page, everything accepted, a pool of exactly what two requests may use."""
    worker, new = oracle_worker(width=8), 24
    probe = build(markov(), worker=worker, page_size=4)
    prompts = [list(range(length, 0, -1)), [7, 8, 9]]
    pages = sum(
        int(pages_to_finish(np.int32(len(p)), np.int32(new), limits=probe.limits, page_size=4)) for p in prompts
    )
    engine = build(markov(), worker=worker, page_size=4, kv_tokens=4 * pages, max_running=2)
    outputs = engine.generate(prompts, greedy(new))
    assert [o.token_ids for o in outputs] == [markov_continuation(p[-1], new) for p in prompts]
    assert_idle(engine)


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_b09_every_ending_returns_every_page(page_size):
    """B09 (sglang-jax issue 1147): a stop inside a run, the length, an abort, an end at the first token, the context's end; then 100 mixed requests."""
    engine = build(markov(), worker=oracle_worker(), page_size=page_size, max_running=4)
    out = markov_continuation(5, 200)
    endings = {
        "stop": SamplingParams(max_new_tokens=50, stop_token_ids=(out[7],)),
        "length": greedy(11),
        "first": SamplingParams(max_new_tokens=50, stop_token_ids=(out[0],)),
        "context": greedy(1000),
    }
    for name, params in endings.items():
        (output,) = engine.generate([[5]], params)
        assert output.finish_reason == ("stop" if name in ("stop", "first") else "length")
        assert_idle(engine)
    rid = engine.submit([5], greedy(100))
    for _ in range(4):
        engine.step()
    assert engine.abort(rid) and engine.abort(rid)
    while engine.has_work:
        engine.step()
    assert not engine.abort(rid)
    assert_idle(engine)
    rng = np.random.default_rng(page_size)
    prompts, params = prompts_of(100, seed=page_size), []
    for prompt in prompts:
        out = markov_continuation(prompt[-1], 60)
        stops = (out[int(rng.integers(0, 20))],) if rng.random() < 0.5 else ()
        params.append(SamplingParams(max_new_tokens=int(rng.integers(1, 20)), stop_token_ids=stops))
    for prompt, param, output in zip(prompts, params, engine.generate(prompts, params), strict=True):
        want = markov_continuation(prompt[-1], param.max_new_tokens)
        if param.stop_token_ids and param.stop_token_ids[0] in want:
            want = want[: want.index(param.stop_token_ids[0]) + 1]
        assert output.token_ids == want
    assert_idle(engine)


@pytest.mark.parametrize("kind", ["eos", "stop id"])
@pytest.mark.parametrize("accept", ACCEPT)
def test_b22_b24_stop_and_cap_inside_a_run(accept, kind):
    """B22, B24 (sglang issue 31599, vllm pull request 47616, transformers issue 47912): the stop and the cap at every offset of a run; reason, ids,
    accept lengths and every streamed chunk end at the same token, as in plain decoding; `ignore_eos` runs on."""
    start = ACCEPT[accept][4]
    first = markov_continuation(start, 16)
    for stop_at in range(0, 13):
        stop = first[stop_at]
        eos, stops = ((stop,), ()) if kind == "eos" else ((), (stop,))
        engine = engine_with_eos(eos)
        for cap in (1, stop_at, stop_at + 1, stop_at + 2, 14):
            if cap < 1:
                continue
            params = SamplingParams(max_new_tokens=cap, stop_token_ids=stops)
            want = first[: min(cap, stop_at + 1)]
            reason = "stop" if stop_at < cap else "length"
            chunks, output = [], None
            for emission in engine.generate([[start]], params, stream=True):
                chunks += emission.token_ids
                output = emission.output
            assert (output.token_ids, output.finish_reason) == (want, reason)
            assert chunks == want and len(want) == 1 + sum(output.accept_lens)
        ignoring = SamplingParams(max_new_tokens=14, stop_token_ids=stops, ignore_eos=True)
        assert engine.generate([[start]], ignoring)[0].token_ids == first[:14]
        assert_idle(engine)


def engine_with_eos(eos, cache=[]):  # noqa: B006
    """One engine for all: end-of-sequence ids are host facts, so the compiled programs serve any."""
    if not cache:
        cache.append(build(markov(), worker=oracle_worker(), max_running=1))
    cache[0].target = markov()._replace(facts=markov(eos_token_ids=eos).facts)
    return cache[0]


@pytest.mark.parametrize("depth_of_queue", [1, 5])
def test_short_pages_make_requests_wait_in_order(depth_of_queue):
    """A pool for one at a time: the others wait, first come first served, and all end as they would alone."""
    engine = build(transformer(), "ngram", page_size=16, kv_tokens=64, max_running=4)
    prompts, params = prompts_of(depth_of_queue, seed=9, shortest=10, longest=20), [greedy(12)] * depth_of_queue
    order = [e.rid for e in engine.generate(prompts, params, stream=True) if e.output]
    assert order == sorted(order, key=lambda rid: int(rid[1:]))
    assert [o.token_ids for o in engine.generate(prompts, params)] == solo(transformer(), prompts, params)
    assert_idle(engine)


def test_context_len_of_a_request_is_the_engine_s(length=CONTEXT):
    """A shorter `context_len` than the model's is honoured: prompt and output never exceed it."""
    engine = build(markov(), "plain", context_len=40)
    (output,) = engine.generate([[1] * 30], greedy(1000))
    assert len(output.token_ids) == 10 and output.finish_reason == "length"
