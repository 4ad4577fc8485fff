"""Sampled output of EAGLE has the target's law."""

import numpy as np
import pytest
from engine.kit import build
from engine.laws import FILTERS, TABLE, TOKENS, V, assert_law, joint

from jspec import SamplingParams
from jspec.models.tiny import bigram_target
from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle

DRAWS = 20_000


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
