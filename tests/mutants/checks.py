"""What sees faults: searches of small configurations, walks beside the slow scheduler, and engines whose tokens are known.

Each check returns what it saw, or None.
"""

import functools

import numpy as np
from engine.kit import (
    ACCEPT,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    oracle_accept_lens,
    oracle_worker,
)
from explore.kit import config
from scheduler.test_walk import Walk

from jspec.explore import explore, replay

MOST_STATES = 20_000
"""Faults may lead to ever new states."""

CONFIGS = {
    "a request": config("2+4", rows=1, pages=5, verify_width=3),
    "a request of single tokens": config("1+3", rows=1, pages=3, verify_width=1, stops="none", aborts=False),
    "pages of a token": config("1+8", rows=1, page_size=1, pages=20, stops="none", aborts=False),
    "windows that fill pages badly": config(
        "3+5", rows=1, page_size=4, pages=3, verify_width=3, stops="none", aborts=False
    ),
    "stops of both kinds": config("1+5", rows=1, pages=8, verify_width=3, stops="both", aborts=False),
    "logits that are not finite": config("2+3", rows=1, pages=5, failures=True, aborts=False),
    "one row after another": config("2+3", "1+2", rows=1, pages=6, prefix_cache=False),
    "two rows": config("2+4", "1+3", rows=2, pages=12, prefix_cache=False, stops="none"),
    "chunks": config("5+2", "2+2", pages=8, max_prefill_tokens=3, prefix_cache=False),
    "prompts alike": config("4+3,shared=4", "4+2,shared=4", pages=9, aborts=False),
    "prompts alike, few pages": config(
        "4+2,shared=4", "2+4", "4+2,shared=4", rows=2, pages=7, aborts=False, stops="none"
    ),
    "prompts that part behind a page": config(
        "3+2,shared=2", "3+2,shared=2", lookahead=1, pages=8, stops="none", aborts=False
    ),
    "pages run short": config("1+9", "1+3", page_size=1, pages=13, aborts=False, stops="none"),
    "chunks while pages are short": config(
        "1+9",
        "1+9",
        "5+1",
        rows=3,
        pages=7,
        verify_width=1,
        depth=0,
        max_prefill_tokens=2,
        aborts=False,
        stops="none",
        prefix_cache=False,
    ),
    "an arrival while pages are short": config(
        "1+3", "1+3", "1+1", rows=3, page_size=1, pages=7, depth=0, aborts=False, stops="none"
    ),
}


def search(name):
    """The violation that a search finds, confirmed by a replay of its path."""
    result = explore(CONFIGS[name], max_states=MOST_STATES)
    if result.found is None:
        assert result.complete
        return None
    if result.complete:  # it is about the graph, not about a step of the way
        return str(result.found.violation)
    last = replay(result.found.path)[-1].violation
    assert last is not None and last.name == result.found.violation.name, last
    return str(result.found.violation)


def walk():
    """Some random schedules beside the scheduler of lists and dictionaries."""
    for seed in range(6):
        try:
            Walk(np.random.default_rng([seed, 1, 4]), depth=1, page_size=4).go(80)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


@functools.cache
def _target():
    return markov()


def engine():
    """Requests that arrive one after another, some in chunks, end at different times and accept differently, over M1 with an oracle for a draft."""
    try:
        served = build(
            _target(), worker=oracle_worker(), page_size=4, max_running=3, mixed_batches=True, max_prefill_tokens=12
        )
        todo = [(level, 3 + 2 * i) for i, level in enumerate(["all", "none", "mixed", "all", "mixed"])]
        prompts = [[*range(1 + 5 * i), ACCEPT[level][i]] for i, (level, _) in enumerate(todo)]
        outputs, rids = {}, []
        for _ in range(60):
            if len(rids) < len(todo):
                rids.append(served.submit(prompts[len(rids)], greedy(todo[len(rids)][1] + 8)))
            outputs |= {e.rid: e.output for e in served.step() if e.output is not None}
        for rid, prompt, (_, length) in zip(rids, prompts, todo, strict=True):
            if rid not in outputs:
                return f"no end: {rid}"
            if outputs[rid].token_ids != markov_continuation(prompt[-1], length + 8):
                return f"other tokens than plain decoding: {rid}"
        alone = served.generate([prompts[0]], greedy(11))[0]
        if alone.accept_lens != oracle_accept_lens(prompts[0][-1], 11):
            return "other accept lengths than the oracle's"
        assert_idle(served)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


CHECKS = {**{f"explore: {name}": functools.partial(search, name) for name in CONFIGS}, "walk": walk, "engine": engine}
