"""The fold: what a launch may touch, how far the device leads, what crosses the bus, how requests come and go."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest
from engine.kit import assert_idle, build, greedy, markov, markov_continuation, oracle_worker, prompts_of, transformer

from jspec.engine import engine as engine_module
from jspec.engine.programs import Program
from jspec.future_map import publish
from jspec.state.batches import ForwardMode


def test_a_launch_leaves_the_batch_and_the_state_untouched(monkeypatch):
    """Every array of the plan, and of the state it came from, is read-only during the launch and equal after it."""
    seen = []

    def frozen_plan(states, *, limits, real=engine_module.plan_ranks):
        planned = real(states, limits=limits)
        for state, batch, _ in planned:
            for leaf in jax.tree.leaves((state, batch)):
                if isinstance(leaf, np.ndarray):
                    leaf.setflags(write=False)
            seen.append((batch, jax.tree.map(np.copy, batch)))
        return planned

    monkeypatch.setattr(engine_module, "plan_ranks", frozen_plan)
    engine = build(markov(), worker=oracle_worker(), mixed_batches=True, page_size=4, max_prefill_tokens=32)
    prompts = prompts_of(6)
    outputs = engine.generate(prompts, greedy(20))
    assert [o.token_ids for o in outputs] == [markov_continuation(p[-1], 20) for p in prompts]
    for batch, copy in seen:
        jax.tree.map(np.testing.assert_array_equal, batch, copy)
        assert batch is None or batch.forward_mode.is_planned
    assert {batch.forward_mode for batch, _ in seen if batch} == {
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
        ForwardMode.DECODE,
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_one_upload_one_download_at_most_two_dispatches(monkeypatch, overlap):
    """Per iteration, and independent of how long the context is."""
    uploads, call = [], Program.__call__

    def spy(self, params, device, upload, *, logprobs):
        assert not logprobs
        assert self.commit is None
        uploads.append(upload)
        return call(self, params, device, upload, logprobs=logprobs)

    monkeypatch.setattr(Program, "__call__", spy)
    sizes = {}
    for context in (128, 1024):
        engine = build(transformer(context_len=context), "ngram", overlap=overlap, max_running=1)
        uploads.clear()
        steps = 0
        engine.submit([1] * (context // 2), greedy(30))
        while engine.has_work:
            engine.step()
            steps += 1
        launches = len(uploads)
        assert launches in ((steps - 1,) if overlap else (steps,)), (
            "a launch each step; overlap needs one more to settle the last"
        )
        sizes[context] = {upload.nbytes for upload in uploads[1:]}
    assert sizes[128] == sizes[1024] and len(sizes[128]) == 1


def test_overlap_is_one_launch_ahead():
    """With overlap two launches are unsettled inside an iteration and one between iterations; without it, none."""
    for overlap, left in ((True, 1), (False, 0)):
        engine = build(markov(), worker=oracle_worker(), overlap=overlap)
        engine.submit([1, 2], greedy(30))
        for _ in range(4):
            engine.step()
            assert len(engine.state.launched) == left
        while engine.has_work:
            engine.step()
        assert_idle(engine)


def test_no_useless_launch_for_a_last_token():
    """Plain decoding knows each length beforehand: `n` tokens are one prefill and `n - 1` launches, overlap or not."""
    for overlap in (True, False):
        engine = build(markov(), "plain", overlap=overlap)
        engine.generate([[1, 2]], greedy(9))
        assert int(engine.state.forward_iter) == 9
        assert engine.summary().verifies == 8


def test_a_lost_publish_is_caught(monkeypatch):
    """A worker whose publish goes astray (here: to the next launch's number) makes the next read stale, which the engine reports."""
    chain_module = importlib.import_module("jspec.spec_workers.chain")

    monkeypatch.setattr(
        chain_module, "publish", lambda f, rows, v, *, forward_iter: publish(f, rows, v, forward_iter=forward_iter + 1)
    )
    engine = build(markov(), "plain", checked=False)
    engine.submit([1, 2], greedy(9))
    with pytest.raises(RuntimeError, match="FutureMap row that nobody published"):
        for _ in range(5):
            engine.step()


def test_nothing_compiles_after_warm_up():
    """Every batch size, prompt length, sampling mix, abort and refusal of a soak runs in the programs built ahead (B71)."""
    engine = build(
        transformer(),
        "ngram",
        max_running=8,
        checked=False,
        batch_buckets=(2, 8),
        prefill_buckets=(32, 128),
        max_prefill_tokens=128,
        mixed_batches=True,
    )
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8, 11):
        prompts = prompts_of(count, seed=count, longest=100)
        params = [
            dataclasses.replace(greedy(int(rng.integers(1, 27))), temperature=float(rng.integers(0, 2)))
            for _ in prompts
        ]
        engine.generate([*prompts, []], [*params, greedy(3)])
    rid = engine.submit([1], greedy(50))
    engine.step()
    engine.abort(rid)
    while engine.has_work:
        engine.step()
    assert engine.summary().compiles_after_warmup == 0
    assert_idle(engine)


@pytest.mark.parametrize("steps", range(0, 8))
def test_abort_in_every_phase(steps):
    """B69: queued, between prefill and first verify, during a verify: no token beyond the step under way, neighbours unchanged, idempotent."""
    engine = build(markov(), worker=oracle_worker(), max_running=1)
    victim, other = engine.submit([3], greedy(100)), engine.submit([9], greedy(12))
    tokens, done = [], {}

    def look(emissions):
        for emission in emissions:
            if emission.rid == victim:
                tokens.extend(emission.token_ids)
            if emission.output:
                done[emission.rid] = emission.output

    for _ in range(steps):
        look(engine.step())
    before = len(tokens)
    assert engine.abort(victim) and not engine.abort("nobody")
    engine.abort(victim)  # asking twice is harmless
    while engine.has_work:
        look(engine.step())
    assert done[victim].finish_reason == "abort"
    assert done[victim].token_ids == tokens == markov_continuation(3, len(tokens))
    assert len(tokens) - before <= engine.worker.output_stride
    assert done[other].token_ids == markov_continuation(9, 12)
    assert_idle(engine)


def test_a_waiting_request_is_aborted_at_once():
    engine = build(markov(), "plain", max_running=1)
    first, second = engine.submit([1], greedy(5)), engine.submit([2], greedy(5))
    engine.step()
    assert engine.abort(second)
    ends = [e.output for e in engine.step() if e.output]
    assert [(o.rid, o.finish_reason, o.token_ids) for o in ends] == [(second, "abort", [])]
    done = {}
    while engine.has_work:
        done |= {e.rid: e.output for e in engine.step() if e.output}
    assert done[first].token_ids == markov_continuation(1, 5)


def test_generate_keeps_the_emissions_of_others():
    """Requests submitted by hand run along with `generate`, and their tokens come out of the next `step`."""
    engine = build(markov(), worker=oracle_worker())
    rid = engine.submit([3], greedy(4))
    assert engine.generate([[9]], greedy(20))[0].token_ids == markov_continuation(9, 20)
    tokens = []
    while engine.has_work:
        for emission in engine.step():
            assert emission.rid == rid
            tokens += emission.token_ids
    assert tokens == markov_continuation(3, 4)


def test_a_stream_left_early_ends_its_requests():
    engine = build(markov(), worker=oracle_worker())
    stream = engine.generate([[3], [4]], greedy(100), stream=True)
    next(stream)
    stream.close()
    while engine.has_work:
        engine.step()
    assert_idle(engine)
