"""Sampled output has the target's law: the joint distribution of several tokens, over many requests, against the exact one.

The statistic is Pearson's chi-square over the outcomes that are expected at least 5 times, the rest pooled; the bound is its mean plus 6 standard deviations, `df + 6 * sqrt(2 * df)`:
by the tail of a chi-square with this many degrees of freedom, fewer than one run in 10,000 exceeds it by chance, and seeds are fixed.
"""

import itertools

import numpy as np
import pytest
from engine.kit import build

from jspec import SamplingParams
from jspec.models.tiny import bigram_target
from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle

V, TOKENS, DRAWS = 6, 4, 20_000
TABLE = np.random.default_rng(0).normal(0, 1.5, (V, V)).astype(np.float32)
FILTERS = {
    "plain": dict(temperature=1.0),
    "top-k and top-p": dict(temperature=1.5, top_k=4, top_p=0.8),
    "min-p": dict(temperature=0.7, min_p=0.1),
}


def step_probs(token: int, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Temperature, top-k, top-p of what is left, min-p: by sorting."""
    weights = np.exp(TABLE[token].astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    order = order[: top_k or V]
    share = weights[order] / weights[order].sum()
    order = order[: int(np.searchsorted(np.cumsum(share), top_p - 1e-9)) + 1]
    order = order[weights[order] >= min_p * weights.max()]
    probs = np.zeros(V)
    probs[order] = weights[order] / weights[order].sum()
    return probs


def joint(prompt: int, filters):
    """{run of TOKENS tokens: probability}."""
    table = [step_probs(token, **filters) for token in range(V)]
    return {
        run: float(np.prod([table[a][b] for a, b in itertools.pairwise((prompt, *run))]))
        for run in itertools.product(range(V), repeat=TOKENS)
    }


def assert_law(runs, expected, draws):
    counts = dict.fromkeys(expected, 0)
    for run in runs:
        counts[tuple(run)] += 1
    assert sum(counts[run] for run, prob in expected.items() if prob == 0) == 0, "a token that was filtered out"
    frequent = [run for run, prob in expected.items() if prob * draws >= 5]
    observed = np.array([counts[run] for run in frequent], float)
    wanted = np.array([expected[run] * draws for run in frequent])
    rest = draws - wanted.sum()
    if rest >= 5:
        observed, wanted = np.append(observed, draws - observed.sum()), np.append(wanted, rest)
    df = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < df + 6 * np.sqrt(2 * df), (statistic, df)


def workers(target):
    draft = random_draft(target, 2, num_heads=1)
    narrow = random_draft(target, 2, num_heads=1, token_ids=(0, 2, 3, 5))
    several = random_draft(target, 4, kind="multi-layer", num_modules=2, num_heads=1)
    return {
        "chain": lambda: eagle(target, draft, sizes=EagleSizes(num_steps=2)),
        "tree": lambda: eagle(target, draft, sizes=EagleSizes(num_steps=2, topk=2, num_draft_tokens=6)),
        "rejection": lambda: eagle(target, draft, sizes=EagleSizes(num_steps=2), rejection_sampling=True),
        "rejection, few tokens": lambda: eagle(target, narrow, sizes=EagleSizes(num_steps=3), rejection_sampling=True),
        "multi-layer": lambda: multi_layer_eagle(target, several),
        "multi-layer rejection": lambda: multi_layer_eagle(target, several, rejection_sampling=True),
    }


CASES = [
    ("chain", "plain", pytest.mark.slow),
    ("tree", "plain", ()),
    ("tree", "top-k and top-p", pytest.mark.slow),
    ("rejection", "plain", pytest.mark.slow),
    ("rejection", "top-k and top-p", ()),
    ("rejection, few tokens", "min-p", ()),
    ("multi-layer", "min-p", pytest.mark.slow),
    ("multi-layer rejection", "top-k and top-p", pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "filters"), [pytest.param(k, f, marks=m, id=f"{k}, {f}") for k, f, m in CASES])
def test_the_joint_law_of_four_tokens(kind, filters):
    """B31, B37: 20,000 requests, each its own seed, entering and leaving a batch of 64 beside greedy ones, so that rows move all the time."""
    target = bigram_target(TABLE, num_layers=1, num_heads=1, context_len=64)
    engine = build(target, worker=workers(target)[kind](), max_running=64, checked=False, page_size=4)
    params = [SamplingParams(max_new_tokens=TOKENS, seed=seed, **FILTERS[filters]) for seed in range(DRAWS)]
    for i in range(0, DRAWS, 50):
        params[i] = SamplingParams(max_new_tokens=TOKENS + i % 3)
    outputs = engine.generate([[1]] * DRAWS, params)
    sampled = [output.token_ids for output, p in zip(outputs, params, strict=True) if p.temperature > 0]
    assert_law(sampled, joint(1, FILTERS[filters]), len(sampled))
    greedy_runs = {tuple(o.token_ids[:TOKENS]) for o, p in zip(outputs, params, strict=True) if p.temperature == 0}
    best, token = [], 1
    for _ in range(TOKENS):
        best.append(token := int(np.argmax(TABLE[token])))
    assert greedy_runs == {tuple(best)}


def test_rejection_accepts_more_than_a_best_guess():
    """Where draft and target are the same and unsure, drawing drafts accepts them all; proposing the best accepts its probability."""
    target = bigram_target(TABLE, num_layers=1, num_heads=1, context_len=64)
    draft = markov_draft(target, range(V), kind="eagle", num_heads=1)  # shows the target's own head the token itself
    accept = {}
    for rejection in (True, False):
        worker = eagle(target, draft, sizes=EagleSizes(num_steps=2), rejection_sampling=rejection)
        engine = build(target, worker=worker, max_running=16)
        engine.generate(
            [[1]] * 64, [SamplingParams(max_new_tokens=31, temperature=2.0, seed=seed) for seed in range(64)]
        )
        accept[rejection] = engine.summary().accept_length
    assert accept[True] > 2.9 > 2.2 > accept[False]
