"""UNO under overlap: two passes of one model say what plain decoding says, whatever its adapter."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from engine import laws
from engine.kit import (
    CONTEXT,
    VOCAB,
    assert_idle,
    assert_known_lens,
    assert_schedules_change_nothing,
    build,
    greedy,
    markov,
    markov_continuation,
    markov_table,
    mixed_params,
    prompts_of,
    transformer,
    transformer_continuation,
    wrong_tokens,
)

from jspec import EngineConfig, SamplingParams
from jspec.models.lora import MODULES, Lora, LoraConfig, fuse_lora, init_lora, load_lora, save_lora
from jspec.models.tiny import bigram_target, random_target
from jspec.spec_workers import VerifyKind, build_worker, plain, uno
from jspec.spec_workers.forward import prefill_batch

TOKENS, BLOCK = 24, 4
SHAPES = {"chain": {}, "tree": {"topk": 2, "num_draft_tokens": 6}, "wide tree": {"topk": 6, "num_draft_tokens": 32}}


def random_parts(config: LoraConfig, target, seed: int = 0, spread: float = 0.2):
    rng = np.random.default_rng(seed)
    parts = init_lora(jax.random.key(0), config, target)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, spread, x.shape), jnp.float32), parts)


def random_lora(target, seed: int = 0, **options) -> Lora:
    config = LoraConfig(**{"rank": 2, "alpha": 4.0, "block_size": BLOCK, **options})
    return Lora(config, fuse_lora(config, random_parts(config, target, seed), target, jnp.float32))


def foreseeing(target, table, *, wrong_after=()):
    """`target`, whose adapted rows propose what a table says follows the pending token, whatever the noise; after some tokens something wrong, and what is
    right in the second place."""
    follows, wrong = jnp.asarray(table, jnp.int32), jnp.isin(jnp.arange(VOCAB), jnp.asarray(wrong_after, jnp.int32))
    # What the head of a table's target is shown of a token.
    shown = target.embedding(target.params) / np.sqrt(1 / VOCAB + target.config.rms_norm_eps)

    def forward_adapted(params, adapter, adapted, batch, kv_pages, *, recurrent):
        out = target.forward_adapted(params, adapter, adapted, batch, kv_pages, recurrent=recurrent)
        token = batch.input_ids.reshape(-1, batch.query_len)[:, 0]
        rows = [shown[token]]
        for _ in range(batch.query_len - 1):
            token = follows[token]
            right, other = shown[token], shown[(token + 1) % VOCAB]
            rows.append(jnp.where(wrong[token][:, None], 0.6 * other + 0.4 * right, 0.6 * right + 0.4 * other))
        hidden = jnp.stack(rows, axis=1).reshape(out.hidden.shape)
        return out._replace(hidden=jnp.where(adapted[:, None], hidden, out.hidden))

    return target._replace(forward_adapted=forward_adapted)


def assert_greedy(engine, counts=(1, 3, 8)) -> set[int]:
    """Returns the accept lengths that came up, but for those of last steps, which are cut short."""
    lens: set[int] = set()
    for count in counts:
        prompts = prompts_of(count, seed=count)
        for prompt, output in zip(prompts, engine.generate(prompts, greedy(TOKENS)), strict=True):
            assert output.token_ids == transformer_continuation(tuple(prompt))
            assert len(output.token_ids) == 1 + sum(output.accept_lens) and min(output.accept_lens[:-1]) >= 2
            lens |= set(output.accept_lens[:-1])
        assert_idle(engine)
    return lens


FAST = [("chain", 1, True), ("tree", 16, False)]


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
    worker = uno(transformer(), random_lora(transformer()), **SHAPES[shape])
    engine = build(transformer(), worker=worker, page_size=page_size, overlap=overlap, max_running=8)
    assert {2, 3} <= assert_greedy(engine), "the adapter was never right, or always: the test shows little"
    assert engine.summary().compiles_after_warmup == 0


def known_lens(token: int, num_tokens: int) -> list[int]:
    """By hand: the root is right; the proposal after token `t` is right unless `t` is one of the wrong ones."""
    text, wrong = [token, *markov_continuation(token, num_tokens + 2 * BLOCK)], wrong_tokens()
    lens, emitted = [], 1
    while emitted < num_tokens:
        run = 2
        while run < BLOCK + 1 and text[emitted + run - 1] not in wrong:
            run += 1
        lens.append(min(run, num_tokens - emitted))
        emitted += run
    return lens


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_known_accept_lengths(overlap):
    target = foreseeing(markov(), markov_table(), wrong_after=wrong_tokens())
    assert_known_lens(uno(target, random_lora(markov())), known_lens, overlap=overlap)


def test_a_tree_holds_what_the_chain_misses():
    """The first two of every row are in the tree, one of them is right: every verify accepts all there is, where the chain goes wrong."""
    target = foreseeing(markov(), markov_table(), wrong_after=wrong_tokens())
    every = sum(2**depth for depth in range(BLOCK))
    worker = uno(target, random_lora(markov()), topk=2, num_draft_tokens=every)
    engine = build(markov(), worker=worker, page_size=4, max_running=8)
    prompts = prompts_of(6, seed=6)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(1 + 4 * (BLOCK + 1))), strict=True):
        assert output.token_ids == markov_continuation(prompt[-1], 1 + 4 * (BLOCK + 1))
        assert output.accept_lens == [BLOCK + 1] * 4
    assert_idle(engine)


def test_the_adapter_touches_its_rows_only():
    """Base rows bit for bit those of the plain forward, hidden state and KV; adapted rows are not."""
    target, lora = transformer(), random_lora(transformer())
    one, table = jnp.ones(1, jnp.int32), jnp.arange(1, 4, dtype=jnp.int32)[None]
    batch, _ = prefill_batch(jnp.arange(10, dtype=jnp.int32), one, one - 1, 10 * one, table, page_size=4)
    kv = target.init_kv(3, 4)
    plainly = target.forward(target.params, batch, kv)
    adapted = jnp.arange(batch.input_ids.shape[0]) >= 6
    mixed = target.forward_adapted(target.params, lora.params, adapted, batch, kv)
    np.testing.assert_array_equal(mixed.hidden[:6], plainly.hidden[:6])
    assert (np.abs(mixed.hidden[6:10] - plainly.hidden[6:10]).max(axis=1) > 1e-3).all()
    nobody = target.forward_adapted(target.params, lora.params, jnp.zeros_like(adapted), batch, kv)
    jax.tree.map(np.testing.assert_array_equal, nobody, plainly)


SOME = ["tree", pytest.param("chain", marks=pytest.mark.slow)]


@pytest.mark.parametrize("shape", SOME)
def test_chunks_tails_retraction_and_prefix_hits_change_nothing(shape):
    assert_schedules_change_nothing(uno(transformer(), random_lora(transformer()), **SHAPES[shape]))


@pytest.mark.parametrize("shape", SOME)
def test_the_context_can_be_filled_to_its_end(shape):
    worker = uno(foreseeing(markov(), markov_table()), random_lora(markov()), **SHAPES[shape])
    engine = build(markov(), worker=worker)
    output = engine.generate([[1] * (CONTEXT - 30)], greedy(60))[0]
    assert output.finish_reason == "length" and output.token_ids == markov_continuation(1, 30)


WISHES = [
    *mixed_params(TOKENS),
    SamplingParams(max_new_tokens=TOKENS, repetition_penalty=1.4, frequency_penalty=0.3, temperature=0.9, seed=3),
    SamplingParams(max_new_tokens=TOKENS, presence_penalty=0.8, logit_bias={5: 2.0}),
    SamplingParams(max_new_tokens=TOKENS, logprobs=2),
]


@pytest.mark.parametrize("shape", SOME)
def test_every_wish_is_honoured_as_by_plain_decoding(shape):
    """Sampling, penalties, biases, log-probabilities, in one batch: root and run alike."""
    prompts = prompts_of(len(WISHES), seed=5, shortest=4)
    alone = build(transformer(), worker=plain(transformer()), overlap=False, max_running=1)
    told = [alone.generate([prompt], params)[0] for prompt, params in zip(prompts, WISHES, strict=True)]
    worker = uno(transformer(), random_lora(transformer()), **SHAPES[shape])
    engine = build(transformer(), worker=worker, max_running=16)
    for found, want in zip(engine.generate(prompts, WISHES), told, strict=True):
        assert found.token_ids == want.token_ids
        for ours, theirs in zip(found.logprobs or [], want.logprobs or [], strict=True):
            assert ours.token_id == theirs.token_id and ours.top.keys() == theirs.top.keys()
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    assert_idle(engine)


@pytest.mark.parametrize("filters", ["plain", pytest.param("top-k and top-p", marks=pytest.mark.slow)])
def test_rejection_keeps_the_joint_law_of_four_tokens(filters):
    """20,000 requests, each its own seed, entering and leaving a batch of 64."""
    target, draws = bigram_target(laws.TABLE, num_layers=1, num_heads=1, context_len=64), 20_000
    worker = uno(target, random_lora(target, block_size=3), rejection_sampling=True)
    engine = build(target, worker=worker, max_running=64, checked=False, page_size=4)
    params = [SamplingParams(max_new_tokens=laws.TOKENS, seed=s, **laws.FILTERS[filters]) for s in range(draws)]
    outputs = engine.generate([[1]] * draws, params)
    laws.assert_law([o.token_ids for o in outputs], laws.joint(1, laws.FILTERS[filters]), draws)


# --- files -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [MODULES, ("q_proj", "v_proj", "up_proj"), ("o_proj",)])
def test_an_adapter_is_saved_and_loaded(tmp_path, modules):
    config = LoraConfig(rank=3, alpha=6.0, modules=modules, base="some", block_size=5)
    parts = random_parts(config, transformer())
    save_lora(tmp_path, config, parts)
    again = load_lora(tmp_path, transformer(), base="some")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, again.params, fuse_lora(config, parts, transformer(), jnp.float32))


@pytest.mark.parametrize(("storage", "atol"), [("bfloat16", 0.01), ("int8", 0.02)])
def test_an_adapter_is_stored_narrower(tmp_path, storage, atol):
    config = LoraConfig(rank=3, alpha=3.0, block_size=5)
    parts = random_parts(config, transformer())
    save_lora(tmp_path, config, parts, storage=storage)
    whole = fuse_lora(config, parts, transformer(), jnp.float32)
    near = functools.partial(np.testing.assert_allclose, atol=atol)
    jax.tree.map(near, load_lora(tmp_path, transformer()).params, whole)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_with_a_value_that_is_not_finite(tmp_path, value):
    config = LoraConfig(rank=2, alpha=4.0, block_size=4)
    parts = random_parts(config, transformer())
    save_lora(tmp_path, config, parts)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name][0, 0] = value
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ValueError, match=f"{name}.* holds 1 values that are NaN or infinite"):
        load_lora(tmp_path, transformer())
    parts["layer_0"]["q_proj"]["a"] = parts["layer_0"]["q_proj"]["a"].at[0, 0].set(value)
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.weight.* NaN or infinite"):
        save_lora(tmp_path / "new", config, parts)
    assert not (tmp_path / "new").exists()


def test_fused_parts_are_what_the_parts_do():
    """A product with the fused adapter, against each module on its own."""
    config = LoraConfig(rank=3, alpha=6.0, modules=("q_proj", "v_proj"))
    parts = random_parts(config, transformer())
    fused = fuse_lora(config, parts, transformer(), jnp.float32)["layer_1"]["qkv"]
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    own = {name: 2.0 * x @ np.asarray(pair["a"]).T @ np.asarray(pair["b"]).T for name, pair in parts["layer_1"].items()}
    want = np.concatenate([own["q_proj"], np.zeros((5, 32), np.float32), own["v_proj"]], axis=1)
    np.testing.assert_allclose(x @ np.asarray(fused["a"]).T @ np.asarray(fused["b"]).T, want, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"r": 0}, ["r=0 must be at least 1"]),
        ({"r": 5}, ["lora_A.weight", "its config says"]),
        ({"lora_alpha": -1}, ["lora_alpha=-1.0 must be positive"]),
        ({"target_modules": ["q_proj", "lm_head"]}, ["target_modules=['q_proj', 'lm_head']"]),
        ({"use_dora": True}, ["use_dora=True is not implemented"]),
        ({"base_model_name_or_path": "other"}, ["base_model_name_or_path='other' must be 'some'"]),
        ({"uno_config": {"block_size": 1}}, ["block_size=1 must be at least 2"]),
        ({"target_modules": "all-linear"}, ["target_modules='all-linear' is missing or of another type"]),
    ],
)
def test_a_bad_adapter_names_its_field(tmp_path, changes, pieces):
    config = LoraConfig(rank=2, alpha=4.0, base="some", block_size=4)
    save_lora(tmp_path, config, random_parts(config, transformer()))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError) as error:
        load_lora(tmp_path, transformer(), base="some")
    assert all(piece in str(error.value) for piece in (str(tmp_path), *pieces)), str(error.value)


def test_an_adapter_of_another_base_and_a_missing_one(tmp_path):
    config = LoraConfig(rank=2, alpha=4.0, block_size=4)
    save_lora(tmp_path, config, random_parts(config, transformer()))
    with pytest.raises(ValueError, match="has shape"):
        load_lora(tmp_path, random_target(0, vocab_size=VOCAB, hidden_size=32))
    with pytest.raises(ValueError, match="holds tensor"):
        load_lora(tmp_path, random_target(0, vocab_size=VOCAB, num_layers=1))
    with pytest.raises(FileNotFoundError, match="gone does not exist: give the directory of an adapter"):
        load_lora(tmp_path / "gone", transformer())
    config = EngineConfig(algorithm="uno", draft=str(tmp_path), num_draft_tokens=6)
    assert build_worker(transformer(), config).alloc_len == 7
    config = EngineConfig(algorithm="uno", draft=str(tmp_path), topk=3, num_draft_tokens=9)
    worker = build_worker(transformer(), config)
    assert (worker.verify_width, worker.output_stride, worker.alloc_len) == (9, 5, 10)
    assert worker.verify_kind is VerifyKind.TREE and worker.num_non_draft_tokens == 2


def test_an_adapter_says_which_model_it_is_for(tmp_path):
    """As `jspec train uno` names it; a model elsewhere may be called anything."""
    known = {"SmolLM2-135M-Instruct.Q4_1": "smollm2", "other": "a/path"}
    for base, model in known.items():
        config = LoraConfig(rank=2, alpha=4.0, block_size=4, base=base)
        save_lora(tmp_path, config, random_parts(config, transformer()))
        assert (
            build_worker(transformer(), EngineConfig(algorithm="uno", draft=str(tmp_path), model=model)).alloc_len == 5
        )
    with pytest.raises(ValueError, match="base_model_name_or_path='other' must be 'SmolLM2"):
        build_worker(transformer(), EngineConfig(algorithm="uno", draft=str(tmp_path), model="smollm2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"block_size": 33}, "block_size=33 must be at least 2.* at most 32"),
        ({"topk": 0}, "topk=0 must be at least 1"),
        ({"num_draft_tokens": 6}, "num_draft_tokens=6 must be block_size=4 for a chain"),
        ({"topk": 2, "num_draft_tokens": 3}, r"num_draft_tokens=3 must lie in \[4, 15\]"),
        ({"topk": 2, "num_draft_tokens": 16}, r"num_draft_tokens=16 must lie in \[4, 15\]"),
        ({"topk": 4, "num_draft_tokens": 33}, r"num_draft_tokens=33 must lie in \[4, 32\]"),
        ({"topk": VOCAB + 1}, "topk=65 exceeds the 64 tokens"),
        ({"topk": 2, "rejection_sampling": True}, "rejection_sampling=True needs topk=1"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        uno(transformer(), random_lora(transformer()), **options)


def test_a_target_that_takes_no_adapter():
    with pytest.raises(ValueError, match="takes an adapter"):
        uno(transformer()._replace(forward_adapted=None), random_lora(transformer()))
