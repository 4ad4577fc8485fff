"""Speculation, pages, overlap, batching: none of it may change a token."""

import pytest
from engine.kit import (
    ACCEPT,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    mixed_params,
    oracle_accept_lens,
    oracle_worker,
    prompts_of,
    slow_greedy,
    transformer,
    transformer_continuation,
)

from jspec import SamplingParams
from jspec.spec_workers import ngram, plain

TOKENS = 24


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_known_accept_lengths(page_size, overlap):
    """Batches of 1, 3 and 8, drafts all wrong, all right, mixed, and all of these in one batch: tokens of M1's table, and the accept length of every
    verify as computed by hand (B75)."""
    engine = build(markov(), worker=oracle_worker(), page_size=page_size, overlap=overlap, max_running=8)
    for level in (*ACCEPT, "every"):
        for count in (1, 3, 8):
            prompts = prompts_of(count, seed=count)
            if level != "every":
                prompts = [[*prompt[:-1], ACCEPT[level][i]] for i, prompt in enumerate(prompts)]
            for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
                assert output.token_ids == markov_continuation(prompt[-1], TOKENS)
                assert output.accept_lens == oracle_accept_lens(prompt[-1], TOKENS)
                assert output.finish_reason == "length"
                assert level != "none" or set(output.accept_lens) == {1}
                assert level != "all" or set(output.accept_lens[:-1]) == {5}
            assert_idle(engine)
    assert engine.summary().compiles_after_warmup == 0


@pytest.mark.parametrize(
    ("algorithm", "page_size", "overlap"),
    [("ngram", page_size, overlap) for page_size in (1, 4, 16, 64) for overlap in (True, False)]
    + [("plain", 1, True), ("plain", 16, False), ("plain", 64, True)],
)
def test_greedy_equals_full_recompute(algorithm, page_size, overlap):
    """Batches of 1, 3 and 8 on a transformer whose output depends on every KV entry, against decoding without any cache."""
    # Matches of a single token too: the more drafts, right and wrong, the more the test sees.
    worker = ngram(transformer(), num_draft_tokens=5, min_ngram=1) if algorithm == "ngram" else plain(transformer())
    engine = build(transformer(), worker=worker, page_size=page_size, overlap=overlap, max_running=8)
    for count in (1, 3, 8):
        prompts = prompts_of(count, seed=count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
            assert output.token_ids == transformer_continuation(tuple(prompt))
            assert len(output.token_ids) == 1 + sum(output.accept_lens)
        assert_idle(engine)
    if algorithm == "ngram":
        assert engine.summary().accept_length > 1.2, "prompt lookup accepted next to nothing: the test shows little"
    assert engine.summary().compiles_after_warmup == 0


MIXED = mixed_params(TOKENS)


@pytest.mark.parametrize("algorithm", ["plain", "ngram"])
def test_sampled_equals_solo_plain_decoding(algorithm):
    """B33, B39: one batch of greedy and differently sampled requests, in every rotation, rows leaving early; each request keeps its own parameters
    and its seed fixes its tokens, whatever the algorithm and the company."""
    prompts = prompts_of(len(MIXED), seed=5, shortest=4)
    engine = build(transformer(), "plain", overlap=False, page_size=1, max_running=1)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, MIXED, strict=True)]
    for i in (0, 2):
        assert alone[i] == slow_greedy(transformer(), prompts[i], TOKENS), "temperature 0 and top_k=1 are greedy"
    engine = build(transformer(), algorithm, max_running=8)
    for shift in range(len(MIXED)):
        order = [(i + shift) % len(MIXED) for i in range(len(MIXED))]
        params = [MIXED[i] for i in order]
        outputs = engine.generate([prompts[i] for i in order], params)
        assert [o.token_ids for o in outputs] == [alone[i] for i in order]
    assert_idle(engine)


def test_unseeded_requests_differ_and_repeat():
    """Without a seed, a request's tokens follow from the engine's seed and its number: two equal requests differ, two equal engines agree."""
    params = SamplingParams(max_new_tokens=12, temperature=2.0)
    runs = [[o.token_ids for o in build(transformer(), "ngram").generate([[1, 2, 3]] * 3, params)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3
