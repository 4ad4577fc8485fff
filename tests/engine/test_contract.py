"""What every worker promises, held against each: the order that its docstring draws, how far it writes, what it never reads, whom it does not hear."""

import dataclasses
import importlib
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import assert_idle, build, greedy, prompts_of, shadow_draft, slow_greedy, transformer
from engine.test_block_drafts import SPS, foreseeing, successors
from engine.test_frozen_kv import often_right
from engine.test_uno import random_lora

from jspec.models.tiny_block_draft import markov_block_draft
from jspec.models.tiny_draft import random_draft
from jspec.spec_workers import (
    EagleSizes,
    dflash,
    dspark,
    eagle,
    frozen_kv_mtp,
    multi_layer_eagle,
    ngram,
    ngram_corpus,
    plain,
    uno,
)

TREE = EagleSizes(num_steps=3, topk=2, num_draft_tokens=8)
WORKERS = {
    "dflash": lambda t: dflash(t, foreseeing(t, successors())),
    "dspark": lambda t: dspark(t, markov_block_draft(t, successors()), ragged_verify="compact", sps=SPS),
    "uno": lambda t: uno(t, random_lora(t)),
    "uno tree": lambda t: uno(t, random_lora(t), topk=3, num_draft_tokens=9),
    "frozen_kv_mtp": lambda t: frozen_kv_mtp(t, often_right(t), sizes=TREE),
    "plain": plain,
    "ngram": lambda t: ngram(t, num_draft_tokens=5),
    "ngram_corpus": lambda t: ngram_corpus(t, num_draft_tokens=5, documents=[range(60)] * 2, min_ngram=1),
    "eagle": lambda t: eagle(t, shadow_draft(t), sizes=TREE),
    "multi_layer_eagle": lambda t: multi_layer_eagle(t, random_draft(t, 3, kind="multi-layer")),
}
FAST = ("dflash", "dspark", "uno", "uno tree", "frozen_kv_mtp")  # the others have tests of their own
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in WORKERS]
TOKENS = 20


def drawn_step(name: str) -> str:
    """The line of a worker's docstring, or of what it is made by, that draws its step."""
    name = name.split()[0]
    module = importlib.import_module(f"jspec.spec_workers.{name}")
    texts = [inspect.getdoc(getattr(module, name)) or ""]
    if name in ("plain", "ngram"):
        texts.append(inspect.getdoc(importlib.import_module("jspec.spec_workers.chain").chain) or "")
    lines = [line for text in texts for line in text.splitlines() if "PUBLISH" in line and "->" in line]
    assert lines, "no line draws the step"
    return lines[0]


@pytest.mark.parametrize("name", WORKERS)
def test_the_order_of_programs_is_the_one_that_is_drawn(name):
    """What stands behind PUBLISH and is work is the second program; picking and stashing alone need none. A launch dispatches these, and no more."""
    worker = WORKERS[name](transformer())
    before, after = re.split(r"PUBLISH\s*(?:->|,)\s*", drawn_step(name))
    assert before.strip().startswith("resolve -> ")
    work = {part.strip() for part in re.split(r"->|,", after)} - {"stash", "select"}
    assert bool(work) == (worker.commit_phase is not None) == (worker.extend_commit is not None)


def pools(device):
    return [x for x in (device.kv_pages, device.draft_kv_pages) if not isinstance(x, tuple)]


@pytest.mark.parametrize("name", EACH)
def test_writes_stay_in_the_window_and_garbage_is_not_read(name):
    """Pages of one token, full of NaN: after every step all that changed lies within `alloc_len` of the frontier before it, or is the sink's; and the text
    is plain decoding's, alone and in company, with the same accept lengths."""
    worker = WORKERS[name](transformer())
    engine = build(transformer(), worker=worker, page_size=1, max_running=4, overlap=False, prefix_cache=False)
    device = engine._loop.device
    poisoned = {
        part: jnp.full_like(getattr(device, part), jnp.nan)
        for part in ("kv_pages", "draft_kv_pages")
        if not isinstance(getattr(device, part), tuple)
    }
    # Page 0 is the sink: what padding writes there is read by nobody.
    engine._loop = dataclasses.replace(engine._loop, device=dataclasses.replace(device, **poisoned))
    prompt = prompts_of(1, seed=4, shortest=9, longest=9)[0]
    engine.submit(prompt, greedy(TOKENS), rid="one")
    outputs, steps = {}, 0
    while engine.has_work:
        table = np.asarray(engine.state.ledger.page_table[1])
        frontier = int(np.asarray(engine._loop.device.future.new_seq_lens)[1])
        old = jax.device_get(pools(engine._loop.device))
        running = bool(engine.state.requests.serial[1])
        for emission in engine.step():
            if emission.output is not None:
                outputs[emission.rid] = emission.output
        if not running or not engine.state.requests.serial[1]:
            continue
        table = np.asarray(engine._loop.device.page_table)[1]
        position = {int(page): place for place, page in enumerate(table) if page}
        for before, after in zip(old, jax.device_get(pools(engine._loop.device)), strict=True):
            same = np.all((before == after) | (np.isnan(before) & np.isnan(after)), axis=(0, 2, 3, 4))
            touched = [position[int(page)] for page in np.nonzero(~same)[0] if page]
            assert touched and min(touched) >= frontier and max(touched) < frontier + worker.alloc_len, touched
        steps += 1
    assert steps >= 3 and outputs["one"].token_ids == slow_greedy(transformer(), prompt, TOKENS)

    together = engine.generate([prompt, *prompts_of(3, seed=9)], greedy(TOKENS))
    assert together[0].token_ids == outputs["one"].token_ids
    if name not in ("dspark", "ngram_corpus"):  # rows share a budget there, or know what others said
        assert together[0].accept_lens == outputs["one"].accept_lens
    assert_idle(engine)
