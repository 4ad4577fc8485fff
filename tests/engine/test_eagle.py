"""EAGLE under overlap: chains, trees and several modules say what plain decoding says, whatever the draft."""

import jax
import numpy as np
import pytest
from engine.kit import (
    CONTEXT,
    VOCAB,
    assert_idle,
    assert_known_lens,
    build,
    greedy,
    markov,
    markov_continuation,
    markov_table,
    mixed_params,
    oracle_accept_lens,
    prompts_of,
    shadow_draft,
    transformer,
    transformer_continuation,
    wrong_tokens,
)

from jspec import SamplingParams
from jspec.models.tiny import bigram_target, markov_target
from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle

TOKENS = 24
SHAPES = {
    "chain": EagleSizes(num_steps=4),
    "deep chain": EagleSizes(num_steps=9),
    "chain while sure": EagleSizes(num_steps=4, min_draft_prob=0.5),
    "tree": EagleSizes(num_steps=3, topk=2, num_draft_tokens=8),
    "wide tree": EagleSizes(num_steps=4, topk=4, num_draft_tokens=16),
    "thin tree": EagleSizes(num_steps=5, topk=3, num_draft_tokens=4),
}
FAST = [("chain", 1, True), ("chain", 16, False), ("tree", 4, True), ("tree", 64, False), ("wide tree", 1, True)]
FAST += [("chain while sure", 4, True)]
SLOW = [(shape, page, overlap) for shape in SHAPES for page in (1, 4, 16, 64) for overlap in (True, False)]
SCHEDULES = [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in SLOW]


def assert_greedy(engine, counts=(1, 3, 8), *, seed=0, length=TOKENS):
    for count in counts:
        prompts = prompts_of(count, seed=seed + count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(length)), strict=True):
            assert output.token_ids == transformer_continuation(tuple(prompt), length)
            assert len(output.token_ids) == 1 + sum(output.accept_lens)
        assert_idle(engine)


@pytest.mark.parametrize(("shape", "page_size", "overlap"), SCHEDULES)
def test_greedy_equals_full_recompute(shape, page_size, overlap):
    """Batches of 1, 3 and 8, with a draft that is often right and sometimes wrong and depends on all of its KV (B13, B14, B17)."""
    worker = eagle(transformer(), shadow_draft(transformer()), sizes=SHAPES[shape])
    engine = build(transformer(), worker=worker, page_size=page_size, overlap=overlap, max_running=8)
    assert_greedy(engine)
    summary = engine.summary()
    assert summary.accept_length > 1.5, "the draft was hardly ever right: the test shows little"
    assert summary.accept_length < worker.output_stride, "the draft was never wrong"
    assert summary.compiles_after_warmup == 0


def test_a_chain_ends_where_the_draft_is_unsure():
    """A higher bar: shorter accepted runs, more of those accepted that are proposed; over the bar of 1 nothing is proposed; always the same tokens."""
    lengths = []
    for bar in (0.0, 0.5, 1.0):
        sizes = EagleSizes(num_steps=3, min_draft_prob=bar)
        engine = build(
            transformer(), worker=eagle(transformer(), shadow_draft(transformer()), sizes=sizes), max_running=8
        )
        assert_greedy(engine, (1, 3))
        lengths.append(engine.summary().accept_length)
    assert lengths[0] > lengths[1] > lengths[2] == 1.0


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
@pytest.mark.parametrize("topk", [1, 3])
def test_hostile_drafts_change_nothing(kind, topk):
    """A random draft is wrong nearly always."""
    sizes = EagleSizes(num_steps=3, topk=topk)
    engine = build(transformer(), worker=eagle(transformer(), random_draft(transformer(), 7, kind=kind), sizes=sizes))
    assert_greedy(engine, (3,))


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_draft_of_nan_changes_nothing(kind):
    draft = random_draft(transformer(), 7, kind=kind)
    own = jax.tree.map(lambda x: x * np.nan, draft.params["own"])
    for topk in (1, 2):
        worker = eagle(
            transformer(),
            draft._replace(params={**draft.params, "own": own}),
            sizes=EagleSizes(num_steps=3, topk=topk),
        )
        assert_greedy(build(transformer(), worker=worker), (3,))


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("page_size", "overlap"), [(1, True), (16, False)])
def test_several_modules_equal_full_recompute(chained, page_size, overlap):
    draft = random_draft(transformer(), 3, kind="multi-layer", chained=chained)
    worker = multi_layer_eagle(transformer(), draft)
    assert_greedy(build(transformer(), worker=worker, page_size=page_size, overlap=overlap, max_running=8), (3, 8))


def known_worker(algorithm: str, wrong=()):
    """Drafts of M1 whose accept lengths are known in advance, up to 4 drafts deep."""
    if algorithm == "multi-layer":
        draft = markov_draft(markov(), markov_table(), kind="multi-layer", num_modules=4, wrong_after=wrong)
        return multi_layer_eagle(markov(), draft)
    draft = markov_draft(markov(), markov_table(), kind=algorithm, wrong_after=wrong)
    return eagle(markov(), draft, sizes=EagleSizes(num_steps=4))


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle", "multi-layer"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_known_accept_lengths(algorithm, overlap):
    """Drafts all right, all wrong, mixed, and all of these in one batch: the accept length of every verify as computed by hand."""
    assert_known_lens(known_worker(algorithm, wrong_tokens()), oracle_accept_lens, overlap=overlap)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_accepted_path_may_be_any_branch(rank, page_size):
    """B14: the right token is the first, a middle or the last child; batches of 1 and 5; what is accepted is moved into place and read again."""
    sizes = EagleSizes(num_steps=3, topk=4, num_draft_tokens=16)
    worker = eagle(markov(), markov_draft(markov(), markov_table(), rank=rank), sizes=sizes)
    engine = build(markov(), worker=worker, page_size=page_size, max_running=8)
    for count in (1, 5):
        prompts = prompts_of(count, seed=count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
            assert output.token_ids == markov_continuation(prompt[-1], TOKENS)
            assert min(output.accept_lens[:-1]) >= 2, "the level below the root holds the right token"
    assert_idle(engine)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_draft_vocabulary_of_scattered_ids(rank):
    """B59: the draft knows a third of the tokens; it is right wherever the true token is among them, and the text is the target's."""
    hot = tuple(range(0, VOCAB, 3))
    sizes = EagleSizes(num_steps=3, topk=rank)
    worker = eagle(markov(), markov_draft(markov(), markov_table(), token_ids=hot), sizes=sizes)
    engine = build(markov(), worker=worker)
    prompts = prompts_of(4, seed=9)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
        text = markov_continuation(prompt[-1], TOKENS)
        assert output.token_ids == text
        place = 0
        for accepted in output.accept_lens[:-1]:
            place += accepted
            foreseen = next((i for i in range(3) if text[place - accepted + 1 + i] not in hot), 3)
            assert accepted == 1 + foreseen


@pytest.mark.parametrize("algorithm", ["eagle3", "multi-layer"])
def test_near_the_end_of_the_drafts_context_decoding_goes_on(algorithm):
    """A draft made for 40 tokens beside a target made for 128: it drafts up to there, and the request runs to its end."""
    options = {"kind": algorithm, "context_len": 40}
    draft = markov_draft(markov(), markov_table(), **options)
    make = multi_layer_eagle if algorithm == "multi-layer" else eagle
    engine = build(markov(), worker=make(markov(), draft))
    output = engine.generate([[1, 2, 3], [4] * 60], greedy(60))
    assert output[0].token_ids == markov_continuation(3, 60) and output[1].token_ids == markov_continuation(4, 60)
    assert set(output[1].accept_lens) == {1}
    first = output[0].accept_lens
    assert first[0] > 1 and set(first[-15:]) == {1}


def test_the_context_can_be_filled_to_its_end():
    worker = known_worker("eagle3")
    engine = build(markov(), worker=worker)
    output = engine.generate([[1] * (CONTEXT - 30)], greedy(60))[0]
    assert output.finish_reason == "length" and output.token_ids == markov_continuation(1, 30)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 8])
def test_more_steps_never_accept_less(num_steps):
    """B13: prompts around the page boundary; every depth accepts its whole chain."""
    worker = eagle(markov(), markov_draft(markov(), markov_table()), sizes=EagleSizes(num_steps=num_steps))
    engine = build(markov(), worker=worker, page_size=16)
    prompts = [[5] * length for length in (15, 16, 17, 31, 32, 33)]
    for output in engine.generate(prompts, greedy(TOKENS)):
        assert output.token_ids == markov_continuation(5, TOKENS)
        assert set(output.accept_lens[:-1]) <= {num_steps + 1}


def test_acceptance_does_not_fade():
    """B18: 300 tokens of a cycle, the draft wrong after every third: every accept length as computed by hand, to the end."""
    table, wrong, tokens = [*((token + 1) % 20 for token in range(20)), *range(20, VOCAB)], range(0, 20, 3), 300
    target = markov_target(table, num_layers=1, context_len=320)
    worker = eagle(target, markov_draft(target, table, wrong_after=wrong))
    output = build(target, worker=worker, max_running=1, page_size=64).generate([[0]], greedy(tokens))[0]
    text = [(token + 1) % 20 for token in range(tokens + 5)]
    assert output.token_ids == text[:tokens]
    lens, emitted = [], 1
    while emitted < tokens:
        run = next((n for n in range(1, 5) if text[emitted + n - 2] in wrong), 5)
        lens.append(min(run, tokens - emitted))
        emitted += run
    assert output.accept_lens == lens and len(set(lens)) > 2


MIXED = mixed_params(TOKENS)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_equals_solo_plain_decoding(shape):
    """B31, B33, B35, B39, B41: greedy and differently sampled requests in one batch, in several rotations, rows leaving early: each keeps its parameters,
    and its seed fixes its tokens, which are those of plain decoding."""
    prompts = prompts_of(len(MIXED), seed=5, shortest=4)
    engine = build(transformer(), "plain", overlap=False, page_size=1, max_running=1)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(prompts, MIXED, strict=True)]
    worker = eagle(transformer(), shadow_draft(transformer()), sizes=SHAPES[shape])
    engine = build(transformer(), worker=worker, max_running=8)
    for shift in (0, 2, 5):
        order = [(i + shift) % len(MIXED) for i in range(len(MIXED))]
        outputs = engine.generate([prompts[i] for i in order], [MIXED[i] for i in order])
        assert [o.token_ids for o in outputs] == [alone[i] for i in order]
    assert engine.summary().accept_length > 1.2
    assert_idle(engine)


def test_rejection_sampling_leaves_greedy_rows_alone():
    """Greedy rows of a batch with sampled ones; seeds fix the sampled ones whatever runs beside them (B35, B39, B41)."""
    prompts = prompts_of(len(MIXED), seed=5, shortest=4)
    worker = eagle(transformer(), shadow_draft(transformer()), sizes=SHAPES["chain"], rejection_sampling=True)
    engine = build(transformer(), worker=worker, max_running=8)
    together = [o.token_ids for o in engine.generate(prompts, MIXED)]
    for i in (0, 2):
        assert together[i] == transformer_continuation(tuple(prompts[i])), "temperature 0 and top_k=1 are greedy"
    for i in (1, 3, 4):
        assert engine.generate([prompts[i]], MIXED[i])[0].token_ids == together[i]
    first = engine.generate([prompts[1]], SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=12))[0]
    assert first.token_ids != together[1], "another seed"
    assert_idle(engine)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_lossy_threshold_accepts_more_says_so_and_leaves_greedy_rows_alone(shape):
    prompts = prompts_of(6, seed=3)
    hot = [SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=seed) for seed in range(3)]
    params, accept = [*hot, *[greedy(TOKENS)] * 3], {}
    for threshold in (1.0, 0.02):
        draft = shadow_draft(transformer())
        worker = eagle(transformer(), draft, sizes=SHAPES[shape], lossy_threshold=threshold)
        engine = build(transformer(), worker=worker, max_running=8)
        outputs = engine.generate(prompts, params)
        assert [o.lossy for o in outputs] == [threshold < 1] * 3 + [False] * 3
        assert [o.token_ids for o in outputs[3:]] == [transformer_continuation(tuple(prompt)) for prompt in prompts[3:]]
        accept[threshold] = np.mean([n for o in outputs[:3] for n in o.accept_lens])
        assert_idle(engine)
    assert accept[0.02] > accept[1.0] + 0.2


@pytest.mark.parametrize("rejection", [True, False], ids=["rejection", "match"])
def test_sampled_requests_join_and_leave_greedy_ones(rejection):
    """B41: the drafts of the steps before were made for a batch that was all greedy, and the other way round."""
    worker = eagle(transformer(), shadow_draft(transformer()), sizes=SHAPES["chain"], rejection_sampling=rejection)
    engine = build(transformer(), worker=worker, max_running=8)
    prompts = prompts_of(8, seed=11)
    hot = [SamplingParams(max_new_tokens=12, temperature=0.8, seed=seed) for seed in range(8)]
    alone = [engine.generate([prompts[i]], hot[i])[0].token_ids for i in range(4, 8)]
    outputs = {}

    def run(steps):
        for _ in range(steps):
            for emission in engine.step():
                if emission.output is not None:
                    outputs[emission.rid] = emission.output.token_ids

    for i in range(4):
        engine.submit(prompts[i], greedy(TOKENS), rid=str(i))
    run(3)
    for i in range(4, 8):
        engine.submit(prompts[i], hot[i], rid=str(i))
        run(1)
    engine.abort("2")
    run(200)
    assert [outputs[str(i)] for i in range(4, 8)] == alone
    assert [outputs[str(i)] for i in (0, 1, 3)] == [transformer_continuation(tuple(prompts[i])) for i in (0, 1, 3)]
    assert_idle(engine)


def test_exact_ties_go_to_the_lower_id():
    """B35: two tokens that tie exactly; greedy requests take the lower one, alone or beside sampled ones, whatever their filters say."""
    table = np.zeros((VOCAB, VOCAB), np.float32)
    table[:, [9, 4]] = 5.0
    target = bigram_target(table, num_layers=1, context_len=CONTEXT)
    for topk in (1, 3):
        worker = eagle(target, random_draft(target, 0), sizes=EagleSizes(num_steps=3, topk=topk))
        engine = build(target, worker=worker, max_running=8)
        params = [greedy(TOKENS), SamplingParams(max_new_tokens=TOKENS, top_p=0.9)]
        params += [SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=seed) for seed in range(6)]
        outputs = engine.generate([[1, 2]] * 8, params)
        assert [set(o.token_ids) for o in outputs[:2]] == [{4}, {4}]
        assert {9, 4} <= set().union(*(o.token_ids for o in outputs[2:]))
