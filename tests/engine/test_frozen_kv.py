"""FROZEN_KV_MTP under overlap: a draft that reads the target's KV and writes none says what plain decoding says."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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

from jspec import EngineConfig
from jspec.models.draft_files import load_draft, save_draft
from jspec.models.frozen_kv_draft import FrozenKVConfig, frozen_kv_draft, frozen_param_shapes
from jspec.models.tensor_files import CONFIG
from jspec.spec_workers import EagleSizes, build_worker, frozen_kv_mtp
from jspec.spec_workers.forward import prefill_batch
from jspec.spec_workers.frozen_kv_mtp import frozen_batch

TOKENS = 24


def random_assistant(target, seed: int = 0, *, token_ids=None, **changes):
    facts = target.facts
    sizes = {
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size if token_ids is None else len(token_ids),
        "target_hidden_size": facts.hidden_size,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_heads": 4,
        "num_kv_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "context_len": facts.context_len,
        "kv_layers": (facts.kv_layers[-1], facts.kv_layers[0]),
    }
    config = FrozenKVConfig(**(sizes | changes))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, leaf.shape[-1] ** -0.5, leaf.shape) + (leaf.ndim == 1), jnp.float32),
        frozen_param_shapes(config),
    )
    return frozen_kv_draft(config, params, embed=target.embedding(target.params), token_ids=token_ids)


def often_right(target):
    """An assistant that knows what most often follows each token: it sees the token, and nothing that its layers say of the context."""
    size = target.facts.hidden_size
    draft = random_assistant(target, hidden_size=size)
    counts = np.zeros((VOCAB, VOCAB))
    for prompt in (prompt for count in (1, 3, 8) for prompt in prompts_of(count, seed=count)):
        text = [prompt[-1], *transformer_continuation(tuple(prompt))]
        np.add.at(counts, (text[:-1], text[1:]), 1)
    embed = np.asarray(target.embedding(target.params))
    head = np.zeros((VOCAB, size), np.float32)
    np.add.at(head, counts.argmax(axis=1), embed / np.linalg.norm(embed, axis=1, keepdims=True))
    own = dict(draft.params["own"])
    own["pre"] = jnp.asarray(np.concatenate([np.eye(size), np.zeros((size, size))], axis=1), jnp.float32)
    own["head"] = jnp.asarray(head * 50)
    for i in range(len(draft.config.kv_layers)):
        own[f"layer_{i}"] = own[f"layer_{i}"] | {name: 0 * own[f"layer_{i}"][name] for name in ("o", "down")}
    return draft._replace(params=draft.params | {"own": own})


SHAPES = {
    "chain": EagleSizes(num_steps=4),
    "tree": EagleSizes(num_steps=3, topk=2, num_draft_tokens=8),
    "wide tree": EagleSizes(num_steps=4, topk=4, num_draft_tokens=16),
}
FAST = [("chain", 1, True), ("chain", 16, False), ("tree", 4, True)]


@pytest.mark.parametrize(
    ("shape", "page_size", "overlap"),
    [
        pytest.param(shape, page, overlap, marks=() if (shape, page, overlap) in FAST else pytest.mark.slow)
        for shape in SHAPES
        for page in (1, 4, 16, 64)
        for overlap in (True, False)
    ],
)
def test_greedy_equals_full_recompute(shape, page_size, overlap):
    """Batches of 1, 3 and 8, with a draft that is often right and sometimes wrong."""
    worker = frozen_kv_mtp(transformer(), often_right(transformer()), sizes=SHAPES[shape])
    engine = build(transformer(), worker=worker, page_size=page_size, overlap=overlap, max_running=8)
    for count in (1, 3, 8):
        prompts = prompts_of(count, seed=count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
            assert output.token_ids == transformer_continuation(tuple(prompt))
        assert_idle(engine)
    summary = engine.summary()
    assert 1.3 < summary.accept_length < worker.output_stride and summary.compiles_after_warmup == 0


def hearing(target, wrong_after=()):
    """An assistant of M1 that goes by hidden states alone: the target's tells it the last accepted token, its own the one it was asked about before."""
    follows, wrong = jnp.asarray(markov_table()), jnp.isin(jnp.arange(VOCAB), jnp.asarray(wrong_after, jnp.int32))
    embed = target.embedding(target.params)

    def forward(params, token_ids, hidden, batch, kv_pages, *, pool_layers):
        token = follows[jnp.argmax(hidden @ embed.T, axis=-1)]
        said = jnp.where(wrong[token], (follows[token] + 1) % VOCAB, follows[token])
        return jax.nn.one_hot(said, VOCAB), embed[token]

    return random_assistant(target)._replace(forward=forward, logits=lambda params, x: x)


@pytest.mark.parametrize(
    ("shape", "overlap"), [("chain", True), ("tree", False), pytest.param("chain", False, marks=pytest.mark.slow)]
)
def test_known_accept_lengths(shape, overlap):
    """Right, wrong and mixed, by hand: what it hears is the hidden state of the last accepted token, whichever that is, and along a path its own."""
    sizes = SHAPES[shape]
    worker = frozen_kv_mtp(markov(), hearing(markov(), wrong_tokens()), sizes=sizes)
    lens_of = functools.partial(oracle_accept_lens, width=sizes.num_steps + 1)
    assert_known_lens(worker, lens_of, overlap=overlap)


@pytest.mark.parametrize("shape", SHAPES)
def test_hostile_drafts_change_nothing(shape):
    """A random one, one of NaN, and one with a head of centroids, beside sampled requests; near its context's end a draft proposes nothing."""
    prompts, params = prompts_of(6, seed=5, shortest=4), mixed_params(TOKENS)
    plainly = build(transformer(), "plain", max_running=8)
    alone = [output.token_ids for output in plainly.generate(prompts, params)]
    draft = random_assistant(transformer(), 1, num_centroids=16, top_centroids=3, context_len=40)
    broken = random_assistant(transformer(), 2)
    broken = broken._replace(params=broken.params | {"own": jax.tree.map(lambda x: x * np.nan, broken.params["own"])})
    for one in (draft, broken) if shape == "chain" else (draft,):
        engine = build(transformer(), worker=frozen_kv_mtp(transformer(), one, sizes=SHAPES[shape]), max_running=8)
        assert [output.token_ids for output in engine.generate(prompts, params)] == alone
        assert_idle(engine)


def test_the_draft_sees_the_committed_prefix_and_nothing_else():
    """Every query stands at the last token that has KV. Against attention in NumPy over KV read from the pool; what lies past the prefix is NaN."""
    target, draft = transformer(), random_assistant(transformer(), 3)
    one, table = jnp.ones(1, jnp.int32), jnp.asarray([[3, 1, 2, 4]], jnp.int32)
    tokens = jnp.arange(5, 15, dtype=jnp.int32)
    batch, _ = prefill_batch(tokens, one, one - 1, 10 * one, table, page_size=4)
    out = target.forward(target.params, batch, target.init_kv(4, 4))
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(3, target.facts.hidden_size)), jnp.float32)
    ids = jnp.asarray([7, 8, 9], jnp.int32)

    def run(pages, width):
        asked = frozen_batch(one, 10 * one, table, width=width)
        return draft.forward(
            draft.params, ids[:width], hidden[:width], asked, pages, pool_layers=draft.config.kv_layers
        )

    x, after = run(out.kv_pages, 3)
    for i in range(3):  # each as if it were alone
        alone = draft.forward(
            draft.params, ids[i : i + 1], hidden[i : i + 1], frozen_batch(one, 10 * one, table, width=1), out.kv_pages,
            pool_layers=draft.config.kv_layers,
        )  # fmt: skip
        np.testing.assert_allclose(x[i], alone[0][0], atol=1e-5)
        np.testing.assert_allclose(after[i], alone[1][0], atol=1e-5)
    # Ten tokens fill two pages and a half; the rest is NaN.
    past = np.ones((5, 4), bool)
    past[[3, 1]], past[2, :2] = False, False
    nothing = jnp.where(past[None, :, None, :, None], jnp.nan, out.kv_pages)
    np.testing.assert_array_equal(run(nothing, 3)[0], x)
    shorter = target.forward(target.params, batch, target.init_kv(4, 4))
    before = frozen_batch(one, 9 * one, table, width=3)
    other = draft.forward(draft.params, ids, hidden, before, shorter.kv_pages, pool_layers=draft.config.kv_layers)
    assert np.abs(np.asarray(other[0]) - np.asarray(x)).max() > 1e-3, "the last token of the prefix counts"


@pytest.mark.parametrize("width", [1, 3, 32])
def test_a_question_reads_up_to_the_frontier(width):
    """Of a row of few tokens, too, and nothing of a padding row."""
    lens, rows = jnp.arange(40, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)
    asked = frozen_batch(rows, lens, jnp.zeros((40, 1), jnp.int32), width=width)
    np.testing.assert_array_equal(asked.prefix_lens + asked.extend_lens, lens)
    np.testing.assert_array_equal(asked.extend_lens, np.minimum(lens, width))
    np.testing.assert_array_equal(asked.positions.reshape(40, width)[1:], np.repeat(lens[1:, None] - 1, width, axis=1))
    assert not asked.slots.any()
    if width > 1:
        seen = (np.asarray(asked.ancestors)[:, :, None] >> np.arange(width)) & 1 == 1
        assert (seen[1:] == (np.arange(width) < asked.extend_lens[1:, None, None])).all()


def test_chunks_tails_retraction_and_prefix_hits_change_nothing():
    assert_schedules_change_nothing(frozen_kv_mtp(transformer(), often_right(transformer()), sizes=SHAPES["tree"]))


@pytest.mark.parametrize("changes", [{}, {"num_centroids": 8, "token_ids": tuple(range(0, VOCAB, 2)), "rotary_dim": 8}])
def test_an_assistant_is_saved_and_loaded(tmp_path, changes):
    draft = random_assistant(transformer(), **changes)
    save_draft(tmp_path, draft, transformer())
    again = load_draft(tmp_path, transformer())
    assert again.config == draft.config
    jax.tree.map(np.testing.assert_array_equal, again.params, draft.params)
    worker = build_worker(transformer(), EngineConfig(algorithm="frozen-kv-mtp", draft=str(tmp_path), num_steps=2))
    assert worker.verify_width == 3 and worker.commit_phase is None and worker.draft_kv_bytes_per_token == 0


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"target_hidden_size": 32}, ["target_hidden_size=32 must be the target's 64"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads=1 must be the target's 2"]),
        ({"assistant_config": {"kv_layers": [0, 2]}}, ["kv_layers=[0, 2] must be among [0, 1]"]),
        ({"assistant_config": {"kv_layers": [0]}}, ["kv_layers=[0] must be a list", "2"]),
        ({"assistant_config": None}, ["kv_layers=None"]),
        ({"assistant_config": {"kv_layers": [0, 1], "num_centroids": 7}}, ["num_centroids=7 must divide"]),
        ({"hidden_size": 32}, ["has shape", "its config says"]),
    ],
)
def test_a_bad_assistant_names_its_field(tmp_path, changes, pieces):
    save_draft(tmp_path, random_assistant(transformer()), transformer())
    file = tmp_path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError) as error:
        load_draft(tmp_path, transformer())
    assert all(piece in str(error.value) for piece in (str(tmp_path), *pieces)), str(error.value)
