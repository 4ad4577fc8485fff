"""The forward on its own: what it depends on, what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.paging import PAGE_SIZE, PagedRows

from jspec.models.llama import LlamaConfig, llama_target, rms_norm
from jspec.models.tiny import random_params, random_target
from jspec.state.batches import ForwardBatch, ForwardMode

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_len=64,
)


@functools.cache
def target():
    return random_target(0)


@functools.cache
def small_target():
    return llama_target(CONFIG, random_params(3, CONFIG))


def test_chunking_does_not_change_logits():
    tokens = np.random.default_rng(0).integers(0, 64, 12).tolist()
    (whole,), (captured,), _ = PagedRows(target(), 1).forward([tokens])
    assert captured.shape == (12, 0, 64)
    rows = PagedRows(target(), 1, seed=7)
    parts = [
        rows.forward([tokens[:5]]),
        rows.forward([tokens[5:6]], width=1),
        rows.forward([tokens[6:8]], width=3),
        rows.forward([tokens[8:]]),
    ]
    np.testing.assert_allclose(np.concatenate([logits[0] for logits, _, _ in parts]), whole, atol=1e-4)


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, n).tolist() for n in (5, 9, 2)]
    together = PagedRows(target(), 3).forward(prompts)[0]
    swapped = PagedRows(target(), 3).forward(prompts[::-1])[0][::-1]
    for a, b in zip(together, swapped, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_tree_nodes_see_their_own_path_only():
    prompt, root, left, right = [3, 1, 4, 1, 5], 9, 2, 6
    rows = PagedRows(target(), 1)
    rows.forward([prompt])
    batch = ForwardBatch(
        input_ids=jnp.asarray([root, left, right], jnp.int32),
        positions=jnp.asarray([5, 6, 6], jnp.int32),
        slots=jnp.asarray(rows.slots(0, np.arange(5, 8))),
        rows=jnp.asarray([1], jnp.int32),
        prefix_lens=jnp.asarray([5], jnp.int32),
        extend_lens=jnp.asarray([3], jnp.int32),
        page_table=jnp.asarray(rows.page_table),
        ancestors=jnp.asarray([[0b001, 0b011, 0b101]], jnp.uint32),
        forward_mode=ForwardMode.TARGET_VERIFY,
        query_len=3,
    )
    tree, _ = rows.run(target().params, batch, rows.kv_pages, ())
    for node, branch in ((1, left), (2, right)):
        (chain,), _, _ = PagedRows(target(), 1).forward([[*prompt, root, branch]])
        np.testing.assert_allclose(tree[node], chain[-1], atol=1e-4)


def test_captures_come_in_the_order_asked_and_the_last_one_leads_to_hidden():
    (_,), (captured,), (hidden,) = PagedRows(small_target(), 1).forward([[1, 2, 3]], capture_layers=(1, 0, 1))
    assert captured.shape == (3, 3, 16)
    np.testing.assert_array_equal(captured[:, 0], captured[:, 2])
    assert np.abs(captured[:, 0] - captured[:, 1]).max() > 0.1
    np.testing.assert_allclose(
        rms_norm(captured[:, 0], np.ones(16, np.float32), CONFIG.rms_norm_eps), hidden, atol=1e-5
    )


def test_bfloat16_stays_near_float32():
    exact, rough = target(), random_target(0, dtype=jnp.bfloat16)
    assert rough.facts.kv_bytes_per_token * 2 == exact.facts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    pages = jax.eval_shape(lambda: rough.init_kv(4, PAGE_SIZE))
    assert pages.dtype == jnp.bfloat16
    (a,), _, _ = PagedRows(exact, 1).forward([[7, 8, 9]])
    (b,), _, _ = PagedRows(rough, 1).forward([[7, 8, 9]])
    assert 0 < np.abs(a - b).max() < 0.05 * np.abs(a).max()


def test_logits_take_any_leading_shape():
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 16))
    logits = small_target().logits(small_target().params, hidden)
    assert logits.shape == (2, 3, 32) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[1, 2], small_target().params["head"] @ hidden[1, 2], atol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_target_refuses_unknown_kernels_and_wrong_params():
    params = random_params(3, CONFIG)
    with pytest.raises(ValueError, match="kernels='cuda' is unknown: choose one of"):
        llama_target(CONFIG, params, kernels="cuda")
    with pytest.raises(ValueError, match=r"params\['head'\] is missing"):
        llama_target(CONFIG, {name: leaf for name, leaf in params.items() if name != "head"})
    with pytest.raises(ValueError, match=r"params\['extra'\] is not a parameter of this config"):
        llama_target(CONFIG, params | {"extra": params["head"]})
    with pytest.raises(
        ValueError, match=r"params\['head'\] is float32\[31, 16\]; this config and dtype want float32\[32, 16\]"
    ):
        llama_target(CONFIG, params | {"head": params["head"][1:]})
    with pytest.raises(ValueError, match=r"is float32\[.*; this config and dtype want bfloat16"):
        llama_target(CONFIG, params, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"capture_layers=\(2,\) must lie in 0..1"):
        PagedRows(llama_target(CONFIG, params), 1).forward([[1]], capture_layers=(2,))
