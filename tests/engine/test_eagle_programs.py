"""What an EAGLE iteration costs, counted: dispatches, traffic, copies, compilations; and depth that adapts."""

import numpy as np
import pytest
from engine.kit import (
    ACCEPT,
    assert_idle,
    build,
    greedy,
    markov,
    markov_continuation,
    markov_table,
    prompts_of,
    transformer,
    wrong_tokens,
)

from jspec.bench.host_probe import counted_traffic
from jspec.models.tiny_draft import markov_draft, random_draft
from jspec.scheduler import Depth, DepthRules, initial_depths, observe
from jspec.spec_workers import EagleSizes, eagle, multi_layer_eagle

SIZES = {"chain": EagleSizes(num_steps=3), "tree": EagleSizes(num_steps=3, topk=2, num_draft_tokens=6)}


def worker_of(shape: str, **options):
    if shape == "multi-layer":
        return multi_layer_eagle(transformer(), random_draft(transformer(), 3, kind="multi-layer"), **options)
    return eagle(transformer(), random_draft(transformer(), 3), sizes=SIZES[shape], **options)


@pytest.mark.parametrize("shape", ["chain", "tree", "multi-layer"])
def test_two_dispatches_one_upload_one_download(shape):
    """Bytes are those of rows and runs, not of context or carry: what the draft leaves for the next step never visits the host."""
    worker = worker_of(shape)
    costs = {}
    for context_len in (64, 128):
        engine = build(transformer(), worker=worker, context_len=context_len, page_size=64, max_running=4)
        for prompt in prompts_of(4, seed=1):
            engine.submit(prompt[:20], greedy(20))
        with counted_traffic(engine) as traffic:
            while engine.has_work:
                engine.step()
        costs[context_len] = traffic.per_launch()
        assert engine.summary().compiles_after_warmup == 0
    assert costs[64] == costs[128]
    cost = costs[64]
    assert (cost["dispatches"], cost["uploads"], cost["downloads"]) == (2, 1, 1)
    assert cost["download_bytes"] == 4 * (3 + worker.output_stride) * 4


@pytest.mark.parametrize("shape", ["chain", "tree", "multi-layer"])
def test_pools_are_updated_in_place(shape):
    """No program copies a KV pool, the target's or the draft's: temporaries stay far below the smaller one."""
    engine = build(transformer(), worker=worker_of(shape), kv_tokens=200_000, max_running=2, context_len=64)
    device = engine._loop.device
    pools = (device.kv_pages.nbytes, device.draft_kv_pages.nbytes)
    for key, program in engine._programs._by_key.items():
        for compiled in (program.phase, program.commit):
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes >= sum(pools), key
            assert memory.temp_size_in_bytes < min(pools) / 8, key


def test_depth_follows_acceptance_without_compiling():
    """Right drafts go deep, wrong ones shallow; every switch finds its program built, and no token changes."""
    draft = markov_draft(markov(), markov_table(), wrong_after=wrong_tokens())
    worker = eagle(markov(), draft, sizes=EagleSizes(num_steps=5, depths=(1, 3, 5)))
    engine = build(markov(), worker=worker, adaptive_steps=((1, (1, 3, 5)),), max_running=1)
    ran_at = {}
    for level in ("all", "none", "all"):
        before = engine._loop.depths[0].depth
        token = ACCEPT[level][3]
        output = engine.generate([[token]], greedy(100))[0]
        assert output.token_ids == markov_continuation(token, 100)
        ran_at[level] = engine._loop.depths[0].depth
        assert before == {"all": ran_at.get("none", 5), "none": 5}[level]
    assert ran_at == {"all": 5, "none": 1}
    assert engine.summary().compiles_after_warmup == 0
    assert_idle(engine)


def test_depth_0_drafts_nothing_and_tries_again():
    draft = markov_draft(markov(), markov_table(), wrong_after=range(64))
    worker = eagle(markov(), draft, sizes=EagleSizes(num_steps=3, depths=(0, 1, 3)))
    engine = build(markov(), worker=worker, adaptive_steps=((1, (0, 1, 3)),), max_running=2)
    seen = set()
    engine.submit([7], greedy(90))
    while engine.has_work:
        engine.step()
        seen.add(engine._loop.depths[0].depth)
    assert seen == {0, 1, 3}
    output = engine.generate([[7]], greedy(20))[0]
    assert output.token_ids == markov_continuation(7, 20)


# --- the rule, alone ---------------------------------------------------------------------------------------------------

RULES = DepthRules(slots=((1, (1, 3, 5, 7)), (8, (0, 1, 3))))


def run(depths, accepted, *, batch_size=1, rules=RULES):
    """The depths after each of these means."""
    trail = []
    for mean in accepted:
        slot = 0 if batch_size < 8 else 1
        depths = observe(depths, rules, batch_size=batch_size, depth=depths[slot].depth, accepted=mean)
        trail.append(depths[slot].depth)
    return depths, trail


def test_the_start_is_a_candidate():
    assert [d.depth for d in initial_depths(RULES, 4)] == [3, 3]
    assert [d.depth for d in initial_depths(RULES, 7)] == [7, 3]
    assert initial_depths(RULES, 3)[0] == Depth(depth=3, accepted=3.0)


def test_decisions_wait_for_the_warm_up_and_come_at_intervals():
    _, trail = run((Depth(depth=1), Depth(depth=0)), [1.0] * 22)
    assert trail == [1] * 9 + [3] * 13, (
        "one decision at 10; from 3 on a mean of 1 neither rises above 2.5 nor falls to 0.25"
    )
    _, trail = run((Depth(depth=3, accepted=3.0), Depth(depth=0)), [3.0] * 20)
    assert trail == [3] * 9 + [5] * 11


def test_bounds_are_those_of_the_source():
    """Depth 3 falls to 1 at a mean of 1 - 0.5 - 0.25 and below, and rises above 2.5."""
    for mean, depth in ((0.24, 1), (0.26, 3), (2.49, 3), (2.51, 5)):
        settled = Depth(depth=3, accepted=mean, num_settled=9)
        assert observe((settled, settled), RULES, batch_size=1, depth=3, accepted=mean)[0].depth == depth


def test_a_step_at_another_depth_counts_but_decides_nothing():
    start = Depth(depth=3, accepted=0.0, num_settled=9)
    after = observe((start, start), RULES, batch_size=2, depth=1, accepted=0.0)
    assert after[0].depth == 3 and after[0].num_settled == 10 and after[1] is start


def test_batch_sizes_have_their_own_choice():
    start = (Depth(depth=3, accepted=3.0, num_settled=9), Depth(depth=1, accepted=1.0, num_settled=9))
    after, _ = run(start, [1.0], batch_size=8)
    assert after[0] is start[0] and after[1].depth == 3
    assert np.isclose(after[1].accepted, 1.0)
