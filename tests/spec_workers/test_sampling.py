"""The sampler: its filters against a sort in plain Python, its draws against their distribution, its rows against each other."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.sampling import (
    FIELDS,
    SAMPLING_COLUMNS,
    TARGET_TOKEN,
    SamplingState,
    filter_logits,
    init_sampling,
    position_key,
    row_sampling,
    sample,
    sampling_of,
)

V, ROWS, POSITIONS = 16, 40, 600
draw = jax.jit(sample)
filter_rows = jax.jit(jax.vmap(lambda logits, k, p, m: filter_logits(logits, top_k=k, top_p=p, min_p=m)))


class TooNear(Exception):
    """A sum lies so near a threshold that rounding decides."""


def slow_filter(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """Ids that stay, in falling order."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = [math.exp(logits[i] - logits[ids[0]]) for i in range(len(logits))]
    if top_k:
        ids = ids[:top_k]
    if top_p < 1:
        target, before, kept = top_p * sum(weights[i] for i in ids), 0.0, []
        for i in ids:
            if abs(before - target) < 1e-5 * target:
                raise TooNear
            if before < target:
                kept.append(i)
            before += weights[i]
        ids = kept
    if any(0 < abs(weights[i] - min_p) < 1e-6 for i in ids):
        raise TooNear
    return [i for i in ids if weights[i] >= min_p]


def law(logits, *, temperature=1.0, **filters):
    """The distribution that a sampled row is meant to have."""
    scaled = [float(x) / temperature for x in logits]
    ids = slow_filter(scaled, **filters)
    weights = {i: math.exp(scaled[i] - max(scaled)) for i in ids}
    return np.array([weights.get(i, 0.0) / sum(weights.values()) for i in range(len(logits))])


def parameters(num_rows, **given):
    """Rows 1.. with these parameters, each one value or one a row; the rest of the table is idle."""
    idle = init_sampling(ROWS + 1)
    rows = slice(1, num_rows + 1)
    changed = {
        name: getattr(idle, name).at[rows].set(np.asarray(value, FIELDS[name].dtype)) for name, value in given.items()
    }
    return dataclasses.replace(idle, **changed)


# --- the filters -----------------------------------------------------------------------------------------------------


def kept(cases):
    """Ids that `filter_logits` keeps in each `(logits, filters)`."""
    size = len(cases)
    cases = cases + cases[:1] * (-size % 64)  # few shapes, few compilations
    logits = np.array([row for row, _ in cases], np.float32)
    columns = [
        np.array([filters.get(name, off) for _, filters in cases], dtype)
        for name, off, dtype in (("top_k", 0, np.int32), ("top_p", 1, np.float32), ("min_p", 0, np.float32))
    ]
    out = np.asarray(filter_rows(logits, *columns))
    assert out.dtype == np.float32
    assert (np.isneginf(out) | (out == logits)).all()  # what stays, stays as it is
    return [np.nonzero(~np.isneginf(row))[0].tolist() for row in out[:size]]


def random_case(rng, names):
    grid = rng.choice([0.25, 0.5, 1.0])  # a coarse grid, so that ties abound
    logits = (rng.integers(-8, 9, V) * grid).tolist()
    draws = {
        "top_k": int(rng.integers(1, V + 3)),
        "top_p": float(np.float32(rng.choice([rng.uniform(0.01, 1), 0.5, 0.9, 1e-6]))),
        "min_p": float(np.float32(rng.choice([rng.uniform(0, 1), 0.1, 1.0]))),
    }
    return logits, {name: draws[name] for name in names}


@pytest.mark.parametrize(
    "names", [names for n in (1, 2, 3) for names in itertools.combinations(("top_k", "top_p", "min_p"), n)]
)
def test_filters_are_those_of_a_sort(names):
    rng = np.random.default_rng([len(names), *map(len, names)])
    cases, expected = [], []
    while len(cases) < 256:
        case = random_case(rng, names)
        try:
            expected.append(sorted(slow_filter(case[0], **case[1])))
        except TooNear:
            continue
        cases.append(case)
    got = kept(cases)
    for case, have, want in zip(cases, got, expected, strict=True):
        assert have == want, case
    assert len({len(ids) for ids in expected}) > 5  # the filters do different things


@pytest.mark.parametrize(
    ("logits", "filters", "ids"),
    [
        ([1, 3, 2, 3], dict(), [0, 1, 2, 3]),
        ([1, 3, 2, 3], dict(top_k=1), [1]),
        ([1, 3, 2, 3], dict(top_k=2), [1, 3]),
        ([1, 3, 2, 3], dict(top_k=3), [1, 2, 3]),
        ([1, 3, 2, 3], dict(top_k=4), [0, 1, 2, 3]),
        ([1, 3, 2, 3], dict(top_k=2**31 - 1), [0, 1, 2, 3]),
        ([0, 0, 0, 0], dict(top_k=2), [0, 1]),
        ([0, 0, 0, 0], dict(top_p=0.5), [0, 1]),  # reaches one half exactly
        ([0, 0, 0, 0], dict(top_p=0.51), [0, 1, 2]),
        ([0, 0, 0, 0], dict(top_p=1e-9), [0]),
        ([0, 0, 0, 0], dict(min_p=1.0), [0, 1, 2, 3]),
        ([-5, -4, -5, -4], dict(min_p=1.0), [1, 3]),
        ([5, 0, 5, -100], dict(top_k=3, top_p=0.9), [0, 2]),
        ([math.log(4), math.log(3), math.log(2), 0], dict(top_p=0.6), [0, 1]),  # 0.4, 0.3, 0.2, 0.1
        ([math.log(4), math.log(3), math.log(2), 0], dict(top_k=2, top_p=0.55), [0]),  # of 4/7 and 3/7
        ([math.log(4), math.log(3), math.log(2), 0], dict(top_k=3, top_p=0.8, min_p=0.6), [0, 1]),
        ([3e38, -3e38, 0, 3e38], dict(top_k=2), [0, 3]),
        ([-1e-45, 1e-45, 0, -1], dict(top_k=3), [0, 1, 2]),
    ],
)
def test_filters_by_hand(logits, filters, ids):
    assert kept([(logits, filters)]) == [ids]


@pytest.mark.parametrize("filters", [dict(top_k=1), dict(top_p=0.1)])
def test_a_negative_zero_ties_with_zero(filters):
    """Equal logits go to the lower id, whatever their bits."""
    for logits in ([-0.0, 0.0, -1.0, -2.0], [0.0, -0.0, -1.0, -2.0], [-1.0, -0.0, -2.0, 0.0]):
        first = logits.index(0.0)
        assert kept([(logits, filters)]) == [[first]]


# --- the distribution ------------------------------------------------------------------------------------------------

DRAWS = ROWS * POSITIONS
LOGITS = np.array([0.3, 2.1, -1.2, 1.4, 0.0, 0.9, -0.4, 1.1, -2.0, 0.6, 1.8, -0.9, 0.2, 1.0, -3.0, 0.5], np.float32)
LAWS = {
    "temperature 1": dict(temperature=1.0),
    "temperature 0.6": dict(temperature=0.6),
    "temperature 3": dict(temperature=3.0),
    "top-k": dict(temperature=1.0, top_k=5),
    "top-p": dict(temperature=1.0, top_p=0.7),
    "min-p": dict(temperature=1.0, min_p=0.4),
    "top-p after cooling": dict(temperature=0.5, top_p=0.8),
    "min-p after heating": dict(temperature=2.0, min_p=0.45),
    "all": dict(temperature=0.8, top_k=9, top_p=0.9, min_p=0.12),
}


@functools.cache
def draws(name):
    """`i32[ROWS, POSITIONS]` from one row of logits: every row another seed, every column another position."""
    sampling = parameters(ROWS, seed=np.arange(ROWS) * 77 + 5, **LAWS[name])
    logits = np.broadcast_to(LOGITS, (ROWS, POSITIONS, V))
    positions = np.broadcast_to(np.arange(POSITIONS, dtype=np.int32), (ROWS, POSITIONS))
    tokens, finite = draw(sampling, np.arange(1, ROWS + 1, dtype=np.int32), logits, positions)
    assert np.asarray(finite).all()
    return np.asarray(tokens)


def follows(counts, probs, sigmas=6):
    """Whether counts are what `probs` gives.

    Each within six binomial standard deviations (a chance of 2e-9 a token to fail where the law holds), none where the probability is 0, and
    Pearson's chi-square, of `k` degrees of freedom, within six of its own standard deviations, `sqrt(2 k)`, of its mean, `k`.
    """
    total, support = counts.sum(), probs > 0
    each = np.abs(counts - total * probs) <= sigmas * np.sqrt(total * probs * (1 - probs))
    chi_square = ((counts - total * probs)[support] ** 2 / (total * probs[support])).sum()
    freedom = max(support.sum() - 1, 1)
    return bool(each.all() and not counts[~support].any() and chi_square <= freedom + sigmas * np.sqrt(2 * freedom))


def count(tokens, size=V):
    return np.bincount(np.asarray(tokens).reshape(-1), minlength=size)


@pytest.mark.parametrize("name", LAWS)
def test_tokens_follow_their_law(name):
    assert DRAWS >= 20_000
    counts = count(draws(name))
    assert follows(counts, law(LOGITS, **LAWS[name]))
    others = [other for other in LAWS if other != name]
    assert not any(follows(counts, law(LOGITS, **LAWS[other])) for other in others)  # the test tells them apart


def test_filters_come_after_the_temperature():
    """The laws above tell: the same filters on the bare logits would leave other tokens."""
    for name in ("top-p after cooling", "min-p after heating"):
        filters = {key: value for key, value in LAWS[name].items() if key != "temperature"}
        assert (law(LOGITS, **LAWS[name]) > 0).tolist() != (law(LOGITS, **filters) > 0).tolist()


def test_the_bound_is_tight_enough():
    """Temperatures 5 % apart, and a top-p that lets one token more in, are told apart."""
    counts = count(draws("temperature 1"))
    assert follows(counts, law(LOGITS, temperature=1.0))
    assert not follows(counts, law(LOGITS, temperature=1.05)) and not follows(counts, law(LOGITS, temperature=0.95))
    assert not follows(count(draws("top-k")), law(LOGITS, temperature=1.0, top_k=6))


def test_draws_of_other_positions_and_seeds_are_independent():
    tokens = draws("temperature 1")
    probs = law(LOGITS)
    pairs = np.outer(probs, probs).reshape(-1)
    for first, second in (
        (tokens[:, :-1], tokens[:, 1:]),  # the next position
        (tokens[:-1], tokens[1:]),  # another seed
        (tokens[:-1, :-1], tokens[1:, 1:]),
    ):
        assert follows(count(first * V + second, V * V), pairs)
    assert not follows(count(tokens * V + tokens, V * V), pairs)


def test_the_seed_and_the_position_make_the_key():
    keys = {
        tuple(np.asarray(jax.random.key_data(position_key(jnp.uint32(seed), position, purpose))).tolist())
        for seed in (0, 1, 2**31, 2**32 - 1)
        for position in (0, 1, 2)
        for purpose in (TARGET_TOKEN, 1)
    }
    assert len(keys) == 24


# --- greedy rows, neighbours, places ----------------------------------------------------------------------------------

B, W = 8, 3


def mixed_batch(seed=0):
    """Greedy and sampled rows with all sorts of filters."""
    rng = np.random.default_rng(seed)
    sampling = parameters(
        B,
        temperature=[0, 1, 0.5, 0, 2, 0.9, 0, 1],
        top_k=[0, 0, 4, 3, 0, 2, 1, 9],
        top_p=[1, 0.8, 1, 0.5, 1, 0.9, 0.01, 1],
        min_p=[0, 0, 0.1, 0.9, 0, 0, 1, 0.2],
        seed=rng.integers(0, 2**32, B, dtype=np.uint32),
    )
    logits = rng.normal(0, 2, (B, W, V)).astype(np.float32)
    positions = rng.integers(0, 1000, (B, W)).astype(np.int32)
    return sampling, np.arange(1, B + 1, dtype=np.int32), logits, positions


def draw_batch(sampling, rows, logits, positions, active=None):
    active = np.ones((B, W), bool) if active is None else active
    return tuple(np.asarray(x) for x in draw(sampling, rows, logits, positions, active))


def draw_two(sampling, rows, logits, positions):
    """Two rows in a batch of another shape: 200 positions each, of which the first are asked for."""
    count = positions.shape[1]
    logits = np.concatenate([logits, np.zeros((2, 200 - count, V), np.float32)], axis=1)
    positions = np.concatenate([positions, np.zeros((2, 200 - count), np.int32)], axis=1)
    return tuple(np.asarray(x)[:, :count] for x in draw(sampling, np.asarray(rows, np.int32), logits, positions))


def test_greedy_rows_take_the_most_likely_token():
    """Whatever their filters, and whoever is sampled beside them."""
    sampling, rows, logits, positions = mixed_batch()
    tokens, _ = draw_batch(sampling, rows, logits, positions)
    greedy = np.asarray(sampling.temperature)[rows] == 0
    assert greedy.tolist() == [True, False, False, True, False, False, True, False]
    assert (tokens[greedy] == logits.argmax(-1)[greedy]).all()
    assert (tokens[~greedy] != logits.argmax(-1)[~greedy]).any()
    alone, _ = draw_two(sampling, rows[[0, 6]], logits[[0, 6]], positions[[0, 6]])
    assert (alone == tokens[[0, 6]]).all()


def test_a_row_does_not_depend_on_place_or_neighbours():
    sampling, rows, logits, positions = mixed_batch()
    tokens, _ = draw_batch(sampling, rows, logits, positions)
    order = np.random.default_rng(1).permutation(B)
    permuted, _ = draw_batch(sampling, rows[order], logits[order], positions[order])
    assert (permuted == tokens[order]).all()
    padded = [np.concatenate([x[:3], np.zeros_like(x[:2]), x[5:]]) for x in (rows, logits, positions)]
    assert (np.delete(draw_batch(sampling, *padded)[0] == tokens, [3, 4], axis=0)).all()


def test_a_verify_draws_what_plain_decoding_draws():
    """All positions at once, or each as the first of its batch, beside another row: the same token from the same logits."""
    sampling, rows, logits, positions = mixed_batch()
    tokens, _ = draw_batch(sampling, rows, logits, positions)
    for pair in ([1, 4], [5, 3], [7, 2]):
        for j in range(W):
            one, _ = draw_two(sampling, rows[pair], logits[pair, j : j + 1], positions[pair, j : j + 1])
            assert (one[:, 0] == tokens[pair, j]).all()


def test_positions_that_do_not_matter_are_not_drawn():
    """Their neighbours are none the wiser, and what stands there is a token."""
    sampling, rows, logits, positions = mixed_batch()
    tokens, _ = draw_batch(sampling, rows, logits, positions)
    for active in (np.random.default_rng(2).random((B, W)) < 0.5, np.zeros((B, W), bool)):
        part, finite = draw_batch(sampling, rows, logits, positions, active)
        assert (part[active] == tokens[active]).all() and finite.all()
        assert ((part >= 0) & (part < V)).all()


@pytest.mark.parametrize(
    "change", [dict(seed=3), dict(temperature=0.2), dict(top_k=1), dict(top_p=0.2), dict(min_p=0.9)]
)
def test_every_parameter_of_a_row_has_an_effect_on_it_alone(change):
    sampling = parameters(2, temperature=1.5, seed=[11, 12])
    logits = np.broadcast_to(LOGITS, (2, 200, V))
    positions = np.broadcast_to(np.arange(200, dtype=np.int32), (2, 200))
    before, _ = draw_two(sampling, [1, 2], logits, positions)
    (name, value) = next(iter(change.items()))
    changed = dataclasses.replace(sampling, **{name: getattr(sampling, name).at[2].set(value)})
    after, _ = draw_two(changed, [1, 2], logits, positions)
    assert (before[0] == after[0]).all() and (before[1] != after[1]).any()


@pytest.mark.parametrize(
    "filters", [dict(temperature=[0, 1], top_k=[0, 1]), dict(temperature=1, top_k=[1, 5], top_p=[1, 0.01])]
)
def test_exact_ties_go_to_the_lower_id(filters):
    logits = np.zeros((2, 200, V), np.float32)
    logits[:, :, [4, 7, 11]] = 2.5
    positions = np.broadcast_to(np.arange(200, dtype=np.int32), (2, 200))
    assert (draw_two(parameters(2, seed=[1, 2], **filters), [1, 2], logits, positions)[0] == 4).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_flagged_alone(bad):
    sampling, rows, logits, positions = mixed_batch()
    clean, _ = draw_batch(sampling, rows, logits, positions)
    broken = logits.copy()
    spoiled = np.zeros(positions.shape, bool)
    for row, place, token in ((0, 1, 0), (1, 2, V - 1), (2, 0, 5), (3, 0, V - 1)):  # greedy and sampled rows
        broken[row, place, token], spoiled[row, place] = bad, True
    broken[4, 1], spoiled[4, 1] = bad, True  # nothing but that
    tokens, finite = draw_batch(sampling, rows, broken, positions)
    assert (finite == ~spoiled).all()
    assert (tokens[~spoiled] == clean[~spoiled]).all()
    assert ((tokens >= 0) & (tokens < V)).all()


def test_types_and_the_idle_state():
    """A row that nobody has is greedy, and asks for nothing that would change or tell of its logits."""
    state = init_sampling(ROWS + 1)
    idle = {
        "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "prompt_len": 0, "stop_from": 0, "stop_token_ids": -1,
        "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "bias_ids": -1, "bias": 0, "bad_words": -1,
        "grammar": 0, "num_logprobs": -1, "num_prompt_logprobs": -1,
    }  # fmt: skip
    assert set(idle) == {field.name for field in dataclasses.fields(SamplingState)}
    for name, value in idle.items():
        column = np.asarray(getattr(state, name))
        assert column.shape == (ROWS + 1, *FIELDS[name].shape) and column.dtype == FIELDS[name].dtype, name
        assert (column == value).all(), name
    assert state.seed.dtype == jnp.uint32
    tokens, finite = draw_two(state, [0, 2], np.broadcast_to(LOGITS, (2, 200, V)), np.zeros((2, 200), np.int32))
    assert tokens.dtype == np.int32 and finite.dtype == bool
    assert (tokens == 1).all() and finite.all()


# --- how the parameters cross to the device ---------------------------------------------------------------------------

EDGES = {
    np.dtype(np.float32): [0.0, -0.0, 1.0, 0.1, -1e-30, 3.4e38, 1e-45, -3.4e38],
    np.dtype(np.int32): [0, -1, 1, 2**31 - 1, -(2**31), 7],
    np.dtype(np.uint32): [0, 1, 2**31 - 1, 2**31, 2**32 - 1],
}
"""Values at the ends of their types, and those whose bits are another type's NaN."""


def some(rng, shape, dtype):
    """A value of a field: one number, or a list as long as the field or shorter, of numbers or of such lists."""
    if not shape:
        return rng.choice(EDGES[np.dtype(dtype)])
    return [some(rng, shape[1:], dtype) for _ in range(rng.integers(0, shape[0] + 1))]


def whole(given, field):
    """What the field then holds."""
    column = np.full(field.shape, field.idle, field.dtype)
    if not field.shape:
        column[()] = given
    for i, value in enumerate(given if field.shape else ()):
        if len(field.shape) == 1:
            column[i] = value
        else:
            column[i, : len(value)] = value
    return column


def random_rows(rng, count):
    """Rows as a request gives them, each without some fields, and the columns they must become."""
    rows = [
        {name: some(rng, field.shape, field.dtype) for name, field in FIELDS.items() if rng.random() < 0.7}
        for _ in range(count)
    ]
    columns = {
        name: np.stack([whole(row[name], field) if name in row else np.full(field.shape, field.idle, field.dtype) for row in rows])
        for name, field in FIELDS.items()
    }  # fmt: skip
    return rows, columns


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_parameter_crosses_as_bits(count):
    """Of rows that give some fields or all, whole or short of their width: what arrives is what was given, to the bit, and idle elsewhere."""
    rng = np.random.default_rng(count)
    for _ in range(20):
        rows, columns = random_rows(rng, count)
        bits = row_sampling(rows)
        assert bits.dtype == np.int32 and bits.shape == (count, SAMPLING_COLUMNS)
        found = jax.jit(sampling_of)(bits)
        assert set(found) == set(columns) == set(FIELDS)
        for name, here in columns.items():
            there = np.asarray(found[name])
            assert there.dtype == here.dtype and there.shape == here.shape, name
            assert there.tobytes() == here.tobytes(), name


def test_a_row_that_gives_nothing_is_idle():
    found, state = sampling_of(jnp.asarray(row_sampling([{}, {}]))), init_sampling(2)
    for name, values in found.items():
        assert np.asarray(values).tobytes() == np.asarray(getattr(state, name)).tobytes(), name


def test_rows_do_not_share_a_word():
    """Each field of a row has words of its own, and each row its own line: one value changed changes the line of its row alone."""
    rng = np.random.default_rng(0)
    full = {
        name: np.full(field.shape, 3, field.dtype).tolist() if field.shape else field.dtype(3) for name, field in FIELDS.items()
    }  # fmt: skip
    before, seen = row_sampling([full, full]), np.zeros(SAMPLING_COLUMNS, int)
    for name, field in FIELDS.items():
        value = np.full(field.shape, 5, field.dtype)
        changed = row_sampling([full, {**full, name: value.tolist() if field.shape else field.dtype(5)}]) != before
        assert not changed[0].any() and changed[1].sum() == math.prod(field.shape), name
        seen += changed[1]
    assert (seen == 1).all()
    order = rng.permutation(5)
    rows, _ = random_rows(rng, 5)
    assert (row_sampling([rows[i] for i in order]) == row_sampling(rows)[order]).all()


def test_a_list_longer_than_its_field_is_refused():
    """It is never cut in silence: the shell has checked before how many there are."""
    for name, field in FIELDS.items():
        if field.shape:
            value = [0] * (field.shape[0] + 1) if len(field.shape) == 1 else [[0]] * (field.shape[0] + 1)
            with pytest.raises((ValueError, IndexError)):
                row_sampling([{name: value}])
    with pytest.raises(ValueError):
        row_sampling([{"bad_words": [[0] * (FIELDS["bad_words"].shape[1] + 1)]}])
