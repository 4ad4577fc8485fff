"""DFLASH and DSPARK under overlap: they say what plain decoding says, whatever the draft, and whatever is verified of it."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import laws
from engine.kit import (
    VOCAB,
    assert_idle,
    assert_known_lens,
    assert_schedules_change_nothing,
    build,
    greedy,
    markov,
    markov_table,
    mixed_params,
    oracle_accept_lens,
    prompts_of,
    transformer,
    transformer_continuation,
    wrong_tokens,
)

from jspec import SamplingParams
from jspec.models.tiny import bigram_target
from jspec.models.tiny_block_draft import markov_block_draft, random_block_draft
from jspec.spec_workers import dflash, dspark
from jspec.spec_workers.dspark_budget import SpsTable

TOKENS = 24
# A verify that becomes slower by the token: some of the drafts pay.
SPS = SpsTable(sample_batch_tokens=(1, 4, 6, 9, 12, 20, 40), sample_steps_per_sec=(100, 95, 85, 70, 60, 40, 15))
MODES = {"static": {}, "cap-accept": {"sps": SPS}, "compact": {"sps": SPS}}


@functools.cache
def successors() -> tuple[int, ...]:
    """The token that most often follows each one in what the transformer says: a draft that knows this is often right, and sometimes wrong."""
    counts = np.zeros((VOCAB, VOCAB), int)
    for prompt in (prompt for count in (1, 3, 8) for prompt in prompts_of(count, seed=count)):
        text = [prompt[-1], *transformer_continuation(tuple(prompt))]
        np.add.at(counts, (text[:-1], text[1:]), 1)
    return tuple(counts.argmax(axis=1).tolist())


def foreseeing(target, table, *, wrong_after=(), width: int = 5):
    """A "dflash" draft that runs its block as any, and then proposes what a table says follows the pending token."""
    draft = random_block_draft(target, 1, block_size=width)
    follows, wrong = jnp.asarray(table, jnp.int32), jnp.isin(jnp.arange(VOCAB), jnp.asarray(wrong_after, jnp.int32))

    def forward(params, token_ids, batch, kv_pages):
        _, kv_pages = draft.forward(params, token_ids, batch, kv_pages)
        token = token_ids.reshape(-1, width)[:, 0]
        rows = [jax.nn.one_hot(token, VOCAB)]
        for _ in range(width - 1):
            said = jnp.where(wrong[token], (follows[token] + 1) % VOCAB, follows[token])
            rows.append(jax.nn.one_hot(said, VOCAB))
            token = follows[token]
        return jnp.stack(rows, axis=1).reshape(-1, VOCAB), kv_pages

    return draft._replace(forward=forward, logits=lambda params, hidden: hidden)


def often_right(algorithm: str, mode: str = "static"):
    """A worker of the transformer."""
    if algorithm == "dflash":
        return dflash(transformer(), foreseeing(transformer(), successors()))
    draft = markov_block_draft(transformer(), successors(), sample_from_anchor=mode == "cap-accept")
    return dspark(transformer(), draft, ragged_verify=mode, **MODES[mode])


def assert_greedy(engine, counts=(1, 3, 8), *, seed=0, length=TOKENS):
    for count in counts:
        prompts = prompts_of(count, seed=seed + count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(length)), strict=True):
            assert output.token_ids == transformer_continuation(tuple(prompt), length)
            assert len(output.token_ids) == 1 + sum(output.accept_lens)
        assert_idle(engine)


FAST = [("dflash", "static", 1, True), ("dflash", "static", 16, False), ("dspark", "static", 64, True)]
FAST += [("dspark", "cap-accept", 4, False), ("dspark", "compact", 1, True), ("dspark", "compact", 16, True)]
ALL = [("dflash", "static", page, overlap) for page in (1, 4, 16, 64) for overlap in (True, False)]
ALL += [("dspark", mode, page, overlap) for mode in MODES for page in (1, 4, 16, 64) for overlap in (True, False)]


@pytest.mark.parametrize(
    ("algorithm", "mode", "page_size", "overlap"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in ALL],
)
def test_greedy_equals_full_recompute(algorithm, mode, page_size, overlap):
    """Batches of 1, 3 and 8 on a transformer whose output depends on every KV entry, with a draft that is often right and sometimes wrong."""
    engine = build(
        transformer(), worker=often_right(algorithm, mode), page_size=page_size, overlap=overlap, max_running=8
    )
    assert_greedy(engine)
    summary = engine.summary()
    assert 1.5 < summary.accept_length < engine.worker.output_stride, "always or never right: the test shows little"
    assert summary.compiles_after_warmup == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda t: dflash(t, random_block_draft(t, 7)),
        lambda t: dflash(t, random_block_draft(t, 7, num_layers=1, block_size=2, token_ids=tuple(range(1, VOCAB, 3)))),
        lambda t: dflash(t, random_block_draft(t, 7, block_size=32, window=40)),
        lambda t: dspark(t, random_block_draft(t, 7, kind="dspark", markov_head="gated", confidence=True), ragged_verify="compact", sps=SPS),
        lambda t: dspark(t, random_block_draft(t, 7, kind="dspark", markov_head="rnn", qk_norm=False, block_size=1)),
    ],
    ids=["dflash", "few tokens", "wide, windowed", "dspark gated", "dspark rnn"],
)  # fmt: skip
def test_hostile_drafts_change_nothing(make):
    """A random draft is wrong nearly always; near its context's end it drafts nothing."""
    engine = build(transformer(), worker=make(transformer()))
    assert_greedy(engine, (3,))


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_a_draft_of_nan_changes_nothing(algorithm):
    options = {"kind": "dspark", "confidence": True} if algorithm == "dspark" else {}
    draft = random_block_draft(transformer(), 7, **options)
    broken = draft._replace(params=draft.params | {"own": jax.tree.map(lambda x: x * np.nan, draft.params["own"])})
    if algorithm == "dspark":
        worker = dspark(transformer(), broken, ragged_verify="compact", sps=SPS)
    else:
        worker = dflash(transformer(), broken)
    assert_greedy(build(transformer(), worker=worker), (3,))


def known_worker(algorithm: str, wrong=()):
    """Drafts of M1 whose accept lengths are known in advance, up to 4 drafts deep."""
    if algorithm == "dflash":
        return dflash(markov(), foreseeing(markov(), markov_table(), wrong_after=wrong))
    return dspark(markov(), markov_block_draft(markov(), markov_table(), wrong_after=wrong))


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_known_accept_lengths(algorithm, overlap):
    """Drafts all right, all wrong, mixed, and all of these in one batch: the accept length of every verify as computed by hand."""
    assert_known_lens(known_worker(algorithm, wrong_tokens()), oracle_accept_lens, overlap=overlap)


def test_the_context_is_injected_as_a_prefill_would():
    """After decoding, the draft's pool holds at every accepted position what a prefill of the whole text puts there: the target's hidden states, at their own
    positions, in the place of the block's rows."""
    worker = often_right("dflash")
    text = [5, 6, 7, *transformer_continuation((5, 6, 7), 40)]

    def pool(prompt, tokens):
        engine = build(transformer(), worker=worker, page_size=4, max_running=1, prefix_cache=False)
        engine.generate([prompt], greedy(tokens))
        assert_idle(engine)
        pages = np.asarray(engine._loop.device.draft_kv_pages, np.float32)
        return pages, np.asarray(engine._loop.device.token_pages)

    decoded, tokens = pool([5, 6, 7], 40)
    whole, _ = pool(text[:-1], 1)
    # Pages are granted in the same order, so that of one request lie alike.
    length = len(text) - 1
    for position in range(length):
        page = 1 + position // 4
        assert tokens[page, position % 4] == text[position]
    first, last = 1, 1 + (length - 1) // 4
    same = np.isclose(decoded[:, first:last], whole[:, first:last], atol=1e-4)
    assert same.all(), f"{(~same).sum()} of {same.size} values differ"


def test_chunks_tails_retraction_and_prefix_hits_change_nothing():
    """Long prompts in chunks, running rows riding along, a pool too small for all, prompts with a common beginning."""
    for worker in (often_right("dflash"), often_right("dspark", "compact")):
        assert_schedules_change_nothing(worker)


MIXED = mixed_params(TOKENS)


def test_sampled_equals_solo_plain_decoding():
    """DFLASH without rejection sampling: greedy and differently sampled requests in one batch; a seed fixes the tokens, which are those of plain decoding."""
    prompts = prompts_of(len(MIXED), seed=5, shortest=4)
    engine = build(transformer(), "plain", overlap=False, page_size=1, max_running=1)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, MIXED, strict=True)]
    engine = build(transformer(), worker=often_right("dflash"), max_running=8)
    assert [o.token_ids for o in engine.generate(prompts, MIXED)] == alone
    assert_idle(engine)


def test_rejection_sampling_leaves_greedy_rows_alone():
    """DSPARK beside sampled rows; where everything is verified, seeds fix the sampled ones whatever runs beside them."""
    prompts = prompts_of(len(MIXED), seed=5, shortest=4)
    engine = build(transformer(), worker=often_right("dspark"), max_running=8)
    together = [o.token_ids for o in engine.generate(prompts, MIXED)]
    for i in (0, 2):
        assert together[i] == transformer_continuation(tuple(prompts[i])), "temperature 0 and top_k=1 are greedy"
    for i in (1, 3, 4):
        assert engine.generate([prompts[i]], MIXED[i])[0].token_ids == together[i]
    assert_idle(engine)


# --- sampled output has the target's law ----------------------------------------------------------------------------


def law_worker(target, kind: str):
    if kind == "dflash rejection":
        draft = random_block_draft(target, 2, num_heads=1, block_size=3)
        return dflash(target, draft, rejection_sampling=True)
    draft = random_block_draft(target, 3, kind="dspark", num_heads=1, block_size=3, confidence=True, markov_rank=laws.V)
    own = dict(draft.params["own"])
    # Sure after even tokens, unsure after odd ones: what is tested follows the drafts themselves as closely as it can.
    own["markov_in"] = jnp.eye(laws.V)
    own["confidence_head"] = jnp.asarray([[0.0] * laws.V + [3.0, -3.0] * (laws.V // 2)])
    draft = draft._replace(params=draft.params | {"own": own})
    mode = "static" if kind == "dspark" else "compact"
    table = SpsTable(sample_batch_tokens=(1, 80, 110, 140, 170, 400), sample_steps_per_sec=(100, 90, 70, 50, 40, 20))
    return dspark(target, draft, ragged_verify=mode, sps=None if kind == "dspark" else table)


def law_of(worker_kind: str, filters: str, draws: int = 20_000, tokens: int = laws.TOKENS):
    target = bigram_target(laws.TABLE, num_layers=1, num_heads=1, context_len=64)
    engine = build(target, worker=law_worker(target, worker_kind), max_running=64, checked=False, page_size=4)
    params = [SamplingParams(max_new_tokens=tokens, seed=s, **laws.FILTERS[filters]) for s in range(draws)]
    outputs = engine.generate([[1]] * draws, params)
    assert_idle(engine)
    return laws.distance([o.token_ids for o in outputs], laws.joint(1, laws.FILTERS[filters], tokens), draws)


@pytest.mark.parametrize(
    ("kind", "filters"),
    [
        ("dspark budgeted", "plain"),
        pytest.param("dspark", "top-k and top-p", marks=pytest.mark.slow),
        pytest.param("dspark budgeted", "min-p", marks=pytest.mark.slow),
        pytest.param("dflash rejection", "min-p", marks=pytest.mark.slow),
    ],
)
def test_the_joint_law_of_four_tokens(kind, filters):
    """20,000 requests, each its own seed, entering and leaving a batch of 64."""
    statistic, bound = law_of(kind, filters)
    assert statistic < bound, (statistic, bound)


def test_a_budget_made_of_this_steps_confidences_would_bias_the_output(monkeypatch):
    """The same worker with one change: each row, as if it were alone, makes its budget of the very drafts that it cuts. The law is another then."""

    def anticipating(chances, budget, num_drafts):
        del budget
        # All of its drafts if the last is likely, given the first: which tells what they are. None otherwise.
        return 1 + jnp.where(chances[:, -1] > chances[:, 0] / 2, num_drafts, 0)

    monkeypatch.setattr(sys.modules["jspec.spec_workers.dspark"], "verify_lens", anticipating)
    statistic, bound = law_of("dspark budgeted", "plain")
    assert statistic > 1.4 * bound, (statistic, bound)
