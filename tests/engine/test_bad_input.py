"""What cannot run is refused with field, value and rule; nobody else notices."""

import numpy as np
import pytest
from engine.kit import (
    CONTEXT,
    VOCAB,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    oracle_worker,
    transformer,
)

from jspec import Engine, EngineConfig, SamplingParams
from jspec.config import MAX_STOP_TOKEN_IDS

REFUSED = [
    ([], {}, ["prompt is empty"]),
    ("", {}, ["no tokenizer"]),
    ([1] * CONTEXT, {}, [f"{CONTEXT} tokens", f"context_len={CONTEXT}"]),
    ([1] * 4000, {}, ["4000 tokens", f"context_len={CONTEXT}"]),
    ([1, VOCAB], {}, [f"token id {VOCAB}", f"[0, {VOCAB})"]),
    ([1, -1], {}, ["token id -1"]),
    ([1.5, 2.0], {}, ["token ids", "float64"]),
    ([[1], [2]], {}, ["flat sequence"]),
    ([1, 2], {"stop_token_ids": (VOCAB + 3,)}, ["stop_token_ids", str(VOCAB + 3)]),
    (
        [1, 2],
        {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))},
        ["stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}"],
    ),
    ([1, 2], {"logit_bias": {0: 1.0, VOCAB: 1.0}}, ["logit_bias", f"token id {VOCAB}", f"[0, {VOCAB})"]),
    ([1, 2], {"logit_bias": {2**31 - 1: 1.0}}, ["logit_bias", f"token id {2**31 - 1}", f"[0, {VOCAB})"]),
    ([1, 2], {"bad_words": ("ab", "c")}, ["bad_words=('ab', 'c')", "needs a tokenizer"]),
    ([1, 2], {"stop": ("ab", "c")}, ["stop=('ab', 'c')", "needs a tokenizer"]),
    ([1, VOCAB], {"n": 3, "logprobs": 2, "prompt_logprobs": 2}, [f"token id {VOCAB}", f"[0, {VOCAB})"]),
]


@pytest.mark.parametrize(("prompt", "params", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_a_refused_request_changes_nothing(prompt, params, words):
    """B55, B57: refused alone, and among neighbours whose tokens stay what they were."""
    engine = shared_engine()
    before = engine.state
    with pytest.raises((TypeError, ValueError)) as error:
        engine.submit(prompt, SamplingParams(**params))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert engine.state is before
    good = [[1, 2, 3], [9]]
    outputs = engine.generate([good[0], prompt, good[1]], [greedy(9), SamplingParams(**params), greedy(9)])
    assert [o.finish_reason for o in outputs] == ["length", "refused", "length"]
    assert outputs[1].error == str(error.value)
    assert [outputs[0].token_ids, outputs[2].token_ids] == [markov_continuation(p[-1], 9) for p in good]
    assert_idle(engine)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": dict.fromkeys(range(VOCAB), -7.0)},
        {"logit_bias": {VOCAB - 1: 0.0, 0: 0}},
        {"stop_token_ids": (VOCAB - 1, *[0] * 9), "ignore_eos": True},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"repetition_penalty": 1.0, "presence_penalty": -0.0, "frequency_penalty": 0.0, "bad_words": ()},
    ],
    ids=["as many biases as tokens", "the last token", "the same id often", "most log-probabilities", "nothing"],
)
def test_what_is_just_allowed_runs(params):
    """At the edge of each rule, where the values change no choice: as without them."""
    prompts = [[1, 2, 3], [9]]
    outputs = shared_engine().generate(prompts, greedy(9, **params))
    assert [o.token_ids for o in outputs] == [markov_continuation(p[-1], 9) for p in prompts]
    assert_idle(shared_engine())


_ENGINES: list[Engine] = []


def shared_engine() -> Engine:
    if not _ENGINES:
        _ENGINES.append(build(markov(), worker=oracle_worker()))
    return _ENGINES[0]


@pytest.mark.parametrize("extra", [-2, -1, 0, 1, 4, 5])
def test_the_limit_does_not_depend_on_the_algorithm(extra):
    """B55: prompts around the context limit, with a reserve beyond it, while another request runs."""
    prompt = [3] * (CONTEXT + extra)
    for engine in (shared_engine(), build(markov(), "plain")):
        engine.submit([5], greedy(30), rid="other")
        if extra < 0:
            engine.submit(prompt, greedy(1000), rid="edge")
        else:
            with pytest.raises(ValueError, match="context_len"):
                engine.submit(prompt, greedy(1000))
        done = {}
        while engine.has_work:
            done |= {e.rid: e.output for e in engine.step() if e.output}
        assert done["other"].token_ids == markov_continuation(5, 30)
        if extra < 0:
            assert done["edge"].token_ids == markov_continuation(3, -extra)
            assert done["edge"].finish_reason == "length"
        assert_idle(engine)


@pytest.mark.parametrize("length", range(118, 128))
def test_output_fills_the_context_exactly(length):
    """B54: fewer positions left than a verify is wide; output length is context - prompt, as for plain decoding."""
    prompt = list(np.random.default_rng(length).integers(0, VOCAB, length))
    outputs = shared_engine().generate([prompt, [1, 2]], [greedy(1000), greedy(20)])
    assert outputs[0].token_ids == markov_continuation(prompt[-1], CONTEXT - length)
    assert outputs[0].finish_reason == "length"
    assert outputs[1].token_ids == markov_continuation(2, 20)


@pytest.mark.parametrize("prompt", [[4], [0], [7, 7], [7, 7, 7]])
@pytest.mark.parametrize("algorithm", ["plain", "ngram"])
def test_short_prompts(prompt, algorithm):
    """B57: prompts of one token, and shorter than the longest n-gram."""
    eos = markov(eos_token_ids=(4,))
    assert build(eos, algorithm).generate([prompt], greedy(5))[0].token_ids == markov_continuation(prompt[-1], 5)


def test_pool_too_small_for_a_request():
    """One that can never fit is refused at submission, with the numbers; one that fits runs."""
    engine = build(transformer(), "ngram", kv_tokens=64, page_size=16)
    with pytest.raises(
        ValueError, match=r"prompt of 40 tokens with max_new_tokens=60 needs \d+ KV tokens.*pool has 64"
    ):
        engine.submit([1] * 40, greedy(60))
    assert len(engine.generate([[1] * 20], greedy(20))[0].token_ids) == 20
    assert_idle(engine)


BAD_ENGINES = [
    ({"algorithm": "medusa"}, "algorithm='medusa' is unknown: choose one of plain, ngram"),
    ({"context_len": CONTEXT + 1}, f"context_len={CONTEXT + 1} exceeds the {CONTEXT} tokens"),
    ({"kv_tokens": 8, "page_size": 16}, "kv_tokens=8 holds 0 pages"),
    ({"kv_memory_bytes": 10}, "kv_memory_bytes=10"),
    ({"page_size": 257}, "page_size=257"),
    ({"page_size": 0}, "page_size=0"),
    ({"algorithm": "ngram", "num_draft_tokens": 1}, "num_draft_tokens=1 must be at least 2"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_ENGINES, ids=[str(i) for i in range(len(BAD_ENGINES))])
def test_a_configuration_that_cannot_work_is_refused(settings, words):
    with pytest.raises(ValueError) as error:
        Engine(EngineConfig(**settings), target=transformer())
    assert words in str(error.value)


def test_same_name_twice():
    engine = shared_engine()
    engine.submit([1], greedy(3), rid="mine")
    with pytest.raises(ValueError, match="rid='mine' already names"):
        engine.submit([1], greedy(3), rid="mine")
    while engine.has_work:
        engine.step()
    assert engine.submit([1], greedy(1), rid="mine") == "mine"
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def test_non_finite_logits_end_one_request():
    """B67: a token whose embedding is NaN makes its request fail, with a message; neighbours, pages and later requests are unharmed."""
    import jax
    import jax.numpy as jnp

    target = transformer()
    poison = 13
    path = max(
        jax.tree_util.tree_leaves_with_path(target.params), key=lambda item: "embed" in jax.tree_util.keystr(item[0])
    )[0]
    params = jax.tree_util.tree_map_with_path(
        lambda p, leaf: leaf.at[poison].set(jnp.nan) if p == path else leaf, target.params
    )
    engine = build(target._replace(params=params), "ngram")
    outputs = engine.generate([[1, 2, 3], [1, poison], [5, 6]], greedy(10))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert "not finite" in outputs[1].error and outputs[1].token_ids == []
    clean = build(target, "plain").generate([[1, 2, 3], [5, 6]], greedy(10))
    assert [outputs[0].token_ids, outputs[2].token_ids] == [o.token_ids for o in clean]
    assert_idle(engine)
    assert engine.generate([[1, 2, 3]], greedy(10))[0].token_ids == clean[0].token_ids
