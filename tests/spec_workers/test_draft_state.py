"""The draft's state: after any number of verifies it is what a fresh prefill of the same tokens leaves (B18, B20)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import VOCAB, build, prompts_of, transformer
from engine.test_frozen_kv import often_right

from jspec import SamplingParams
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers.eagle import eagle
from jspec.spec_workers.eagle_sizes import EagleSizes
from jspec.spec_workers.frozen_kv_mtp import frozen_kv_mtp
from jspec.spec_workers.multi_layer_eagle import multi_layer_eagle

HOT = tuple(range(1, VOCAB, 2))  # half of the vocabulary
SIZES = {
    "chain": EagleSizes(num_steps=3),
    "tree": EagleSizes(num_steps=3, topk=3, num_draft_tokens=8),
    "narrow tree": EagleSizes(num_steps=4, topk=2, num_draft_tokens=3),
}


@functools.cache
def draft(kind: str, token_ids=None, **options):
    return random_draft(transformer(), 1, kind=kind, token_ids=token_ids, **options)


def engine_of(worker, **settings):
    """An engine whose every prompt is computed whole."""
    return build(transformer(), worker=worker, overlap=False, prefix_cache=False, **settings)


def carries(engine, prompts, *, num_tokens: int):
    """{(prompt index, frontier): carry} after every settled step, and the outputs, of requests that run together."""
    rids = [engine.submit(p, SamplingParams(max_new_tokens=num_tokens)) for p in prompts]
    texts = {rid: list(p) for rid, p in zip(rids, prompts, strict=True)}
    seen = {}
    while engine.has_work:
        emissions = list(engine.step())
        future = jax.device_get(engine._loop.device.future)
        for emission in emissions:
            texts[emission.rid] += emission.token_ids
            if emission.output is None:
                (contents,) = engine._contents
                row = contents.get(contents.serials(emission.rid)[0]).row
                frontier = int(future.new_seq_lens[row])
                assert frontier == len(texts[emission.rid]) - 1
                seen[rids.index(emission.rid), frontier] = jax.tree.map(lambda x, row=row: x[row], future.carry)
    return seen, [texts[rid] for rid in rids]


CASES = [("eagle3", "chain", 1), ("eagle3", "tree", 16), ("eagle", "tree", 1), ("eagle3", "narrow tree", 1)]
EVERY = [(kind, shape, page) for kind in ("eagle3", "eagle") for shape in SIZES for page in (1, 16)]


@pytest.mark.parametrize(
    ("kind", "shape", "page_size"),
    [pytest.param(*case, marks=() if case in CASES else pytest.mark.slow) for case in EVERY],
)
def test_after_verifies_the_carry_is_that_of_a_prefill(kind, shape, page_size):
    hot = HOT if kind == "eagle3" else None
    engine = engine_of(eagle(transformer(), draft(kind, hot), sizes=SIZES[shape]), page_size=page_size)
    prompts = prompts_of(3, seed=3, longest=20)
    seen, texts = carries(engine, prompts, num_tokens=14)
    assert len(seen) >= 3 * 8
    some = [key for i, key in enumerate(sorted(seen)) if i % 5 == 4]
    fresh, _ = carries(engine, [texts[i][:frontier] for i, frontier in some], num_tokens=2)
    for place, (i, frontier) in enumerate(some):
        ours, theirs = seen[i, frontier], fresh[place, frontier]
        assert ours.bonus == theirs.bonus == texts[i][frontier]
        np.testing.assert_array_equal(ours.topk_ids, theirs.topk_ids)
        np.testing.assert_allclose(ours.hidden, theirs.hidden, atol=2e-4)
        np.testing.assert_allclose(ours.topk_probs, theirs.topk_probs, atol=1e-4)


@pytest.mark.parametrize("chained", [False, True])
def test_the_first_module_is_never_stale(chained):
    engine = engine_of(multi_layer_eagle(transformer(), draft("multi-layer", chained=chained)))
    prompts = prompts_of(3, seed=4, longest=20)
    seen, texts = carries(engine, prompts, num_tokens=14)
    some = [key for i, key in enumerate(sorted(seen)) if i % 5 == 4]
    fresh, _ = carries(engine, [texts[i][:frontier] for i, frontier in some], num_tokens=2)
    for place, (i, frontier) in enumerate(some):
        assert seen[i, frontier].drafts[0] == fresh[place, frontier].drafts[0]


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.slow)])
def test_an_assistant_starts_from_what_a_prefill_would_leave(shape):
    """FROZEN_KV_MTP carries the target's hidden state at the last accepted token, and no other."""
    engine = engine_of(frozen_kv_mtp(transformer(), often_right(transformer()), sizes=SIZES[shape]))
    prompts = prompts_of(3, seed=3, longest=20)
    seen, texts = carries(engine, prompts, num_tokens=14)
    assert 3 * 3 <= len(seen) < 3 * 13, "no draft was accepted"
    fresh, _ = carries(engine, [texts[i][:frontier] for i, frontier in seen], num_tokens=2)
    for place, (i, frontier) in enumerate(seen):
        ours, theirs = seen[i, frontier], fresh[place, frontier]
        assert ours.bonus == theirs.bonus == texts[i][frontier]
        np.testing.assert_allclose(ours.hidden, theirs.hidden, atol=2e-4)


def test_drafts_do_not_depend_on_neighbours():
    """B20: the same carry alone and among others, at every frontier."""
    engine = engine_of(eagle(transformer(), draft("eagle3", HOT), sizes=SIZES["tree"]))
    prompts = prompts_of(4, seed=5, longest=20)
    together, _ = carries(engine, prompts, num_tokens=10)
    for i, prompt in enumerate(prompts):
        alone, _ = carries(engine, [prompt], num_tokens=10)
        for (_, frontier), carry in alone.items():
            np.testing.assert_array_equal(carry.topk_ids, together[i, frontier].topk_ids)
            np.testing.assert_allclose(carry.hidden, together[i, frontier].hidden, atol=2e-4)


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_nan_in_every_slot_that_must_not_be_read(page_size):
    """B67: pools full of NaN change nothing: not the text, not one proposal."""
    prompts = prompts_of(3, seed=6, longest=20)
    for shape in (SIZES["chain"], SIZES["tree"]):
        engine = engine_of(eagle(transformer(), draft("eagle3", HOT), sizes=shape), page_size=page_size)
        clean, texts = carries(engine, prompts, num_tokens=10)
        device = engine._loop.device
        poison = [jnp.full_like(pool, jnp.nan) for pool in (device.kv_pages, device.draft_kv_pages)]
        device = dataclasses.replace(device, kv_pages=poison[0], draft_kv_pages=poison[1])
        engine._loop = dataclasses.replace(engine._loop, device=device)
        dirty, dirty_texts = carries(engine, prompts, num_tokens=10)
        assert dirty_texts == texts
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)
