"""How two decodings are compared, and the figures a bench makes of its runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.bench.decode_compare import NEAR_TIE, first_difference, next_logits
from jspec.bench.decode_curve import verify_costs
from jspec.bench.decode_report import DecodeBench, measure_contender
from jspec.bench.decode_run import Run
from jspec.bench.tables import console, decode_tables
from jspec.engine.meters import Meters
from jspec.models.tiny import bigram_target, random_target

VOCAB = 8


def table(gap: float):
    """After token 3, token 5 leads token 6 by `gap`."""
    logits = np.zeros((VOCAB, VOCAB), np.float32)
    logits[3, 5], logits[3, 6] = 4.0, 4.0 - gap
    return logits


def test_next_logits_are_the_models():
    target = bigram_target(table(1.0))
    np.testing.assert_allclose(next_logits(target, [1, 2, 3], page_size=2), table(1.0)[3], atol=1e-5)


@pytest.mark.parametrize(("gap", "near_tie"), [(0.5, False), (5e-5, True)])
def test_a_difference_tells_its_gap(gap, near_tie):
    found = first_difference(bigram_target(table(gap)), 4, [1, 2], [7, 3, 5, 1], [7, 3, 6, 2])
    assert (found.prompt, found.position, found.plain_token, found.token) == (4, 2, 5, 6)
    assert found.logit_gap == pytest.approx(gap, abs=1e-5)
    assert found.near_tie is near_tie and (gap <= NEAR_TIE) is near_tie


def test_equal_and_cut_outputs():
    target = bigram_target(table(1.0))
    assert first_difference(target, 0, [1], [2, 3], [2, 3]) is None
    cut = first_difference(target, 0, [1], [2, 3], [2])
    assert (cut.position, cut.plain_token, cut.token, cut.logit_gap, cut.near_tie) == (1, 3, None, None, False)


def engine_run(tokens, accept_lens, decode_s):
    return Run(
        token_ids=tokens,
        accept_lens=accept_lens,
        prefill_s=0.1,
        decode_s=decode_s,
        compiles=0,
        summary=Meters().summary(),
    )


def bench_of(differences):
    plain = [engine_run([[1] * 9], [[1] * 8], 1.0), engine_run([[1] * 9], [[1] * 8], 1.0)]
    ngram = [engine_run([[1] * 9], [[4, 4]], 0.25), engine_run([[1] * 9], [[2] * 4], 0.75)]
    return DecodeBench(
        model="tiny",
        prompts=["bundled (2)"],
        max_new_tokens=9,
        batch=1,
        repeat=1,
        contenders=[
            measure_contender("plain", 0, plain, plain, []),
            measure_contender("ngram", 3, ngram, plain, differences),
        ],
        differences={"plain": [], "ngram": differences},
        verify_costs=[],
    )


def test_figures_of_a_contender():
    plain, ngram = bench_of([]).contenders
    assert plain.tokens_per_s == 8 and plain.speedup == plain.median_speedup == 1
    assert (ngram.tokens, ngram.verifies, ngram.accept_length) == (16, 6, 16 / 6)
    assert ngram.tokens_per_s == 16 and ngram.speedup == 2
    assert ngram.median_speedup == pytest.approx((4 + 4 / 3) / 2)
    assert ngram.step_ms == pytest.approx(1000 / 6)


def test_differences_are_printed_and_counted():
    target = bigram_target(table(5e-5))
    tie = first_difference(target, 0, [1], [3, 5], [3, 6])
    real = first_difference(target, 1, [1], [3, 5], [3, 1])
    for found, lossless, word in (
        ([], True, "yes"),
        ([tie], True, "1 by a near tie"),
        ([tie, real], False, "real difference"),
    ):
        bench = bench_of(found)
        assert bench.lossless is lossless
        out = console()
        with out.capture() as captured:
            out.print(decode_tables(bench))
        assert word in captured.get()


def test_verify_costs_are_relative_to_the_first():
    costs = verify_costs(random_target(0), batch=2, context=20, page_size=8, widths=(1, 4), rounds=2)
    assert [cost.width for cost in costs] == [1, 4]
    assert costs[0].relative == 1 and costs[1].relative == pytest.approx(costs[1].step_ms / costs[0].step_ms)
    assert jnp.isfinite(costs[0].step_ms)
