"""DSpark's budget and layout: what is worth verifying, and whose."""

import itertools
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.spec_workers.dspark_budget import ALL, AdditiveSps, SpsTable, Sts, budget, load_sps, load_sts
from jspec.spec_workers.dspark_layout import survival, verify_lens

CHANCES = np.array([[0.9, 0.72, 0.5, 0.2], [0.6, 0.3, 0.12, 0.03]], np.float32)
STEP = AdditiveSps(
    bias_seconds=0.010, bs_probes=(1, 4), alpha_seconds=(0.0005, 0.002), m_probes=(0, 20), theta_seconds=(0.0, 0.008)
)


def test_a_budget_worked_out_by_hand():
    """Two rows of four drafts, a step of 10 ms, 0.5 ms a row and 0.4 ms a token: tokens a second for 0 to 8 drafts, and the best of them."""
    likely = np.sort(CHANCES.ravel())[::-1].astype(float)
    rates = [(2 + likely[:m].sum()) / (0.010 + 0.0005 * 2 + 0.0004 * (2 + m)) for m in range(9)]
    assert budget(CHANCES, STEP) == int(np.argmax(rates)) == 6
    lens = verify_lens(jnp.asarray(CHANCES), jnp.int32(6), jnp.full(2, 4))
    assert lens.tolist() == [5, 3]


def naive_lens(chances, amount, num_drafts):
    order = sorted(
        ((j, r) for r, row in enumerate(chances) for j in range(num_drafts[r]) if row[j] >= 1e-6),
        key=lambda at: (-chances[at[1]][at[0]], at[0], at[1]),
    )
    taken = order if amount < 0 else order[:amount]
    if amount < 0:
        return [1 + n for n in num_drafts]
    return [1 + sum(r == row for _, r in taken) for row in range(len(chances))]


def test_the_layout_takes_the_likeliest_fronts():
    """Against a sort in Python, with ties, rows of no drafts, and chances of zero."""
    rng, run = np.random.default_rng(0), jax.jit(verify_lens)
    for _ in range(200):
        falling = np.sort(rng.choice([0.0, 0.25, 0.5, 0.5, 0.75, 1.0], (4, 3)), axis=1)[:, ::-1].astype(np.float32)
        num_drafts, amount = rng.integers(0, 4, 4), int(rng.integers(-1, 14))
        found = run(jnp.asarray(falling), jnp.int32(amount), jnp.asarray(num_drafts))
        assert found.tolist() == naive_lens(falling.tolist(), amount, num_drafts.tolist())


def test_what_survives_falls_along_a_row():
    raw = jnp.asarray([[2.0, -1.0, jnp.nan, 5.0]])
    found = survival(raw, jnp.asarray([1.0, 2.0, 1.0, 1.0]))[0]
    first, second = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(found, [first, first * second, 0, 0], rtol=1e-6)


def test_a_table_is_read_at_the_probe_below():
    table = SpsTable(sample_batch_tokens=(2, 4, 8), sample_steps_per_sec=(100.0, 90.0, 30.0))
    assert table.steps_per_sec(1, np.array([1, 2, 3, 4, 7, 8, 100])).tolist() == [100, 100, 100, 90, 90, 30, 30]
    # 1 row: 2 tokens cost no more than 1; 4 tokens a tenth; 8 tokens more than they are worth.
    assert budget(np.array([[0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9]]), table) == 6
    assert budget(np.array([[0.9, 0.01, 0.01, 0, 0, 0, 0]]), table) == 2
    assert budget(np.zeros((1, 7)), table) == 0


def test_one_probe_says_nothing():
    assert budget(CHANCES, SpsTable(sample_batch_tokens=(2,), sample_steps_per_sec=(50.0,))) == ALL


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("nothing", ["not valid JSON"]),
        ([1], ["holds a list"]),
        ({"sample_batch_tokens": [1, 2]}, ["sample_steps_per_sec is missing", "jspec profile sps"]),
        ({"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}, ["sample_batch_tokens=[2, 1]", "sort"]),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1]}, ["1 values", "has 2"]),
        ({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1, 0]}, ["sample_steps_per_sec=[1, 0]", "positive"]),
        ({"sample_batch_tokens": "12", "sample_steps_per_sec": [1, 0]}, ["sample_batch_tokens='12'", "list"]),
        (
            {"bias_seconds": 0, "bs_probes": [1], "alpha_seconds": [0], "m_probes": [1], "theta_seconds": [0]},
            ["bias_seconds=0"],
        ),
        (
            {"bias_seconds": 1, "bs_probes": [1], "alpha_seconds": [-1], "m_probes": [1], "theta_seconds": [0]},
            ["alpha_seconds=[-1]", "negative"],
        ),
    ],
)
def test_a_bad_table_names_its_field(tmp_path, content, pieces):
    file = tmp_path / "sps.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError) as error:
        load_sps(file)
    assert all(piece in str(error.value) for piece in (str(file), *pieces)), str(error.value)


def test_tables_are_read_back(tmp_path):
    file = tmp_path / "sps.json"
    file.write_text(json.dumps({"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [5, 4], "machine": "some"}))
    assert load_sps(file) == SpsTable(sample_batch_tokens=(1, 2), sample_steps_per_sec=(5, 4))
    file.write_text(json.dumps({"temperatures": [1.0, 2.5]}))
    assert load_sts(file, num_drafts=2) == Sts(temperatures=(1.0, 2.5))
    with pytest.raises(ValueError, match="temperatures has 2 values, but the draft proposes 3"):
        load_sts(file, num_drafts=3)
    file.write_text(json.dumps({"temperatures": [1.0, 0]}))
    with pytest.raises(ValueError, match="must be positive"):
        load_sts(file, num_drafts=2)


def test_a_budget_that_knows_its_drafts_is_biased():
    """One draft of two tokens, drawn by halves against a target of 0.7 and 0.3, in exact fractions: tested always or never, the target's law; tested only if
    it is token 0, or only if it is token 1, another one. That is why the budget of a step must not come from the step's own drafts."""
    q, p = (Fraction(1, 2), Fraction(1, 2)), (Fraction(7, 10), Fraction(3, 10))

    def law(is_tested):
        out = [Fraction(0), Fraction(0)]
        for draft in (0, 1):
            if not is_tested(draft):
                for token in (0, 1):
                    out[token] += q[draft] * p[token]
                continue
            accept = min(Fraction(1), p[draft] / q[draft])
            out[draft] += q[draft] * accept
            rest = [max(Fraction(0), a - b) for a, b in zip(p, q, strict=True)]
            for token in (0, 1):
                out[token] += q[draft] * (1 - accept) * rest[token] / sum(rest)
        return tuple(out)

    assert law(lambda draft: True) == law(lambda draft: False) == p
    assert law(lambda draft: draft == 0) == (Fraction(17, 20), Fraction(3, 20))
    assert law(lambda draft: draft == 1) == (Fraction(11, 20), Fraction(9, 20))
    assert len({law(lambda d, s=s: s[d]) for s in itertools.product((True, False), repeat=2)}) == 3
