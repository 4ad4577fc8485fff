"""Targets with recurrent layers, under every worker: whatever is drafted, cut, moved or cached, a request says what it says without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kit import assert_idle, build, greedy, markov, slow_greedy
from engine.test_frozen_kv import random_assistant
from engine.test_scheduling import modes, run_staggered

from jspec import EngineConfig, SamplingParams
from jspec.engine.pool import num_kv_pages
from jspec.models.lora import Lora, LoraConfig, module_shapes
from jspec.models.tiny_block_draft import random_block_draft
from jspec.models.tiny_draft import random_draft
from jspec.models.tiny_hybrid import random_hybrid
from jspec.spec_workers import (
    EagleSizes,
    Proposal,
    chain,
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
from jspec.spec_workers.base import DeviceSizes
from jspec.spec_workers.upload import DECODE_COLUMNS, unpack_decode
from jspec.state import ForwardMode

VOCAB, CONTEXT, TOKENS = 16, 96, 24
KINDS = ("mamba2", "gated-delta")


@functools.cache
def hybrid(kind: str):
    """Of so few tokens that random drafts are right now and then."""
    return random_hybrid(0, kind, vocab_size=VOCAB, context_len=CONTEXT)


def prompts_of(count: int, seed: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


@functools.cache
def alone(kind: str, prompt: tuple[int, ...]) -> list[int]:
    return slow_greedy(hybrid(kind), list(prompt), TOKENS)


STEM = prompts_of(1, 3, 1)[0] * 5 + list(range(VOCAB)) + [3, 1, 4, 1, 5, 9]
PROMPTS = [*prompts_of(6, 1, 50), STEM, [*STEM, 7, 7, 2], [*STEM[:24], 1]]


def known(kind: str):
    """B63 (vllm issue 39273). A worker that knows what each prompt of `PROMPTS` leads to, and is wrong at a place that moves from step to step, or drafts
    nothing: runs of every length, between steps without drafts."""
    texts = np.zeros((len(PROMPTS), CONTEXT + 8), np.int32)
    for row, prompt in zip(texts, PROMPTS, strict=True):
        full = [*prompt, *alone(kind, tuple(prompt))]
        row[: len(full)] = full
    table, sizes = jnp.asarray(texts), jnp.asarray([len(p) for p in PROMPTS])

    def propose(history, lens) -> Proposal:
        place = jnp.arange(history.shape[1])
        width = min(history.shape[1], table.shape[1])
        differs = (history[:, None, :width] != table[None, :, :width]) & (place[:width] < lens[:, None, None])
        text = table[jnp.argmin(jnp.sum(differs, axis=-1) + 1000 * (lens[:, None] < sizes), axis=1)]
        at = jnp.minimum(lens[:, None] + jnp.arange(3), table.shape[1] - 1)
        drafts = jnp.take_along_axis(text, at, axis=1)
        wrong = jnp.arange(3) == (lens % 4)[:, None]  # at 3: nowhere
        return Proposal(jnp.where(wrong, (drafts + 1) % VOCAB, drafts), jnp.where(lens % 5 == 0, 0, 3))

    return chain("known", hybrid(kind), propose, verify_width=4, widths=(1, 4))


def random_adapter(target) -> Lora:
    """Of every matrix of every layer, those of recurrent layers too."""
    rng = np.random.default_rng(0)

    def low(matrix):
        (out, size), rank = matrix.shape, 2
        a, b = rng.standard_normal((rank, size)) / size**0.5, 0.3 * rng.standard_normal((out, rank))
        return {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32)}

    layers = {name: leaves for name, leaves in target.params.items() if name.startswith("layer_")}
    adapter = {layer: {name: low(matrix) for name, matrix in leaves.items()} for layer, leaves in layers.items()}
    assert {name for leaves in adapter.values() for name in leaves} == {"in", "out", "gate_up", "down"}
    return Lora(LoraConfig(rank=2, alpha=2.0, block_size=4), adapter)


SIZES = EagleSizes(num_steps=3)
TREE = EagleSizes(num_steps=3, topk=3, num_draft_tokens=10)
WORKERS = {
    "plain": lambda kind: plain(hybrid(kind)),
    "ngram": lambda kind: ngram(hybrid(kind), num_draft_tokens=5, min_ngram=1),
    "ngram-corpus": lambda kind: ngram_corpus(hybrid(kind), num_draft_tokens=5, min_ngram=1, max_ngram=2),
    "known": known,
    "chain": lambda kind: eagle(hybrid(kind), random_draft(hybrid(kind), 1), sizes=SIZES),
    "tree": lambda kind: eagle(hybrid(kind), random_draft(hybrid(kind), 1), sizes=TREE),
    "multi-layer": lambda kind: multi_layer_eagle(hybrid(kind), random_draft(hybrid(kind), 3, kind="multi-layer")),
    "dflash": lambda kind: dflash(hybrid(kind), random_block_draft(hybrid(kind), 1, kind="dflash")),
    "dspark": lambda kind: dspark(
        hybrid(kind),
        random_block_draft(hybrid(kind), 1, kind="dspark", markov_rank=4, confidence=True),
        ragged_verify="compact",
    ),
    "frozen-kv": lambda kind: frozen_kv_mtp(
        hybrid(kind), random_assistant(hybrid(kind), kv_layers=(1,), rotary_dim=8), sizes=TREE
    ),
    "uno": lambda kind: uno(hybrid(kind), random_adapter(hybrid(kind))),
    "uno tree": lambda kind: uno(hybrid(kind), random_adapter(hybrid(kind)), topk=3, num_draft_tokens=9),
}
FAST = {("mamba2", "known"), ("mamba2", "tree"), ("gated-delta", "known")}
EACH = [
    pytest.param(kind, name, True, marks=() if (kind, name) in FAST else pytest.mark.slow)
    for kind in KINDS
    for name in WORKERS
]
EACH += [pytest.param(kind, name, False, marks=pytest.mark.slow) for kind in KINDS for name in WORKERS]


@functools.cache
def engine_of(kind: str, name: str, overlap: bool = True):
    """One for all tests that leave it idle: chunks, tails, a page cache, and a pool that is promised several times."""
    return build(
        hybrid(kind), worker=WORKERS[name](kind), page_size=8, max_running=3, max_prefill_tokens=24, mixed_batches=True,
        kv_tokens=120, schedule_conservativeness=0.01, overlap=overlap,
    )  # fmt: skip


def moved(program, params, device, *others) -> bool:
    """Whether a program, which returns the device first, gives back another recurrent state than it was given."""
    traced = jax.make_jaxpr(program)(params, device, *others).jaxpr
    before = len(jax.tree.leaves(params)) + leaves_before_recurrent(device)
    after = leaves_before_recurrent(device)
    count = len(jax.tree.leaves(device.recurrent))
    return traced.invars[before : before + count] != traced.outvars[after : after + count]


def leaves_before_recurrent(device) -> int:
    paths = [path for path, _ in jax.tree.leaves_with_path(device)]
    return next(i for i, path in enumerate(paths) if path[0].name == "recurrent")


@functools.cache
def other_engine():
    """Of a target without recurrent layers."""
    return build(markov(), worker=plain(markov()))


@pytest.mark.parametrize(("kind", "name", "overlap"), EACH)
def test_greedy_equals_full_recompute(kind, name, overlap):
    """Chunks, tails, rows that are used again, retraction, prefixes of others, one row and three."""
    engine = engine_of(kind, name, overlap)
    seen = modes(engine)
    outputs = run_staggered(engine, PROMPTS, [greedy(TOKENS)] * len(PROMPTS))
    outputs += engine.generate(PROMPTS[::-1], greedy(TOKENS))[::-1]
    for prompt, output in zip(PROMPTS * 2, outputs, strict=True):
        assert output.token_ids == alone(kind, tuple(prompt))
    summary = engine.summary()
    assert {ForwardMode.MIXED, ForwardMode.EXTEND, ForwardMode.DECODE} <= set(seen)
    assert sum(output.retractions for output in outputs) > 0 and sum(o.cached_tokens > 0 for o in outputs) >= 3
    assert summary.compiles_after_warmup == 0
    lens = [n for output in outputs for n in output.accept_lens]
    assert name == "plain" or len(set(lens)) > 1, "drafts were all wrong: the test shows little"
    assert name != "known" or set(lens) == {1, 2, 3, 4}
    assert_idle(engine)
    sink = jax.tree.map(lambda x: np.asarray(x[:, 0]), engine._loop.device.recurrent.rows)
    assert not any(x.any() for x in jax.tree.leaves(sink)), "padding wrote to row 0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "tree"])
def test_sampled_tokens_are_those_of_plain_decoding(name):
    """With a seed each, in company and alone."""
    prompts = prompts_of(5, 2, 20)
    params = [SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=i) for i in range(5)]
    solo, engine = engine_of("mamba2", "plain"), engine_of("mamba2", name)
    want = [solo.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in engine.generate(prompts, params)] == want


@pytest.mark.slow
def test_a_prefix_is_taken_up_where_a_page_ends():
    """From pages of a prompt, and from pages that an answer filled by accepted runs of every length."""
    given = {"page_size": 8, "max_running": 1, "max_prefill_tokens": 24}
    cold = build(hybrid("gated-delta"), worker=WORKERS["known"]("gated-delta"), prefix_cache=False, **given)
    warm = engine_of("gated-delta", "known")
    assert cold._loop.device.recurrent.pages == ()
    for prompt in (STEM, PROMPTS[0]):
        for asked, cached in ((prompt, 0), ([*prompt, *alone("gated-delta", tuple(prompt))[:12], 3], len(prompt) + 11)):
            want, got = (engine.generate([asked], greedy(12))[0] for engine in (cold, warm))
            assert (got.token_ids, got.accept_lens) == (want.token_ids, want.accept_lens)
            assert got.cached_tokens >= cached // 8 * 8 and want.cached_tokens == 0
    assert_idle(warm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "known", "tree"])
def test_no_row_pays_for_padding(kind, name):
    """B64 (vllm PRs 55178, 53505, tpu-inference PR 2752): batches of 1 to 9 rows against buckets of 1, 4 and 9; tails of one prompt token beside verifies, of
    prompts that are cached but for it; and frontiers on the end of a page."""
    engine = build(
        hybrid(kind), worker=WORKERS[name](kind), page_size=4, max_running=9, batch_buckets=(1, 4, 9),
        max_prefill_tokens=24, mixed_batches=True,
    )  # fmt: skip
    for count in range(1, 10):
        outputs = engine.generate(PROMPTS[:count], greedy(TOKENS))
        assert [output.token_ids for output in outputs] == [alone(kind, tuple(p)) for p in PROMPTS[:count]]
    stem = PROMPTS[6][:16]
    seen = modes(engine)
    for length in (
        16,
        12,
        8,
    ):  # cached up to the end of a page (or the page before, of what the draft looks ahead), and one token more
        prompts = [[*stem[:length], token] for token in range(9)]
        outputs = run_staggered(engine, prompts, [greedy(TOKENS)] * 9)
        assert [output.token_ids for output in outputs] == [alone(kind, tuple(p)) for p in prompts]
        assert sum(output.cached_tokens >= length - 4 for output in outputs) >= 6
    assert ForwardMode.MIXED in seen
    assert_idle(engine)


def test_memory_counts_rows_verified_tokens_and_pages():
    target = hybrid("mamba2")
    facts = target.facts
    assert facts.kv_bytes_per_token == 2 * 2 * 16 * 4  # one layer of three has KV
    assert facts.recurrent_bytes == 2 * 4 * (3 * 64 + 4 * 8 * 8)
    limits = other_engine().limits
    sizes = {"vocab_size": VOCAB, "kv_bytes_per_token": 256, "verify_width": 5, "recurrent_bytes": 1000}
    for cached, of_page in ((True, 8 * 256 + 1000), (False, 8 * 256)):
        rows, pages = (3 + 1 + 3 * 5) * 1000, 7
        for spare in (0, -1):
            config = EngineConfig(
                page_size=8, max_running=3, prefix_cache=cached, kv_memory_bytes=rows + pages * of_page + spare
            )
            assert num_kv_pages(config, limits, **sizes) == pages + spare
    with pytest.raises(ValueError, match=r"kv_memory_bytes=19000 \(3048 bytes a page, 19000 that rows keep beside"):
        num_kv_pages(EngineConfig(page_size=8, max_running=3, kv_memory_bytes=19000), limits, **sizes)


def test_workers_that_cannot_run_it_say_so():
    target = hybrid("mamba2")
    with pytest.raises(
        ValueError, match="read and trained for Llama-family models, this one is shaped by HybridConfig"
    ):
        module_shapes(target)
    with pytest.raises(ValueError, match=r"kv_layers=\(1, 0\) must be among \(1,\), the target's layers that have KV"):
        frozen_kv_mtp(target, random_assistant(target, kv_layers=(1, 0)))


@pytest.mark.parametrize("name", WORKERS)
def test_the_state_is_committed_before_publish_or_after(name):
    """By the program that PUBLISHES, but DSpark's by the one behind it: the other leaves the state as it was."""
    worker = WORKERS[name]("mamba2")
    device = jax.eval_shape(lambda: worker.init(DeviceSizes(num_rows=3, num_pages=8, pages_per_row=4, page_size=8)))
    upload = jax.ShapeDtypeStruct((2, DECODE_COLUMNS + 1 + sum(worker.input_words)), jnp.int32)
    depth = worker.depths[-1]

    def verify(params, device, upload):
        inputs = unpack_decode(upload, words=worker.input_words)
        out = worker.verify_phase(params, device, inputs, table_width=4, depth=depth)
        return out.device, out.handoff

    def commit(params, device, upload, handoff):
        inputs = unpack_decode(upload, words=worker.input_words)
        return worker.commit_phase(params, device, inputs, handoff, table_width=4)

    given = (worker.params, device, upload)
    _, handoff = jax.eval_shape(verify, *given)
    by_first = moved(verify, *given)
    by_second = worker.commit_phase is not None and moved(commit, *given, handoff)
    assert (by_first, by_second) == ((False, True) if name == "dspark" else (True, False))


def test_other_targets_pay_nothing():
    """No leaf more in the device state."""
    assert other_engine()._loop.device.recurrent == ()
