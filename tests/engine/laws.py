"""Whether sampled output has the target's law: the joint distribution of several tokens, over many requests, against the exact one.

The statistic is Pearson's chi-square over the outcomes that are expected at least 5 times, the rest pooled; the bound is its mean plus 6 standard deviations, `df + 6 * sqrt(2 * df)`:
by the tail of a chi-square with this many degrees of freedom, fewer than one run in 10,000 exceeds it by chance, and seeds are fixed.
"""

import itertools

import numpy as np

V, TOKENS = 6, 4
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


def joint(prompt: int, filters, tokens: int = TOKENS):
    """{run of so many tokens: probability}."""
    table = [step_probs(token, **filters) for token in range(V)]
    return {
        run: float(np.prod([table[a][b] for a, b in itertools.pairwise((prompt, *run))]))
        for run in itertools.product(range(V), repeat=tokens)
    }


def distance(runs, expected, draws) -> tuple[float, float]:
    """The statistic, and its bound."""
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
    return float(((observed - wanted) ** 2 / wanted).sum()), df + 6 * np.sqrt(2 * df)


def assert_law(runs, expected, draws):
    statistic, bound = distance(runs, expected, draws)
    assert statistic < bound, (statistic, bound)
